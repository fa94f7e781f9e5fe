"""Sharded states that are damaged, or were never written by elasticrun."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticrun import (
    CheckpointError,
    CheckpointWarning,
    Variables,
    register,
    save_all_states,
)
from elasticrun.checkpoint.states.shards import SavedState
from tests.support.generations import generation, run_once
from tests.support.one_shard import FILES, build, make_adam, script, train
from tests.support.stores import Surprise, forge

pytestmark = pytest.mark.usefixtures("group")


def save_two() -> None:
    net = build()
    optimizer = make_adam(net)
    counted = Variables(steps=0)
    register(model=net, optimizer=optimizer)
    for _ in range(2):
        counted.steps += 1
        train(net, optimizer, 1)
        save_all_states()


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
        return
    if how == "flipped":
        data[len(data) // 2] ^= 1
    path.write_bytes(data[:-1] if how == "truncated" else data)


@pytest.mark.parametrize("how", ["missing", "truncated", "flipped"])
@pytest.mark.parametrize("name", FILES)
def test_damage_is_named_and_fallen_back_from(
    tmp_path: Path, name: str, how: str
) -> None:
    run_once(save_two, tmp_path)
    damage(tmp_path / "checkpoint-00000002" / name, how)
    with pytest.warns(
        CheckpointWarning,
        match=rf"00000002 is skipped: .*checkpoint-00000002/{name} .*resumes from "
        "checkpoint-00000001",
    ):
        steps = run_once(lambda: (script(0), Variables(steps=0).steps)[1], tmp_path)
    assert steps == 1


@pytest.mark.parametrize("name", FILES)
def test_damage_after_the_start_is_named(tmp_path: Path, name: str) -> None:
    run_once(save_two, tmp_path)
    with generation(tmp_path):
        damage(tmp_path / "checkpoint-00000002" / name, "flipped")
        with pytest.raises(
            CheckpointError, match=rf"/{name} has the checksum .*It can"
        ):
            script(0)


def test_a_crafted_file_executes_nothing(tmp_path: Path) -> None:
    run_once(lambda: script(1), tmp_path / "job")
    path = tmp_path / "job" / "checkpoint-00000001"
    for name in FILES:
        torch.save(Surprise(tmp_path / "executed"), path / name)
        data = (path / name).read_bytes()
        forge(path, name, size=len(data), crc32=f"{zlib.crc32(data):08x}")
        with pytest.raises(CheckpointError):
            run_once(lambda: script(0), tmp_path / "job")
    assert not (tmp_path / "executed").exists()


def test_a_part_that_the_manifest_does_not_name_is_missed(tmp_path: Path) -> None:
    run_once(lambda: script(1), tmp_path)
    forge(tmp_path / "checkpoint-00000001", "model.rank-0", name="other")
    (tmp_path / "checkpoint-00000001/model.rank-0").rename(
        tmp_path / "checkpoint-00000001/other"
    )
    with pytest.raises(
        CheckpointError, match=r"has a part in 'model\.rank-0', but the"
    ):
        run_once(lambda: script(0), tmp_path)


@pytest.mark.parametrize(
    ("size", "numbers", "text"),
    [
        ((4,), [0, 0, 0, 3], "do not fill"),
        ((4,), [0, 0, 1, 4], "lies outside"),
        ((4,), [0, 0, 0, 5], "lies outside"),
        ((4,), [-1, 0, 0, 4], "lies outside"),
        ((4,), [0, -1, 0, 4], "lies outside"),
        ((4,), [0, 0, 0], "describes no sharded state"),
        ((4,), [], "describes no sharded state"),
        (4, [0, 0, 0, 4], "describes no sharded state"),
    ],
)
def test_what_cannot_be_is_not_believed(
    size: Any, numbers: list[int], text: str
) -> None:
    values = {
        "elasticrun.shards": 1,
        "tensors": {"a": ("float32", size, 1)},
        "chunks": torch.tensor(numbers, dtype=torch.int64),
        "values": {"a": None},
    }
    with pytest.raises(CheckpointError, match=text):
        SavedState.decode(values)


def test_other_kinds_and_formats_are_not_believed() -> None:
    values: dict[str, Any] = {
        "elasticrun.shards": 1,
        "tensors": {"a": ("load", (0,), 0)},
        "chunks": torch.empty(0, dtype=torch.int64),
        "values": {"a": None},
    }
    with pytest.raises(CheckpointError, match="'load' is no dtype"):
        SavedState.decode(values)
    values["elasticrun.shards"] = 2
    with pytest.raises(CheckpointError, match="the format 2 of sharded states"):
        SavedState.decode(values)


def test_a_part_that_ends_too_soon_is_damage(tmp_path: Path) -> None:
    run_once(lambda: script(1), tmp_path)
    path = tmp_path / "checkpoint-00000001"
    data = (path / "model.rank-0").read_bytes()[:8]
    (path / "model.rank-0").write_bytes(data)
    forge(path, "model.rank-0", size=8, crc32=f"{zlib.crc32(data):08x}")
    with pytest.raises(CheckpointError, match=r"model\.rank-0 ends before byte 60"):
        run_once(lambda: script(0), tmp_path)
