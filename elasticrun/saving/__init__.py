"""Saving from a boundary to a checkpoint, and loading at the start."""
