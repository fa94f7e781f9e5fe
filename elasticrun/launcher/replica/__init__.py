"""What runs in a replica's process around the user's program."""
