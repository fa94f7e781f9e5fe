"""The job as one replica sees it, and the functions that scripts call."""
