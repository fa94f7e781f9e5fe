"""Batch sizes that follow the noise of gradients: the arithmetic alone."""
