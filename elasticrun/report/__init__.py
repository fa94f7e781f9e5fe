"""A page that shows what became of a job."""
