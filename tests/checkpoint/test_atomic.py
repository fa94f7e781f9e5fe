"""`atomic_save` and `AtomicDirectory`: whole or not at all, the last one never gone."""

from __future__ import annotations

import io
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticrun import (
    AtomicDirectory,
    CheckpointError,
    CheckpointWarning,
    Variables,
    atomic_save,
    save_all_states,
)
from elasticrun.checkpoint.files import durable
from elasticrun.checkpoint.files.replacing import replace_file
from elasticrun.checkpoint.storage.lock import find_owner
from tests.support.full_disk import fail_for_space, limited_files
from tests.support.generations import run_once

STATE = {"weight": torch.arange(5.0), "step": 3}


def write_text(text: bytes) -> Callable[[Any], object]:
    return lambda file: file.write(text)


# atomic_save


@pytest.mark.parametrize("kind", [str, Path])
def test_it_saves_like_torch(tmp_path: Path, kind: Callable[[Path], Any]) -> None:
    atomic_save(STATE, kind(tmp_path / "model.pt"))
    torch.save(STATE, tmp_path / "torchs.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    assert torch.equal(loaded["weight"], STATE["weight"])
    assert os.listdir(tmp_path).count("model.pt") == 1
    assert len(os.listdir(tmp_path)) == 2
    modes = [(tmp_path / n).stat().st_mode for n in ("model.pt", "torchs.pt")]
    assert modes[0] == modes[1]


def test_torchs_options_are_handed_on(tmp_path: Path) -> None:
    atomic_save(STATE, tmp_path / "a", _use_new_zipfile_serialization=False)
    assert torch.load(tmp_path / "a", weights_only=True)["step"] == 3
    with open(tmp_path / "a", "rb") as file:
        assert file.read(2) != b"PK"
    with pytest.raises(TypeError, match="nonsense"):
        atomic_save(STATE, tmp_path / "a", nonsense=1)


def test_arguments_are_those_of_torch(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    for save in (torch.save, atomic_save):
        save(STATE, path, pickle, 2)
        torch.load(path)
        save(obj=STATE, f=path, pickle_protocol=2)
        assert torch.load(path)["step"] == 3


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_full_disk_is_an_oserror(tmp_path: Path, is_zip: bool) -> None:
    path = tmp_path / "model.pt"
    atomic_save(STATE, path)
    with limited_files(1 << 20), pytest.raises(OSError, match="File too large"):
        atomic_save(torch.zeros(1 << 20), path, _use_new_zipfile_serialization=is_zip)
    assert torch.load(path)["step"] == 3
    assert os.listdir(tmp_path) == ["model.pt"]


def test_nobody_may_read_what_replaces_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    atomic_save(1, path)
    path.chmod(0o600)
    modes = set()

    class Looking:
        def __reduce__(self) -> tuple[Any, ...]:
            for each in tmp_path.glob(".*.tmp"):
                modes.add(each.stat().st_mode & 0o777)
            return (int, ())

    atomic_save(Looking(), path)
    assert modes == {0o600}


def test_an_error_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    atomic_save(STATE, path)
    with pytest.raises(Exception, match="lambda"):
        atomic_save({"weight": torch.ones(9), "f": lambda: None}, path)
    assert torch.load(path, weights_only=True)["step"] == 3
    assert os.listdir(tmp_path) == ["model.pt"]


def test_the_mode_and_the_link_of_an_old_file_stay(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    real = tmp_path / "real" / "model.pt"
    atomic_save(1, real)
    real.chmod(0o640)
    link = tmp_path / "newest.pt"
    link.symlink_to("real/model.pt")
    atomic_save(2, link)
    assert link.is_symlink()
    assert torch.load(real) == 2
    assert real.stat().st_mode & 0o777 == 0o640


def test_what_cannot_be_replaced_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="atomic_save was given a BytesIO"):
        atomic_save(1, io.BytesIO())  # type: ignore[arg-type]
    for path in (tmp_path, Path("/dev/null")):
        with pytest.raises(ValueError, match=f"{path} is not a plain file"):
            atomic_save(1, path)
    with pytest.raises(FileNotFoundError):
        atomic_save(1, tmp_path / "nowhere" / "model.pt")


@pytest.mark.parametrize(
    "name",
    ["x" * 255, "\u00e4" * 120 + ".pt", "x" + "\u6a21" * 84],
    ids=["1", "2", "3"],
)
def test_a_long_name_has_room_for_a_temporary_one(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    atomic_save(1, path)
    atomic_save(2, path)
    assert torch.load(path) == 2


KILLED = """
import os, signal, sys
from pathlib import Path
from elasticrun.checkpoint.files.replacing import replace_file
def write(file):
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
replace_file(Path(sys.argv[1]), write)
"""


def test_what_a_killed_writer_left_is_cleared_away(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    atomic_save(1, path)
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    others = [".model.pt.0123.tmp", ".model.pt.0123456789abcdef.tmp"]  # Not ours.
    (tmp_path / others[0]).touch()
    os.mkfifo(tmp_path / others[1])
    assert len(os.listdir(tmp_path)) == 4
    assert torch.load(path) == 1
    atomic_save(2, path)
    assert sorted(os.listdir(tmp_path)) == [*others, "model.pt"]


def test_two_writers_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    first_has_begun, second_has_ended = threading.Event(), threading.Event()

    def write_slowly(file: Any) -> None:
        file.write(b"first ")
        file.flush()
        first_has_begun.set()
        assert second_has_ended.wait(60)
        file.write(b"and whole")

    first = threading.Thread(target=replace_file, args=(path, write_slowly))
    first.start()
    assert first_has_begun.wait(60)
    replace_file(path, write_text(b"second"))
    assert path.read_bytes() == b"second"
    second_has_ended.set()
    first.join()
    assert path.read_bytes() == b"first and whole"
    assert os.listdir(tmp_path) == ["file"]


# AtomicDirectory


def commit(directory: AtomicDirectory, text: str) -> Path:
    with directory.prepare() as version:
        (version / "text").write_text(text)
    return version.path


def test_a_version_exists_once_its_block_ends(tmp_path: Path) -> None:
    directory = AtomicDirectory(tmp_path / "exports")
    assert directory.latest() is None
    assert not (tmp_path / "exports").exists()
    with directory.prepare() as version:
        torch.save(STATE, version / "model.pt")
        Path(version, "notes").write_text("good")
        assert directory.latest() is None
    newest = directory.latest()
    assert newest == version.path
    assert sorted(os.listdir(newest)) == ["manifest.json", "model.pt", "notes"]
    assert torch.load(newest / "model.pt", weights_only=True)["step"] == 3


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    directory = AtomicDirectory(tmp_path)
    kept = commit(directory, "good")
    version = directory.prepare()

    def write_and_fail() -> None:
        with version:
            (version / "text").write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        write_and_fail()
    assert not version.path.exists()
    assert directory.latest() == kept
    assert commit(directory, "next").name == "checkpoint-00000002"


def test_a_key_that_interrupts_the_commit_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the files are forced to the disk, an error without a text."""
    directory = AtomicDirectory(tmp_path, keep=1)
    kept = commit(directory, "good")
    version = directory.prepare()
    (version / "text").write_text("more")
    with monkeypatch.context() as patch:

        def interrupt(_: int) -> None:
            patch.undo()
            signal.raise_signal(signal.SIGINT)

        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            version.commit()
    assert directory.latest() == kept
    assert not version.path.exists()


def test_it_can_be_committed_and_abandoned_by_hand(tmp_path: Path) -> None:
    directory = AtomicDirectory(tmp_path)
    version = directory.prepare()
    (version / "text").write_text("a")
    assert version.commit() == directory.latest() == version.path
    for again in (version.commit, version.abandon):
        with pytest.raises(ValueError, match="has been committed or abandoned already"):
            again()
    with directory.prepare() as version:
        version.abandon()
    assert directory.latest() == tmp_path / "checkpoint-00000001"


def test_old_versions_go_and_good_ones_stay(tmp_path: Path) -> None:
    directory = AtomicDirectory(tmp_path, keep=2)
    paths = [commit(directory, str(number)) for number in range(4)]
    assert [path.exists() for path in paths] == [False, False, True, True]
    (paths[3] / "text").write_text("x")
    with pytest.warns(CheckpointWarning, match="00000004 is skipped: .*/text has the"):
        assert directory.latest() == paths[2]
    (paths[3] / "text").unlink()
    assert commit(directory, "5").exists()
    assert paths[2].exists()  # The damaged one did not count.


def test_the_last_good_one_stays_whatever_happens(tmp_path: Path) -> None:
    directory = AtomicDirectory(tmp_path, keep=1)
    kept = commit(directory, "good")
    for _ in range(3):
        with pytest.raises(KeyError), directory.prepare():
            raise KeyError
    assert directory.latest() == kept
    wrong: Any
    for wrong in (0, 2.5, math.inf, None, True, "many"):
        with pytest.raises(ValueError, match=f"keep is {wrong!r}; give how many ch"):
            AtomicDirectory(tmp_path, keep=wrong)


@pytest.mark.slow
def test_what_a_killed_writer_began_is_removed(tmp_path: Path) -> None:
    directory = AtomicDirectory(tmp_path)
    kept = commit(directory, "good")
    code = (
        "import os, signal, sys\n"
        "from elasticrun import AtomicDirectory\n"
        "with AtomicDirectory(sys.argv[1]).prepare() as version:\n"
        "    (version / 'text').write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    torn = tmp_path / "checkpoint-00000002"
    assert torn.is_dir()
    assert directory.latest() == kept
    with directory.prepare() as version:
        assert os.listdir(version.path) == ["manifest.json.draft"]


def test_what_is_only_named_like_a_version_stays(tmp_path: Path) -> None:
    directory = AtomicDirectory(tmp_path, keep=1)
    mine = tmp_path / "checkpoint-20261122" / "weights.pt"
    mine.parent.mkdir()
    mine.write_text("mine")
    file = tmp_path / "checkpoint-20261123"
    file.write_text("mine")
    assert directory.latest() is None
    for number in (4, 5):
        with pytest.warns(CheckpointWarning, match="did not make it"):
            assert commit(directory, "text").name == f"checkpoint-2026112{number}"
    assert directory.latest() == tmp_path / "checkpoint-20261125"
    assert not (tmp_path / "checkpoint-20261124").exists()
    assert mine.read_text() == file.read_text() == "mine"


def test_only_plain_files_can_be_committed(tmp_path: Path) -> None:
    directory = AtomicDirectory(tmp_path / "exports")
    for make in (
        lambda path: path.mkdir(),
        lambda path: path.symlink_to(tmp_path),
        os.mkfifo,
    ):
        with (
            pytest.raises(ValueError, match="strange is (a link, )?not a plain file"),
            directory.prepare() as version,
        ):
            make(version / "strange")
        assert not version.path.exists()
    with (
        pytest.raises(ValueError, match=r"'manifest.json' is where a checkpoint"),
        directory.prepare() as version,
    ):
        (version / "manifest.json").touch()
    assert directory.latest() is None


@pytest.mark.slow
def test_two_at_once_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = AtomicDirectory(tmp_path)
    monkeypatch.setattr("elasticrun.checkpoint.storage.lock.POLL_INTERVAL", 0.001)
    with directory.prepare() as version:
        (version / "text").write_text("first")
        with pytest.raises(CheckpointError, match="is in use by a live job"):
            AtomicDirectory(tmp_path, keep=1).prepare()
    assert directory.latest() == version.path
    commit(AtomicDirectory(tmp_path), "second")


def test_a_second_version_while_one_is_open_is_refused_at_once(tmp_path: Path) -> None:
    directory = AtomicDirectory(tmp_path)
    with directory.prepare() as version:
        (version / "text").write_text("first")
        with pytest.raises(CheckpointError, match="00000001 has been prepared and is"):
            directory.prepare()
        assert find_owner(tmp_path) is not None  # The first one's lock.
    assert directory.latest() == version.path
    assert find_owner(tmp_path) is None
    commit(directory, "second")


def test_jobs_and_versions_do_not_mix(tmp_path: Path) -> None:
    commit(AtomicDirectory(tmp_path), "text")
    with pytest.raises(
        CheckpointError,
        match=r"00000001 is a version of an AtomicDirectory, but this is the job 'test'"
        r".* its own directory \(ELASTICRUN_CHECKPOINT_DIR\)\.$",
    ):
        run_once(lambda: None, tmp_path)


def test_a_jobs_checkpoints_are_not_pushed_out(tmp_path: Path) -> None:
    for _ in range(3):
        run_once(lambda: (Variables(value=1), save_all_states()), tmp_path)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(
        CheckpointError, match=r"checkpoint-00000003 is a checkpoint of the job 'test'"
    ):
        AtomicDirectory(tmp_path, keep=1).prepare()
    assert sorted(os.listdir(tmp_path)) == before
    with pytest.raises(CheckpointError, match="is a checkpoint of the job"):
        AtomicDirectory(tmp_path).latest()
    run_once(lambda: None, tmp_path)  # The lock is free.


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot hold this job's .*file"):
        AtomicDirectory(tmp_path / "file" / "exports").prepare()


def test_versions_of_which_none_is_whole_are_an_error(tmp_path: Path) -> None:
    directory = AtomicDirectory(tmp_path)
    (commit(directory, "good") / "text").write_text("bad!")
    with pytest.raises(CheckpointError, match="no checkpoint in .*\n.*/text"):
        directory.latest()
    (tmp_path / "checkpoint-00000001/manifest.json").unlink()
    assert directory.latest() is None


def test_a_full_disk_is_an_error_and_leaves_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = AtomicDirectory(tmp_path)
    kept = commit(directory, "good")

    with monkeypatch.context() as patch:
        patch.setattr(durable, "write_atomically", fail_for_space)
        with pytest.raises(OSError, match="No space left"):
            commit(directory, "more")
    assert os.listdir(tmp_path).count("checkpoint-00000002") == 0
    assert directory.latest() == kept


READ = """
import sys
from elasticrun import AtomicDirectory
directory = AtomicDirectory(sys.argv[1])
print("ready", flush=True)
for _ in range(100):
    path = directory.latest()
    assert path is not None
"""


@pytest.mark.slow
def test_a_reader_finds_a_version_while_another_process_commits(
    tmp_path: Path,
) -> None:
    directory = AtomicDirectory(tmp_path, keep=1)
    commit(directory, "first")
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", READ, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "ready\n"
        while reader.poll() is None:
            commit(directory, "more")
        assert reader.stderr is not None
        assert (reader.returncode, reader.stderr.read()) == (0, "")


@pytest.mark.slow
def test_it_starts_no_job() -> None:
    code = (
        "import sys\n"
        "from elasticrun import AtomicDirectory, atomic_save\n"
        "names = 'elasticrun.job.job', 'elasticrun.replicas.environment'\n"
        "print([n for n in sys.modules if n in names])\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert finished.stdout == "[]\n"
