"""Other frameworks: import the one that you use by its name."""
