"""Train on digits with batches of fixed and of growing sizes; one JSON line each.

    python benchmarks/adaptive.py [--replicas N]

The net and the digits are those of examples/digits.py, trained by SGD with momentum.
`fixed` has batches of 16 samples all the time; `plan` has 64 from the sixth epoch on,
with rates that stay (`plan`), that are multiplied by the ratio of the sizes
(`plan-linear`) or by the gain (`plan-adascale`); `autoscale` lets the job decide, up to
256, at a checkpoint after each 30 batches, with AdaScale. Over three seeds:
`samples_to_98` and `steps_to_98` are the means until the held-out accuracy is 98 %,
looked at after each epoch, of those that reach it (`reached`); `loss` and `accuracy`
are held-out means after the last epoch, `steps` how many there were, `last_size` the
sizes at the end.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from machine import report
from torch.nn.functional import cross_entropy

import elasticrun
from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from elasticrun.testing import run_generation

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

NUM_EPOCHS, SEEDS = 15, range(3)
FIRST, MOST = 16, 256
GOAL = 0.98
PLAN = {0: FIRST, 5 * 1439: 4 * FIRST}
CASES: dict[str, dict[str, Any]] = {
    "fixed": {"batch_size": FIRST},
    "plan": {"batch_size": PLAN},
    "plan-linear": {"batch_size": PLAN, "scaling": "linear"},
    "plan-adascale": {"batch_size": PLAN, "scaling": "adascale"},
    "autoscale": {"batch_size": FIRST, "scaling": "adascale", "is_decided": True},
}

Epoch = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=1)
    num_replicas = parser.parse_args().replicas
    for case, options in CASES.items():
        runs: list[list[Epoch]] = []
        for seed in SEEDS:
            with tempfile.TemporaryDirectory() as directory:
                runs += run_generation(
                    train, num_replicas, seed, directory, options, timeout=3000
                )[:1]
        reached = [first for run in runs if (first := at_goal(run)) is not None]
        report(
            "adaptive-digits",
            case=case,
            replicas=num_replicas,
            seeds=len(SEEDS),
            reached=len(reached),
            samples_to_98=mean(reached, "samples"),
            steps_to_98=mean(reached, "steps"),
            loss=mean([run[-1] for run in runs], "loss"),
            accuracy=mean([run[-1] for run in runs], "accuracy"),
            steps=mean([run[-1] for run in runs], "steps"),
            last_size=[run[-1]["size"] for run in runs],
        )


def at_goal(run: list[Epoch]) -> Epoch | None:
    return next((epoch for epoch in run if epoch["accuracy"] >= GOAL), None)


def mean(epochs: list[Epoch], key: str) -> float | None:
    return round(statistics.fmean(e[key] for e in epochs), 4) if epochs else None


def train(seed: int, directory: str, options: dict[str, Any]) -> list[Epoch]:
    from digits import Digits, make_net

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    elasticrun.init(directory, save_interval="off", save_every=30)
    held_out = Digits(train=False)
    data = Digits(train=True)
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.02, 0.9, weight_decay=5e-4)
    model = AdaptiveDataParallel(
        net, optimizer, measure_noise=True, scaling=options.get("scaling")
    )
    loader = AdaptiveDataLoader(
        data,
        options["batch_size"],
        shuffle=True,
        seed=seed,
    )
    if options.get("is_decided"):
        loader.autoscale(MOST)
    epochs: list[Epoch] = []
    num_steps = num_samples = 0
    for _ in remaining_epochs_until(NUM_EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            num_steps += loader.is_step
            num_samples += loader.global_batch_size * loader.is_step
        with torch.no_grad():
            output = net(held_out.images)
        is_right = output.argmax(1) == held_out.labels
        epochs.append(
            {
                "samples": num_samples,
                "steps": num_steps,
                "size": loader._state.sizes[-1][1],
                "loss": cross_entropy(output, held_out.labels).item(),
                "accuracy": is_right.float().mean().item(),
            }
        )
    return epochs


if __name__ == "__main__":
    main()
