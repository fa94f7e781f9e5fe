"""Files that nobody would write but by mistake or malice: links, pipes, nonsense."""

from __future__ import annotations

import io
import json
import os
import resource
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import pytest
import torch
from torch import nn

from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    CheckpointError,
    CheckpointWarning,
    State,
    Variables,
    once,
    register,
    remaining_epochs_until,
    save_all_states,
)
from elasticrun.checkpoint.files.durable import read_end
from elasticrun.launcher.directory import locked
from elasticrun.launcher.options import OptionError
from tests.checkpoint.inspection.running import run
from tests.support.data import Numbers
from tests.support.generations import run_once


def test_a_link_of_a_name_that_a_job_writes_leads_nowhere(tmp_path: Path) -> None:
    victim = link_to_victim(tmp_path / "job" / "generation.tmp")
    run_once(save_all_states, tmp_path / "job")
    assert (tmp_path / "job" / "checkpoint-00000001" / "manifest.json").exists()
    assert victim.read_text() == "precious"


def test_a_link_in_the_place_of_a_lock_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "job"
    victim = link_to_victim(directory / "lock")
    with pytest.raises(
        CheckpointError,
        match=r"lock is a link, not a plain file\. .*Remove what is in the place of",
    ):
        run_once(save_all_states, directory)
    link_to_victim(directory / "launcher.lock")
    with (
        pytest.raises(OptionError, match="is a link, not a plain file"),
        locked(directory, is_shared=False),
    ):
        pass
    assert victim.read_text() == "precious"


def link_to_victim(path: Path) -> Path:
    victim = path.parents[1] / "victim"
    victim.write_text("precious")
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(victim)
    return victim


def make_hole(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(8 << 30)


@pytest.mark.parametrize("make", [os.mkfifo, make_hole])
@pytest.mark.parametrize(
    "name", ["checkpoint-00000002/manifest.json", "generation", "lock"]
)
def test_a_pipe_or_a_huge_hole_hangs_nothing_and_fills_no_memory(
    tmp_path: Path, name: str, make: Callable[[Path], object]
) -> None:
    for _ in range(2):
        run_once(save_all_states, tmp_path)
    path = tmp_path / name
    path.unlink()
    make(path)
    with limited_memory(1 << 30):
        assert run(tmp_path).code == 0
        if name == "lock" and stat.S_ISFIFO(path.stat().st_mode):
            with pytest.raises(CheckpointError, match="lock is not a plain file"):
                run_once(save_all_states, tmp_path)
        elif name.endswith("manifest.json"):
            with pytest.warns(CheckpointWarning, match="2 is skipped.*resumes from"):
                run_once(save_all_states, tmp_path)
        else:
            run_once(save_all_states, tmp_path)


@contextmanager
def limited_memory(size: int) -> Iterator[None]:
    """Let this process get no more than so many bytes besides those that it has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_manifest_that_is_nested_too_deep_is_damaged(tmp_path: Path) -> None:
    for _ in range(2):
        run_once(save_all_states, tmp_path)
    path = tmp_path / "checkpoint-00000002" / "manifest.json"
    put_manifest(path, b'{"format": ' + b"[" * 100_000)
    assert "manifest.json is no manifest: RecursionError" in run(tmp_path).output
    with pytest.warns(CheckpointWarning, match="2 is skipped: .* is no manifest"):
        run_once(save_all_states, tmp_path)


def put_manifest(path: Path, body: bytes) -> None:
    """Write one whose checksum is right, whatever else it is."""
    path.write_bytes(body + b',\n  "crc32": "%08x"\n}\n' % zlib.crc32(body))


class Count(State):
    def __init__(self) -> None:
        super().__init__("count")
        self.value = 0

    def save(self, fileobj: BinaryIO) -> None:
        fileobj.write(str(self.value).encode())

    def load(self, fileobj: BinaryIO) -> None:
        self.value = int(fileobj.read())


def train() -> None:
    """Use a state of each kind, and save in a loop."""
    net = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    register(model=net, optimizer=optimizer, scheduler=scheduler)
    Variables(best=0.0)
    Count()
    sums = Accumulator()
    once("announced")
    net(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    for _ in remaining_epochs_until(1):
        for _ in (loader := AdaptiveDataLoader(Numbers(4), 2, name="train")):
            sums["samples"] += 1
            if loader.batch_index == 1:
                save_all_states()
        with sums.synchronized():
            pass


def saved(values: Any) -> bytes:
    file = io.BytesIO()
    torch.save(values, file)
    return file.getvalue()


NONSENSE = {
    "empty": b"",
    "no UTF-8": b"\x80\x81",
    "JSON": b'{"a": 1}',
    "deep JSON": b"[" * 100_000,
    "no dictionary": saved([1]),
    "another dictionary": saved({"state": 3, "keys": [1], "totals": {"a": {}}}),
    "cut off": saved({"a": 1})[:-40],
}
STATES = [
    *("model", "optimizer", "scheduler", "variables", "count", "accumulator"),
    *("once", "loader.train", "random.ranks-0"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trained")
    run_once(train, directory)
    return directory / "checkpoint-00000001"


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("data", NONSENSE.values(), ids=NONSENSE)
def test_a_file_with_a_right_checksum_that_is_no_state_is_named(
    tmp_path: Path, checkpoint: Path, state: str, data: bytes
) -> None:
    directory = tmp_path / checkpoint.name
    directory.mkdir()
    for file in checkpoint.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    (directory / state).write_bytes(data)
    fields = json.loads((directory / "manifest.json").read_bytes())
    for record in fields["files"]:
        if record["name"] == state:
            record |= {"size": len(data), "crc32": f"{zlib.crc32(data):08x}"}
    del fields["crc32"]
    body = json.dumps(fields).encode().removesuffix(b"}")
    put_manifest(directory / "manifest.json", body)
    try:
        run_once(train, tmp_path)
    except CheckpointError as error:
        assert f"{directory / state}" in str(error)  # noqa: PT017 (some are harmless)
    for words in (["show", 1], ["show", 1, state]):
        assert run(tmp_path, *words).code in (0, 2)
    assert run(tmp_path, "export", 1, tmp_path / "x", "--state", state).code in (0, 2)


def test_an_archive_of_a_program_is_shown_as_bytes(tmp_path: Path) -> None:
    class Scripted(State):
        def __init__(self) -> None:
            super().__init__("scripted")

        def save(self, fileobj: BinaryIO) -> None:
            with zipfile.ZipFile(fileobj, "w") as archive:  # As `torch.jit.save` does.
                for name in ("data.pkl", "constants.pkl", "code/__torch__.py"):
                    archive.writestr(f"program/{name}", b"")

        def load(self, fileobj: BinaryIO) -> None:
            fileobj.read()

    def script() -> None:
        Scripted()
        save_all_states()

    run_once(script, tmp_path)
    assert "bytes" in run(tmp_path, "show", 1, "scripted").output
    said = run(tmp_path, "export", 1, tmp_path / "x.pt", "--state", "scripted")
    assert "holds no tensors" in said.errors


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.touch()
    os.chown(path, 12345, 12345)
    with pytest.raises(ValueError, match="belongs to user 12345, neither to this one"):
        read_end(path, 10)
    os.chown(tmp_path, 12345, 12345)  # As where a file server maps users.
    assert read_end(path, 10) == b""
