"""Where checkpoints are kept, a directory or an object store, and who owns it."""
