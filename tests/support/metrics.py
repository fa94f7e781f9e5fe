"""Programs that register metrics, for one replica or several."""

from __future__ import annotations

from typing import Any

import torch
import torchmetrics
from torch import nn

from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    init,
    register,
    remaining_epochs_until,
    save_all_states,
)
from tests.support.data import Numbers

LEAVE = 75


class WithMetric(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.mean = torchmetrics.MeanMetric()


def measure(directory: str, *, leaves: bool, is_parallel: bool) -> dict[str, float]:
    """Measure the numbers from 0 to 23; with `leaves`, save and go in batch 3.

    Args:
        is_parallel: Whether a model with a metric is in an AdaptiveDataParallel.
    """
    init(directory, save_interval="off")
    metrics = {
        "sum": torchmetrics.SumMetric(),
        "mean": torchmetrics.MeanMetric(),
        "largest": torchmetrics.MaxMetric(),
        "least": torchmetrics.MinMetric(),
        "all": torchmetrics.CatMetric(),
        "several": torchmetrics.MetricCollection(
            {
                "recall": torchmetrics.Recall("binary"),
                "precision": torchmetrics.Precision("binary"),
                # These two add to one tensor in place.
                "matrix": torchmetrics.ConfusionMatrix("binary"),
                "kappa": torchmetrics.CohenKappa("binary"),
            }
        ),
    }
    model = WithMetric()
    if is_parallel:
        AdaptiveDataParallel(model)
        register(**metrics)
    else:
        register(model=model, **metrics)
    loader = AdaptiveDataLoader(Numbers(24), 4, shuffle=True, even_batches=False)
    for _ in remaining_epochs_until(1):
        for x in loader:
            if leaves and loader.batch_index == 3:
                save_all_states()
                raise SystemExit(LEAVE)
            for name in ("sum", "mean", "largest", "least", "all"):
                metrics[name].update(x.float())
            model.mean.update(x.float())
            metrics["several"].update((x % 3 == 0).int(), (x % 2 == 0).int())
        found = {name: metric.compute() for name, metric in metrics.items()}
    found |= {**found.pop("several"), "in the model": model.mean.compute()}
    found["all"] = torch.atleast_1d(found["all"]).sort().values
    return {name: value.tolist() for name, value in found.items()}


class Counting:
    """A metric of the program's own, which counts on each replica."""

    def __init__(self) -> None:
        self.counts = {"right": 0, "total": 0}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.counts)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counts = dict(state_dict)


def count(directory: str) -> None:
    init(directory, save_interval="off")
    metric = Counting()
    register(metric=metric)
    for x in AdaptiveDataLoader(Numbers(24), 4, shuffle=True):
        metric.counts["right"] += int(x.sum())
        metric.counts["total"] += len(x)
    save_all_states()


def register_correlation(directory: str) -> None:
    init(directory, save_interval="off")
    register(metric=torchmetrics.PearsonCorrCoef())
