"""The end of a process group whose collectives could wait for ever, as NCCL's do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from elasticrun.testing import run_generation
from tests.support.stage import wait_until


def leave_as_on_a_gpu(folder: str, is_last_to_stay: bool) -> bool:
    """Leave, or stay until all others have; return whether the group has ended."""
    import elasticrun as er
    from elasticrun.replicas import membership

    membership._LEAVING_SECONDS = 0.3 if is_last_to_stay else 60.0
    member = er.current_job()._membership
    member = replace(member, device=torch.device("cuda", 0))
    left = Path(folder, f"left-{er.rank()}")
    if er.rank() == er.world_size() - 1 and is_last_to_stay:
        others = [Path(folder, f"left-{rank}") for rank in range(er.rank())]
        wait_until(lambda: all(path.exists() for path in others))
    else:
        member.leave()
    left.touch()
    return not dist.is_initialized()


def test_the_group_ends_where_all_come_to_their_end(tmp_path: Path) -> None:
    ended = run_generation(leave_as_on_a_gpu, 3, str(tmp_path), False)
    assert ended == [True, True, True]


def test_nobody_waits_for_one_that_does_not_leave(tmp_path: Path) -> None:
    ended = run_generation(leave_as_on_a_gpu, 3, str(tmp_path), True)
    assert ended == [False, False, False]
