"""`elasticrun check`: runs a script with and without restarts, and compares."""
