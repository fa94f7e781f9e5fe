"""What is asked of DDP beyond what a program does."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

from elasticrun.job.current import current_job
from elasticrun.parallel.reduction import Reduction, fix_buckets


@pytest.mark.usefixtures("group")
def test_buckets_are_settled_where_inputs_go_to_a_device() -> None:
    """As with `device_ids=[3]`, which DDP takes for GPUs alone."""
    ddp = DistributedDataParallel(nn.Linear(2, 1))
    ddp.device_ids = [0]
    fix_buckets(ddp)
    assert all(parameter.grad is None for parameter in ddp.parameters())


@pytest.mark.usefixtures("group", "job")
@pytest.mark.parametrize("is_step", [True, False])
def test_a_forward_pass_has_its_entry_in_profiles_only(
    monkeypatch: pytest.MonkeyPatch, *, is_step: bool
) -> None:
    """As a DDP, which pays for the entry in each step."""
    reduction = Reduction(nn.Linear(2, 1), {}, current_job())
    with profile() as profiled:
        reduction.forward((torch.ones(2),), {}, is_step=is_step)
    names = {event.key for event in profiled.key_averages()}
    assert "DistributedDataParallel.forward" in names

    def refuse(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", refuse)
    reduction.forward((torch.ones(2),), {}, is_step=is_step)
