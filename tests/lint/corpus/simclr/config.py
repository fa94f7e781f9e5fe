from dataclasses import dataclass, field
from typing import Tuple

from elasticrun import world_size


@dataclass
class OptimConfig:
    lr: float = 0.3
    momentum: float = 0.9
    weight_decay: float = 1e-6
    warmup_epochs: int = 10


@dataclass
class Config:
    root: str = "./data"
    out: str = "./out"
    epochs: int = 400
    batch_size: int = 512
    workers: int = 8
    temperature: float = 0.5
    feature_dim: int = 128
    crop: Tuple[float, float] = (0.2, 1.0)
    knn_k: int = 200
    eval_every: int = 5
    optim: OptimConfig = field(default_factory=OptimConfig)

    @property
    def scaled_lr(self):
        # linear scaling rule
        return self.optim.lr * self.batch_size * world_size() / 256  # MISTAKE: world: batch_size is global already, so the rate changes with the number of replicas (or line with: from elasticrun import world_size)

    @property
    def run_name(self):
        return f"{self.feature_dim}_{self.temperature}_{self.batch_size}_{self.epochs}"
