"""What is asked of DDP beyond what a program does."""

from __future__ import annotations

import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elasticrun.parallel.reduction import settle_buckets


@pytest.mark.usefixtures("group")
def test_buckets_are_settled_where_inputs_go_to_a_device() -> None:
    """As with `device_ids=[3]`, which DDP takes for GPUs alone."""
    ddp = DistributedDataParallel(nn.Linear(2, 1))
    ddp.device_ids = [0]
    settle_buckets(ddp)
    assert all(parameter.grad is None for parameter in ddp.parameters())
