"""What runs in a replica before, beside and after the program."""
