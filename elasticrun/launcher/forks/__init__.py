"""How a replica comes to be: forked from a process that has imported torch."""
