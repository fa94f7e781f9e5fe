"""Checkpoints: what is saved, how it becomes durable, and how it is found again."""
