"""Bytes on a disk, and in memory on their way there."""
