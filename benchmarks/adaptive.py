"""Train on digits with batches of fixed and of growing sizes; one JSON line each.

    python benchmarks/adaptive.py [--replicas N] [--seeds N]

The net and the digits are those of examples/digits.py, trained by SGD with momentum.
`fixed` has batches of 16 samples all the time; `plan` has 64 after a third of the
training, with rates that stay (`plan`), that are multiplied by the ratio of the sizes
(`plan-linear`) or by the gain (`plan-adascale`); `autoscale` lets the job decide, up to
256, at a checkpoint after each 30 batches, with AdaScale, and `autoscale-time` with
min_efficiency=0.

Four times an epoch the held-out loss and accuracy are looked at. `samples_to_goal` and
`steps_to_goal` are what it took, in the mean of the seeds that come to it (`reached`),
until the accuracy was 98 %; `loss` and `accuracy` are those at the end, `steps` how
many there were, `last_size` the sizes at the end of each seed; `curve` has the mean
(samples, steps, loss) on the way.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from machine import report
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import elasticrun
from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from elasticrun.testing import run_generation

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

NUM_LOOKS = 4  # In an epoch.


class Look(dict[str, float]):
    """How far a training has come: samples, steps, size, loss, accuracy."""


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        make: Returns the training data, the held-out inputs and targets, and the net;
            called in each replica.
        is_reached: Whether a training has come to the goal.
    """

    name: str
    make: Callable[[], tuple[Dataset[Any], Tensor, Tensor, nn.Module]]
    is_reached: Callable[[Look], bool]
    num_epochs: int
    num_samples: int
    rate: float
    weight_decay: float = 0.0
    first: int = 16
    most: int = 256

    def cases(self) -> dict[str, dict[str, Any]]:
        third = self.num_epochs * self.num_samples // 3
        plan = {0: self.first, third: 4 * self.first}
        return {
            "fixed": {"batch_size": self.first},
            "plan": {"batch_size": plan},
            "plan-linear": {"batch_size": plan, "scaling": "linear"},
            "plan-adascale": {"batch_size": plan, "scaling": "adascale"},
            "autoscale": {
                "batch_size": self.first,
                "scaling": "adascale",
                "is_decided": True,
            },
            "autoscale-time": {
                "batch_size": self.first,
                "scaling": "adascale",
                "is_decided": True,
                "min_efficiency": 0.0,
            },
        }


def main(task: Task, description: str) -> None:
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cases", nargs="*", default=list(task.cases()))
    given = parser.parse_args()
    for case in given.cases:
        runs: list[list[Look]] = []
        for seed in range(given.seeds):
            with tempfile.TemporaryDirectory() as directory:
                runs += run_generation(
                    train,
                    given.replicas,
                    task,
                    seed,
                    directory,
                    task.cases()[case],
                    timeout=3000,
                )[:1]
        firsts = [next(filter(task.is_reached, run), None) for run in runs]
        reached = [first for first in firsts if first is not None]
        report(
            f"adaptive-{task.name}",
            case=case,
            replicas=given.replicas,
            seeds=given.seeds,
            reached=len(reached),
            samples_to_goal=mean(reached, "samples"),
            steps_to_goal=mean(reached, "steps"),
            loss=mean([run[-1] for run in runs], "loss"),
            accuracy=mean([run[-1] for run in runs], "accuracy"),
            steps=mean([run[-1] for run in runs], "steps"),
            last_size=[run[-1]["size"] for run in runs],
            curve=[
                [mean(list(looks), key) for key in ("samples", "steps", "loss")]
                for looks in zip(*runs, strict=True)
            ],
        )


def mean(looks: list[Look], key: str) -> float | None:
    return round(statistics.fmean(each[key] for each in looks), 4) if looks else None


def train(task: Task, seed: int, directory: str, options: dict[str, Any]) -> list[Look]:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    elasticrun.init(directory, save_interval="off", save_every=30)
    data, inputs, targets, net = task.make()
    optimizer = torch.optim.SGD(
        net.parameters(), task.rate, 0.9, weight_decay=task.weight_decay
    )
    model = AdaptiveDataParallel(
        net, optimizer, measure_noise=True, scaling=options.get("scaling")
    )
    loader = AdaptiveDataLoader(data, options["batch_size"], shuffle=True, seed=seed)
    if options.get("is_decided"):
        loader.autoscale(task.most, min_efficiency=options.get("min_efficiency", 0.9))
    looks: list[Look] = []
    num_steps = num_samples = 0
    for _ in remaining_epochs_until(task.num_epochs):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
            optimizer.step()
            if loader.is_step:
                num_steps += 1
                num_samples += loader.global_batch_size
                if num_samples * NUM_LOOKS >= (len(looks) + 1) * task.num_samples:
                    look = look_at(net, inputs, targets)
                    size, _ = loader.planned_sizes
                    look.update(samples=num_samples, steps=num_steps, size=size)
                    looks.append(look)
    return looks


@torch.no_grad()
def look_at(net: nn.Module, inputs: Tensor, targets: Tensor) -> Look:
    output = net(inputs).flatten(0, -2)
    is_right = output.argmax(1) == targets.flatten()
    loss = cross_entropy(output, targets.flatten())
    return Look(loss=loss.item(), accuracy=is_right.float().mean().item())


def make_digits() -> tuple[Dataset[Any], Tensor, Tensor, nn.Module]:
    from digits import Digits, make_net

    held_out = Digits(train=False)
    return Digits(train=True), held_out.images, held_out.labels, make_net()


def is_98(look: Look) -> bool:
    return look["accuracy"] >= 0.98


DIGITS = Task("digits", make_digits, is_98, 15, 1439, rate=0.02, weight_decay=5e-4)

if __name__ == "__main__":
    main(DIGITS, str(__doc__))
