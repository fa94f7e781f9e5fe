"""`AtomicDirectory` with several ranks: all commit a version, or none does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elasticrun.testing import run_generation


def on_each_rank(act: Callable[[Any, int], Any]) -> Callable[[], Any]:
    """Return a program of a process group in which each rank prepares a version."""

    def run() -> Any:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.barrier()  # Who leaves at once would fail those that still connect.
        try:
            return act(dist, dist.get_rank())
        finally:
            dist.destroy_process_group()

    return run


@pytest.mark.slow
def test_all_ranks_write_into_one_version(tmp_path: Path) -> None:
    def act(dist: Any, rank: int) -> Any:
        from elasticrun import AtomicDirectory

        directory = AtomicDirectory(tmp_path, keep=1)
        before = directory.latest()
        for _ in range(2):
            with directory.prepare() as version:
                (version / f"part-{rank}").write_text(f"{rank}")
        newest = directory.latest()
        assert newest is not None
        return before, newest.name, sorted(path.name for path in newest.iterdir())

    results = run_generation(on_each_rank(act), 3)
    names = ["manifest.json", "part-0", "part-1", "part-2"]
    assert results == [(None, "checkpoint-00000002", names)] * 3
    assert not (tmp_path / "checkpoint-00000001").exists()


@pytest.mark.parametrize("failing", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_failure_of_one_is_that_of_all(tmp_path: Path, failing: int) -> None:
    def act(dist: Any, rank: int) -> Any:
        from elasticrun import AtomicDirectory, CheckpointError

        directory = AtomicDirectory(tmp_path)
        try:
            with directory.prepare() as version:
                (version / f"part-{rank}").write_text(f"{rank}")
                if rank == failing:
                    raise KeyError("lost")
        except KeyError:
            told = "KeyError"
        except CheckpointError as error:
            told = str(error)
        dist.barrier()
        return told, directory.latest(), version.path.exists()

    results = run_generation(on_each_rank(act), 2)
    assert results[failing] == ("KeyError", None, False)
    told, newest, is_there = results[1 - failing]
    assert f"00000001 was not committed: rank {failing}: KeyError: 'lost'" in told
    assert (newest, is_there) == (None, False)


def test_ranks_that_see_different_directories_all_refuse(tmp_path: Path) -> None:
    def act(dist: Any, rank: int) -> Any:
        from elasticrun import AtomicDirectory, CheckpointError

        try:
            AtomicDirectory(tmp_path / str(rank)).prepare()
        except CheckpointError as error:
            return str(error)
        return ""

    for told in run_generation(on_each_rank(act), 2):
        assert "1/checkpoint-00000001 is not there on host" in told
        assert "must be on a file system that all replicas see" in told


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_directory_of_its_own_is_refused_whatever_it_has(
    tmp_path: Path, is_committed: bool
) -> None:
    """Rank 1's directory has a folder of the name of that which rank 0 has begun."""

    def act(dist: Any, rank: int) -> Any:
        from elasticrun import AtomicDirectory, CheckpointError

        path = tmp_path / str(rank)
        if rank == 1:
            alone = AtomicDirectory(path, all_ranks=False)
            version = alone.prepare()
            (version / "model.pt").write_text("good")
            if is_committed:
                version.commit()
        dist.barrier()
        try:
            AtomicDirectory(path).prepare()
        except CheckpointError as error:
            return str(error)
        return ""

    for told in run_generation(on_each_rank(act), 2):
        assert "1/checkpoint-00000001 on host" in told
        assert "is not the one that rank 0 has begun. The checkpoint dir" in told
    kept = tmp_path / "1" / "checkpoint-00000001" / "model.pt"
    assert kept.read_text() == "good"


def test_one_rank_can_use_it_alone(tmp_path: Path) -> None:
    def act(dist: Any, rank: int) -> Any:
        from elasticrun import AtomicDirectory

        if rank == 1:
            directory = AtomicDirectory(tmp_path, all_ranks=False)
            with directory.prepare() as version:
                (version / "text").write_text("alone")
            return str(directory.latest())
        return None

    assert run_generation(on_each_rank(act), 2) == [
        None,
        str(tmp_path / "checkpoint-00000001"),
    ]
