"""Several machines in one job."""
