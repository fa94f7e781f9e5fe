"""The launcher: starts replicas on this machine, restarts and rescales them."""
