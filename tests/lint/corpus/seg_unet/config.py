"""All settings of one experiment; each may be overridden as key=value on the command line."""
import sys
from dataclasses import dataclass, fields


@dataclass
class Config:
    data: str = "data/acdc"
    snapshot: str = "snapshots/unet"
    classes: int = 4
    patch: int = 224
    batch_size: int = 24
    base_lr: float = 0.01
    max_epochs: int = 200
    val_every: int = 2
    workers: int = 8
    seed: int = 1337
    amp: bool = True

    @classmethod
    def from_argv(cls):
        cfg = cls()
        kinds = {f.name: f.type for f in fields(cls)}
        for item in sys.argv[1:]:
            key, _, value = item.partition("=")
            kind = kinds[key]
            setattr(cfg, key, value.lower() in ("1", "true") if kind is bool else kind(value))
        return cfg
