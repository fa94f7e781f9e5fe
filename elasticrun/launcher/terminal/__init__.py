"""What the launcher shows on a terminal, and keeps in log files."""
