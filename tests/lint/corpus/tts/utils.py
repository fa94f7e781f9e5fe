"""Small things: masks, schedules, files."""
import logging
from typing import Dict

import torch

from elasticrun import atomic_save, rank


def get_logger(name: str) -> logging.Logger:
    """A logger that is silent on all replicas but the first."""
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    logger = logging.getLogger(name)
    logger.setLevel(logging.INFO if rank() == 0 else logging.ERROR)
    return logger


def lengths_to_mask(lengths: torch.Tensor, size: int) -> torch.Tensor:
    return torch.arange(size, device=lengths.device)[None] < lengths[:, None]


class NoamLR(torch.optim.lr_scheduler.LambdaLR):
    def __init__(self, optimizer: torch.optim.Optimizer, warmup: int):
        super().__init__(optimizer, lambda step: min((step + 1) ** -0.5, (step + 1) * warmup**-1.5) * warmup**0.5)


class Checkpointer:
    """Writes weights for inference; what training needs is the job's."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, net: torch.nn.Module, name: str, **extra) -> None:
        if rank() != 0:
            return
        state: Dict[str, object] = {"net": net.state_dict(), **extra}
        atomic_save(state, str(self.folder / f"{name}.pt"))
