"""The launcher's own process, which keeps a job running."""
