"""Each replica has a GPU of its own, or all train on the CPU."""

from __future__ import annotations

import logging
import os

import pytest
import torch

from elasticrun.replicas import devices
from elasticrun.replicas.devices import VisibleGpus, choose_number, why_not_a_gpu_each
from elasticrun.testing import GenerationFailed, run_generation


@pytest.mark.parametrize(
    ("local_rank", "num_gpus", "expected"),
    [(0, 0, -1), (0, 1, 0), (3, 1, 0), (1, 2, 1), (2, 2, -1), (0, 8, 0)],
)
def test_a_single_visible_gpu_is_taken_and_else_the_one_of_the_local_rank(
    local_rank: int, num_gpus: int, expected: int
) -> None:
    assert choose_number(local_rank, num_gpus) == expected


def test_gpus_that_differ_are_enough() -> None:
    by_local_rank = [VisibleGpus("a", 2, 0, "gpu-0"), VisibleGpus("a", 2, 1, "gpu-1")]
    one_shown_to_each = [
        VisibleGpus("a", 1, 0, "gpu-0"),
        VisibleGpus("a", 1, 0, "gpu-1"),
    ]
    on_two_machines = [VisibleGpus("a", 1, 0, "gpu-0"), VisibleGpus("b", 1, 0, "gpu-0")]
    for sights in (by_local_rank, one_shown_to_each, on_two_machines):
        assert why_not_a_gpu_each(sights) == ""


@pytest.mark.parametrize(
    ("sights", "reason"),
    [
        (
            [VisibleGpus("a", 1, 0, "gpu-0"), VisibleGpus("a", 1, 0, "gpu-0")],
            "rank 0 and rank 1 on a see the same GPU",
        ),
        (
            [VisibleGpus("a", 1, 0, "gpu-0"), VisibleGpus("b", 0, -1, "")],
            "rank 1 on b sees no GPU for it",
        ),
        (
            [VisibleGpus("a", 2, n, f"gpu-{n}") for n in range(2)]
            + [VisibleGpus("a", 2, -1, "")],
            "rank 2 on a sees 2 GPUs, but none for it",
        ),
    ],
)
def test_why_not_is_said(sights: list[VisibleGpus], reason: str) -> None:
    assert reason in why_not_a_gpu_each(sights)


def device_where_only_rank_0_sees_a_gpu() -> tuple[str, list[str]]:
    """Look at a machine that is made up; all else is real."""
    import elasticrun as er

    rank = int(os.environ["RANK"])
    sight = (
        VisibleGpus("a", 1, 0, "gpu-0") if rank == 0 else VisibleGpus("b", 0, -1, "")
    )
    devices._visible_gpus = lambda local_rank: sight
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("elasticrun").addHandler(handler)
    return str(er.device()), said


@pytest.mark.slow
def test_all_decide_alike_and_rank_0_warns() -> None:
    first, second = run_generation(device_where_only_rank_0_sees_a_gpu, 2)
    device, (said, *_) = first
    assert device == "cpu"
    assert said == "all replicas train on the CPU, since rank 1 on b sees no GPU for it"
    assert second == ("cpu", [])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to have")
def test_nccl_without_gpus_is_refused() -> None:
    with pytest.raises(GenerationFailed, match="rank 0 on .* sees no GPU for it"):
        run_generation(start_with_nccl, 1)


def start_with_nccl() -> None:
    import elasticrun as er

    er.init(backend="nccl")


@pytest.mark.parametrize(
    ("frees", "num_looks"), [([95], 1), ([10, 30, 60, 60, 60], 4), ([50, 50], 2)]
)
def test_memory_is_waited_for_while_it_becomes_free(
    frees: list[int], num_looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter(frees)
    seen: list[int] = []

    def look(device: torch.device) -> tuple[int, int]:
        seen.append(next(looks))
        return seen[-1], 100

    monkeypatch.setattr(torch.cuda, "mem_get_info", look)
    monkeypatch.setattr(devices, "_LOOK_SECONDS", 0.0)
    devices._wait_for_memory(torch.device("cuda", 0))
    assert len(seen) == num_looks
