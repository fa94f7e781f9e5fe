"""Frameworks; each is imported by its name, and needs that framework."""
