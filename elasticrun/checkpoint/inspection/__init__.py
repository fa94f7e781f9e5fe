"""What checkpoints hold, for people: the command `elasticrun checkpoints`."""
