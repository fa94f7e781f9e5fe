"""Lightning: a Trainer whose fit goes on where it was, at any number of devices."""

from elasticrun.integrations.lightning.callback import Elastic, patch

__all__ = ["Elastic", "patch"]
