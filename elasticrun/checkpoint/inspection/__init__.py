"""`elasticrun checkpoints`: shows what checkpoints hold."""
