"""How the commands and a running job talk."""
