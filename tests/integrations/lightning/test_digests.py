"""What is told apart by a digest, and what is too large for one."""

from __future__ import annotations

import torch

from elasticrun.integrations.lightning.digests import Digests


def test_a_change_in_one_of_many_tensors_is_seen() -> None:
    digests, values = Digests(), [torch.zeros(1) for _ in range(100)]
    before = digests.of(values)
    assert digests.of([torch.zeros(1) for _ in range(100)]) == before
    values[57] += 1
    assert digests.of(values) != before


def test_what_is_too_large_is_equal_to_nothing() -> None:
    digests = Digests()
    small = [torch.zeros(1) for _ in range(20_000)]
    for value in (small, torch.zeros(17 << 20), b"0" * (65 << 20)):
        assert digests.of(value) != digests.of(value)
