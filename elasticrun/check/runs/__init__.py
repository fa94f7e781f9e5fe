"""Taking a program through restarts."""
