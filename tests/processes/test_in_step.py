"""What all replicas must do together, and one of them leaves out by its own batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import elasticrun
from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from elasticrun.testing import GenerationFailed, run_generation

BOXES = [2, 0, 0, 3, 0, 0, 1, 1]  # Of each sample; its place in the batch has the rank.


class Training:
    """A detector of one feature, in batches of two samples."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        rows = torch.linspace(-1, 1, len(BOXES) * 3).reshape(-1, 3)
        self.net = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.model = AdaptiveDataParallel(self.net, self.optimizer)
        data = TensorDataset(rows, torch.tensor(BOXES))
        self.train = AdaptiveDataLoader(data, batch_size=2)

    def step(self, loss: Any) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def weigh_where_boxes_are() -> None:
    training = Training()
    for _ in remaining_epochs_until(1):
        for features, boxes in training.train:
            output = training.model(features)
            loss = training.model.weigh(output[:, 0].square().mean())
            count = int(boxes.sum())
            if count:
                of_boxes = output[:, 1].square().sum() / count
                loss = loss + training.model.weigh(of_boxes, count=count)  # by boxes
            training.step(loss)


def weigh_everywhere() -> list[float]:
    training = Training()
    for _ in remaining_epochs_until(1):
        for features, boxes in training.train:
            output = training.model(features)
            loss = training.model.weigh(output[:, 0].square().mean())
            count = int(boxes.sum())
            of_boxes = torch.zeros(())  # Needs no gradient where there are no boxes.
            if count:
                of_boxes = (output[:, 1].square() * boxes).sum() / max(count, 1)
            training.step(loss + training.model.weigh(of_boxes, count=count))
    return training.net.weight.flatten().tolist()


def leave_out_alone(num_alike: int) -> None:
    training = Training()
    for features, boxes in training.train.batches(20):
        loss = training.model(features).square().mean()
        if training.train.batch_index < num_alike:
            continue  # All replicas do.
        if boxes.sum() == 3:
            continue
        training.step(loss)


def leave_out_together(how: str) -> list[float]:
    training = Training()
    is_alone = elasticrun.world_size() == 1
    for features, boxes in training.train.batches(20):
        loss = training.model(features).square().mean()
        is_bad = (boxes == 3).any().float()
        if how == "flag":
            if not is_alone:
                dist.all_reduce(is_bad)
            if is_bad:
                continue
        elif is_bad and not is_alone:
            loss = sum(p.sum() for p in training.model.parameters()) * 0
        training.step(loss)
    return training.net.weight.flatten().tolist()


def test_counts_that_one_replica_does_not_give_are_named() -> None:
    with pytest.raises(GenerationFailed) as failed:
        run_generation(weigh_where_boxes_are, 2)
    with open(__file__, encoding="utf-8") as file:
        (line,) = [n for n, text in enumerate(file, 1) if text.endswith("# by boxes\n")]
    text = str(failed.value)
    assert f"weigh(count=...) at test_in_step.py:{line} adds up the counts" in text
    assert "but rank 1 has begun its backward pass without it" in text


def test_counts_of_zero_are_given_also_of_a_constant_loss() -> None:
    (alone,) = run_generation(weigh_everywhere, 1)
    for each in run_generation(weigh_everywhere, 2):
        assert each == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("num_alike", [0, 3])
def test_a_batch_that_one_replica_leaves_out_is_named(num_alike: int) -> None:
    with pytest.raises(GenerationFailed) as failed:
        run_generation(leave_out_alone, 2, num_alike)
    assert "(test_in_step.py:" in str(failed.value)
    assert "no backward pass; on rank 0 it had one" in str(failed.value)


def test_a_batch_that_all_replicas_leave_out_holds_nobody_up() -> None:
    (alone,) = run_generation(leave_out_together, 1, "flag")
    for each in run_generation(leave_out_together, 2, "flag"):
        assert each == pytest.approx(alone, rel=1e-5)


def test_a_batch_may_be_left_out_by_a_loss_of_zero() -> None:
    first, second = run_generation(leave_out_together, 2, "zero")
    assert first == second
    assert all(abs(each) < 1 for each in first)
