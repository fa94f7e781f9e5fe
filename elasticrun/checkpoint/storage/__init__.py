"""Where checkpoints are kept, a directory or an object store; their locks."""
