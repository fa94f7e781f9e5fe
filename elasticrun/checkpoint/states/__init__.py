"""How a state is written to bytes and read back."""
