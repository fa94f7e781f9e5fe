"""transformers: a Trainer that resumes, at any world size."""

from elasticrun.integrations.transformers.trainer import ElasticMixin, ElasticTrainer

__all__ = ["ElasticMixin", "ElasticTrainer"]
