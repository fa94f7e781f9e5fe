"""`elasticrun report`: a page that shows the history of a job."""
