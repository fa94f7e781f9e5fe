"""Checkpoints: what they hold, how they are written safely and found again."""
