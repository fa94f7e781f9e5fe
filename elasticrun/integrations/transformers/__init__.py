"""transformers: a Trainer whose training goes on where it was, at any world size."""

from elasticrun.integrations.transformers.trainer import ElasticMixin, ElasticTrainer

__all__ = ["ElasticMixin", "ElasticTrainer"]
