"""How commands talk to a running job."""
