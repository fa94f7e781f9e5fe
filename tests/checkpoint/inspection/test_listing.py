"""Listing and verifying: every condition has its name, and nothing is locked."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elasticrun.checkpoint.store import CheckpointStore
from tests.checkpoint.inspection.running import flip_byte, run, save_some
from tests.support.generations import generation


def test_checkpoints_are_listed_the_newest_first(tmp_path: Path) -> None:
    save_some(tmp_path, 1.0, 2.0)
    said = run(tmp_path)
    assert said.code == 0
    assert said.lines[0] == str(tmp_path)
    head, newest, oldest = said.lines[1:]
    assert head.split() == [
        *("number", "time", "generation", "replicas"),
        *("size", "position", "condition"),
    ]
    day = time.strftime("%Y-%m-%d")
    assert newest.split()[:2] == ["2", day]
    assert oldest.split()[:2] == ["1", day]
    assert newest.split()[3:5] == ["0", "1"]
    assert newest.endswith("KiB  the beginning  good")


def test_values_are_listed_as_json(tmp_path: Path) -> None:
    save_some(tmp_path, 1.0)
    values = run(tmp_path, "--json").values
    assert values["directory"] == str(tmp_path)
    assert values["in_use_by"] is None
    (found,) = values["checkpoints"]
    files = [
        path.stat().st_size for path in (tmp_path / "checkpoint-00000001").iterdir()
    ]
    assert found["size"] == sum(files)
    assert found["job"] == "test"
    assert found["condition"] == "good"
    assert found["position"]["finished_epochs"] == 0
    assert run(tmp_path, "list", "--json").values == values
    assert run("--json", tmp_path).values == values


def test_listing_needs_neither_torch_nor_numpy(tmp_path: Path) -> None:
    save_some(tmp_path, 1.0)
    code = (
        "import sys\n"
        "from elasticrun.__main__ import main\n"
        f"main(['checkpoints', {str(tmp_path)!r}])\n"
        f"main(['checkpoints', {str(tmp_path)!r}, 'verify'])\n"
        "print(sorted({'torch', 'numpy', 'cloudpickle'} & set(sys.modules)))\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert finished.stdout.splitlines()[-2:] == ["1  good", "[]"]


@pytest.mark.parametrize("action", ["list", "verify"])
def test_a_reader_who_has_seen_enough_is_no_error(tmp_path: Path, action: str) -> None:
    save_some(tmp_path, 0.5, 0.25)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as output:
        ended = subprocess.run(
            [sys.executable, "-m", "elasticrun", "checkpoints", tmp_path, action],
            stdout=output,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (141, b"")  # As the shell says SIGPIPE.


def test_what_is_only_named_like_a_checkpoint_is_no_checkpoint(tmp_path: Path) -> None:
    save_some(tmp_path, 1.0)
    mine = tmp_path / "checkpoint-20261122" / "weights.pt"
    mine.parent.mkdir()
    mine.write_text("mine")
    (tmp_path / "checkpoint-00000009").write_text("mine")
    assert [e["number"] for e in run(tmp_path, "--json").values["checkpoints"]] == [1]
    assert run(tmp_path, "verify").lines == ["1  good"]


def test_what_is_wrong_is_listed(tmp_path: Path) -> None:
    save_some(tmp_path, 1.0, 2.0, 3.0, 4.0)
    short = tmp_path / "checkpoint-00000001" / "model"
    short.write_bytes(b"short")
    (tmp_path / "checkpoint-00000002" / "variables").unlink()
    flip_byte(tmp_path / "checkpoint-00000003" / "manifest.json")
    newest = tmp_path / "checkpoint-00000004"
    (newest / "manifest.json").rename(newest / "manifest.json.draft")
    found = run(tmp_path, "--json").values["checkpoints"]
    assert [each["condition"] for each in found] == [
        *("never committed", "bad", "bad", "bad"),
    ]
    said = run(tmp_path)
    assert said.code == 0
    assert "3 is bad: " in said.output
    assert "manifest.json is damaged: its checksum does not fit" in said.output
    assert "variables is missing; it had " in said.output
    assert f"1 is bad: {short} has 5 bytes, but " in said.output


def test_a_flipped_bit_is_found_by_reading(tmp_path: Path) -> None:
    save_some(tmp_path, 1.0, 2.0)
    path = tmp_path / "checkpoint-00000001" / "model"
    flip_byte(path)
    assert [e["condition"] for e in run(tmp_path, "--json").values["checkpoints"]] == [
        *("good", "good"),
    ]
    said = run(tmp_path, "verify")
    assert said.code == 1
    assert said.lines[0] == "2  good"
    assert said.lines[1] == "1  bad"
    assert said.lines[2].startswith(f"    {path} has the checksum ")
    assert run(tmp_path, "verify", 2).code == 0
    assert len(run(tmp_path, "verify", 1).lines) == 2


def test_every_damaged_file_is_named(tmp_path: Path) -> None:
    save_some(tmp_path, 1.0)
    checkpoint = tmp_path / "checkpoint-00000001"
    for name in ("model", "variables"):
        flip_byte(checkpoint / name)
    problems = run(tmp_path, "verify").lines[1:]
    assert sorted(problem.split()[0] for problem in problems) == [
        *(f"{checkpoint}/model", f"{checkpoint}/variables"),
    ]


def test_a_damaged_manifest_is_found_and_the_rest_verified(tmp_path: Path) -> None:
    save_some(tmp_path, 1.0, 2.0)
    flip_byte(tmp_path / "checkpoint-00000001" / "manifest.json", 30)
    said = run(tmp_path, "verify")
    assert said.code == 1
    assert "1  bad" in said.output
    said = run(tmp_path, "verify", "1", "2")
    assert said.code == 1
    assert [said.lines[0], said.lines[2]] == ["1  bad", "2  good"]
    assert "manifest.json is damaged" in said.lines[1]
    assert run(tmp_path, "verify", "2", "7").code == 2
    assert run(tmp_path, "show", "1").code == 2


def test_a_job_at_work_is_named_and_not_disturbed(tmp_path: Path) -> None:
    save_some(tmp_path, 1.0)
    with generation(tmp_path) as job:
        begun = CheckpointStore(tmp_path, job="test").begin(2)
        begun.write("model", lambda file: file.write(b"half of it"))
        values = run(tmp_path, "--json").values
        assert values["in_use_by"].startswith("process ")
        assert [each["condition"] for each in values["checkpoints"]] == [
            *("being written", "good"),
        ]
        assert run(tmp_path, "verify").lines == ["1  good"]
        assert ", in use by process " in run(tmp_path).lines[0]
        # To look did not release the lock: no second job can begin.
        assert values == run(tmp_path, "--json").values
        begun.abandon()
        assert job.save() is not None
    assert [e["number"] for e in run(tmp_path, "--json").values["checkpoints"]] == [
        2,
        1,
    ]
    assert run(tmp_path, "--json").values["in_use_by"] is None


def test_a_lock_of_another_process_is_seen(tmp_path: Path) -> None:
    save_some(tmp_path, 1.0)
    code = (
        "import sys\n"
        "from elasticrun.checkpoint.store import CheckpointStore\n"
        "store = CheckpointStore(sys.argv[1], job='test')\n"
        "store.acquire(timeout=0)\n"
        "print('owner', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "owner\n"
        in_use_by = run(tmp_path, "--json").values["in_use_by"]
        assert f"process {process.pid} on " in in_use_by
        process.communicate()
    assert run(tmp_path, "--json").values["in_use_by"] is None


# Which directory


def test_the_one_directory_here_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = run()
    assert said.code == 2
    assert "there are no checkpoints here. Give the directory" in said.errors
    save_some(tmp_path / "train-checkpoints", 1.0)
    assert run("--json").values["directory"] == str(tmp_path / "train-checkpoints")
    save_some(tmp_path / "other", 1.0)
    assert (
        "several directories here hold checkpoints: other, train-checkpoints. Give one"
        in run().errors
    )
    monkeypatch.setenv("ELASTICRUN_CHECKPOINT_DIR", "other")
    assert run("--json").values["directory"] == str(tmp_path / "other")
    monkeypatch.chdir(tmp_path / "train-checkpoints")
    monkeypatch.delenv("ELASTICRUN_CHECKPOINT_DIR")
    assert run("verify").lines == ["1  good"]


def test_a_directory_may_begin_with_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save_some(tmp_path / "job", 0.5)
    for word in ("~/job", f"file://{tmp_path}/job"):
        assert run(word).lines[0].startswith(f"{tmp_path}/job")


def test_an_unknown_directory_is_an_error(tmp_path: Path) -> None:
    said = run(tmp_path / "nowhere")
    assert said.code == 2
    assert "nowhere: there is no such directory" in said.errors
    for words in (["shwo"], ["shwo", "3"]):
        said = run(*words)
        assert said.code == 2
        assert "shwo: there is no such directory, and no such action" in said.errors
    said = run(f"file://{tmp_path}/nowhere")
    assert (said.code, said.output) == (2, "")


def test_an_empty_directory_is_none(tmp_path: Path) -> None:
    assert run(tmp_path).lines == [str(tmp_path), "no checkpoints"]


def test_one_checkpoint_is_no_directory_of_them(tmp_path: Path) -> None:
    save_some(tmp_path, 1.0)
    for words in ((), ("verify",), ("show", 1)):
        said = run(tmp_path / "checkpoint-00000001", *words)
        assert said.code == 2
        assert "is one checkpoint, not a directory of them. Give the" in said.errors
        assert f"elasticrun checkpoints {tmp_path} verify 1\n" in said.errors
    save_some(tmp_path / "checkpoint-00000007", 1.0)  # Only called like one.
    assert run(tmp_path / "checkpoint-00000007", "verify").lines == ["1  good"]
