"""From a boundary to a committed checkpoint, and from the newest one to the start."""
