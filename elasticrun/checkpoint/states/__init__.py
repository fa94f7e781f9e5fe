"""How one state becomes bytes and comes back."""
