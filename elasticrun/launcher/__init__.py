"""The launcher: starts replicas on this machine, and restarts them when asked."""
