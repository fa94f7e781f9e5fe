"""Settings of the run."""
import argparse
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Settings:
    data: str = "adult.csv"
    target: str = "income"
    epochs: int = 30
    batch: int = 256
    lr: float = 1e-3
    seed: int = 0

    @classmethod
    def from_command_line(cls):
        parser = argparse.ArgumentParser()
        for f in fields(cls):
            parser.add_argument(f"--{f.name}", type=type(f.default), default=f.default)
        return cls(**vars(parser.parse_args()))
