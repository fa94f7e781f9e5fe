"""The files that keep what replicas print."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from pathlib import Path

import pytest

from elasticrun.__main__ import main
from elasticrun.launcher.terminal import output
from elasticrun.launcher.terminal.output import Log, LogReader, find_logs, log_path


def test_a_log_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    errors: list[OSError] = []
    for folder, name in ((tmp_path / "file", "rank-0.log"), (tmp_path, "full")):
        log = Log(folder / "generation-0000" / name, errors.append)
        log.write(b"line\n")
        log.close()
    assert [type(error) for error in errors] == [NotADirectoryError]
    full = Log(tmp_path / "rank-1.log", errors.append)
    assert full._file is not None
    full._file.close()
    full._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    full.write(b"line\n")
    full.write(b"line\n")
    full.close()
    assert [error.errno for error in errors[1:]] == [errno.ENOSPC]


def test_a_planted_link_or_pipe_is_not_followed(tmp_path: Path) -> None:
    """Neither by what is printed, nor by who reads it."""
    outside = tmp_path / "outside"
    outside.write_text("of somebody else\n")
    errors: list[OSError] = []
    for rank, plant in enumerate((lambda path: path.symlink_to(outside), os.mkfifo)):
        path = log_path(tmp_path, generation=0, rank=rank)
        path.parent.mkdir(exist_ok=True)
        plant(path)
        log = Log(path, errors.append)
        log.write(b"line\n")
        log.close()
    assert outside.read_text() == "of somebody else\n"
    assert "is a link, not a plain file" in str(errors[0])
    assert len(errors) == 2
    assert find_logs(tmp_path) == {0: {}}


def test_logs_are_appended_and_found_in_order(tmp_path: Path) -> None:
    for generation, rank in ((10, 0), (2, 11), (2, 3), (2, 3)):
        path = log_path(tmp_path, generation=generation, rank=rank)
        log = Log(path, pytest.fail)
        log.write(b"line\n")
        log.close()
    found = find_logs(tmp_path)
    assert [(g, list(ranks)) for g, ranks in found.items()] == [
        (2, [3, 11]),
        (10, [0]),
    ]
    assert found[2][3].read_bytes() == b"line\nline\n"


def test_lines_are_chosen_by_generation_rank_and_number(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "no-sockets"))
    for generation, rank in ((1, 0), (2, 0), (2, 1)):
        log = Log(log_path(tmp_path, generation=generation, rank=rank), pytest.fail)
        for number in range(3):
            log.write(b"line %d\n" % (100 * generation + 10 * rank + number))
        log.close()
    for options, numbers in (
        ("", [200, 201, 202, 210, 211, 212]),
        ("--generation 1", [100, 101, 102]),
        ("--rank 1 --tail 2", [211, 212]),
        ("--rank 1 --tail 0", []),
    ):
        assert main(["logs", str(tmp_path), *options.split()]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [int(line.split()[-1]) for line in lines] == numbers
    assert main(["logs", str(tmp_path), "--generation", "7"]) == 3
    assert "generations: 1 (ranks 0), 2 (ranks 0, 1)" in capsys.readouterr().err


def test_a_log_is_bounded_and_read_over_the_border(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "MOST_BYTES", 100)
    path = tmp_path / "rank-0.log"
    log = Log(path, pytest.fail)
    log.write(b"line 0\n")
    reader = LogReader(path)
    seen = list(reader.read())
    log.write(b"line 1\n")
    coming = reader.read()
    seen.append(next(coming))  # The others come, and it moves, meanwhile.
    for number in range(2, 20):
        log.write(b"line %d\n" % number)
    seen += coming
    assert len(seen) == 20
    for number in range(20, 40):
        log.write(b"line %d\n" % number)
        if number % 7 == 0:  # Sooner than a second file is full.
            seen += reader.read()
    seen += reader.read()
    assert seen == [b"line %d\n" % number for number in range(40)]
    reader.close()
    log.close()
    with closing(LogReader(path)) as reader:
        kept = list(reader.read())
    assert kept == seen[-len(kept) :]
    assert 100 < sum(map(len, kept)) < 230
    assert sorted(os.listdir(tmp_path)) == ["rank-0.log", "rank-0.old.log"]
