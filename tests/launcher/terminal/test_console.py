"""What is written where nobody reads, and to a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading
from pathlib import Path

import pytest

from elasticrun.launcher import environment
from elasticrun.launcher.terminal.console import (
    Console,
    Screen,
    Stream,
    only_colours,
)
from tests.launcher.running import ELASTICRUN, WITHOUT_TORCH, variables
from tests.support.stage import DEADLINE, Stage, wait_until


def read_all(descriptor: int) -> str:
    with open(descriptor, "rb") as file:
        return file.read().decode()


def test_lines_are_left_out_only_while_nobody_reads() -> None:
    reader, writer = os.pipe()
    console = Console(lambda: Screen(writer, writer), has_status_line=False)
    line = "x" * 2000
    for _ in range(6000):
        console.output(line, is_error=False)
    console.event("stopped")
    texts: list[str] = []
    reading = threading.Thread(target=lambda: texts.append(read_all(reader)))
    reading.start()
    wait_until(lambda: console._num_bytes == 0)
    for _ in range(6000):
        console.output(line, is_error=False)
    console.close()
    os.close(writer)
    reading.join()
    before, after = texts[0].split("elasticrun: stopped\n")
    [left_out] = re.findall(r"^elasticrun: (\d+) lines left out, see the logs$",
                            before, re.MULTILINE)  # fmt: skip
    assert before.count(line) + int(left_out) == 6000
    assert before.count(line) > 1000
    assert after == f"{line}\n" * 6000


@pytest.mark.slow
def test_a_job_whose_output_nobody_reads_comes_to_its_end(stage: Stage) -> None:
    script = stage.root / "script.py"
    script.write_text(
        "import pathlib, sys\nfor number in range(200_000): print(number, 'x' * 60)\n"
    )
    reader, writer = os.pipe()
    job = subprocess.Popen(
        [*ELASTICRUN, "run", "--replicas", "1", *WITHOUT_TORCH, str(script)],
        env=variables(stage),
        cwd=stage.root,
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=writer,
    )
    os.close(writer)
    assert job.wait(DEADLINE) == 0
    os.close(reader)
    log = stage.checkpoints / "logs" / "generation-0000" / "rank-0.log"
    assert log.read_bytes().count(b"\n") == 200_000


class Terminal:
    """The side of a terminal that a person sees."""

    def __init__(self, master: int, slave: int) -> None:
        self._master = master
        self._slave = slave

    def close(self) -> str:
        """Return what was written, all of it."""
        os.write(self._slave, b"END")
        text = b""
        while not text.endswith(b"END"):
            text += os.read(self._master, 1 << 16)
        os.close(self._slave)
        os.close(self._master)
        return text.decode()


def on_terminal() -> tuple[Screen, Terminal]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    return Screen(slave, slave), Terminal(master, slave)


def test_a_terminal_gets_whole_paths_and_nothing_but_colours() -> None:
    screen, terminal = on_terminal()
    path = str(Path("/") / ("long" * 20))
    screen.event(f"[job] :smile: in {path}")
    screen.output("[0] \x1b[31mred\x1b[2J\x1b]0;title\x07\x07 not", is_error=False)
    screen.close()
    text = terminal.close()
    assert f"[job] :smile: in {path}" in text
    assert "\x1b[31mred not\x1b[0m" in text
    assert "title" not in text


def test_ranks_have_colours_on_a_terminal_only(tmp_path: Path) -> None:
    screen, terminal = on_terminal()
    screen._has_colours = True
    with (tmp_path / "file").open("wb") as file:
        screen._out = Stream(file.fileno())
        for rank in (0, 1, 8):
            screen.output(f"[{rank}] loss [2]", is_error=rank > 0)
    screen.close()
    assert (tmp_path / "file").read_text() == "[0] loss [2]\n"
    text = terminal.close()
    assert "\x1b[33m[1]\x1b[0m loss [2]" in text
    assert "\x1b[36m[8]\x1b[0m loss [2]" in text


@pytest.mark.parametrize(("value", "expected"), [("", True), ("1", False)])
def test_who_wants_no_colours_says_so(
    monkeypatch: pytest.MonkeyPatch, value: str, expected: bool
) -> None:
    monkeypatch.setenv("NO_COLOR", value)
    assert environment.has_colours() == expected


def test_the_line_that_lives_fits_the_terminal() -> None:
    screen, terminal = on_terminal()
    screen.show_status("y" * 200)
    screen.close()
    text = terminal.close()
    assert "y" * 38 + "\N{HORIZONTAL ELLIPSIS}" in text
    assert "y" * 39 not in text


def test_the_line_that_lives_does_nothing_else_to_a_terminal() -> None:
    screen, terminal = on_terminal()
    screen.show_status("job \x1b]0;title\x07at epoch 1")
    screen.close()
    assert "job at epoch 1" in terminal.close()


def test_the_line_that_lives_stays_below_what_is_written() -> None:
    screen, terminal = on_terminal()
    screen.show_status("first")
    screen.output("[0] a line", is_error=False)
    screen.show_status("and")
    screen.event("an event")
    screen.close()
    # The terminal itself writes a return before each new line.
    assert terminal.close().split("\r") == [
        *("first", "     ", "[0] a line", "\nfirst", "     ", "and"),
        *("   ", "elasticrun: an event", "\nand", "   ", "END"),
    ]


def test_what_does_something_to_a_terminal_is_taken_out() -> None:
    assert only_colours("plain \u6f22\ttab") == "plain \u6f22\ttab"
    assert only_colours("\x1b[1;31mred\x1b[0m") == "\x1b[1;31mred\x1b[0m"
    assert only_colours("a\x1b[2Jb\x1b[Hc\x1b(0d\x1bPq\x1b\\e\x9b1mf") == "abcde1mf"


@pytest.mark.slow
def test_a_terminal_shows_a_traceback_once(stage: Stage) -> None:
    script = stage.root / "script.py"
    script.write_text("raise ValueError('the loss is not a number')")
    master, slave = pty.openpty()
    with subprocess.Popen(
        [*ELASTICRUN, "run", "--replicas", "1", *WITHOUT_TORCH, str(script)],
        env=variables(stage, TERM="xterm", COLUMNS=200),
        cwd=stage.root,
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=slave,
    ) as job:
        os.close(slave)
        shown = b""
        with contextlib.suppress(OSError):  # The launcher has closed its side.
            while data := os.read(master, 1 << 16):
                shown += data
        os.close(master)
    assert job.returncode == 1
    text = shown.decode()
    assert text.count("Traceback (most recent call last)") == 1
    assert "elasticrun/launcher" not in text
    assert "failed: this was before the first batch" in text
