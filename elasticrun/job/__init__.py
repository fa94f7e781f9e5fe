"""The job: one replica's view of the whole training, and what users write around it."""
