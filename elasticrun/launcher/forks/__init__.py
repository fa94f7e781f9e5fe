"""Forking replicas from a process that has imported torch."""
