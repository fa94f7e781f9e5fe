"""Which sample comes when, and on which replica: arithmetic only."""
