"""Lightning: a Trainer whose fit resumes, at any number of devices."""

from elasticrun.integrations.lightning.callback import Elastic, patch

__all__ = ["Elastic", "patch"]
