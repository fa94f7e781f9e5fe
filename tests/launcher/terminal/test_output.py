"""What replicas print, line by line, and the logs that keep it."""

from __future__ import annotations

import itertools
import os

from hypothesis import given
from hypothesis import strategies as st

from elasticrun.launcher.terminal.output import LineReader, Repeats, marked

# What torch's threads say each second.
WARNING = (
    b"[rank1]:[W1122 13:00:%02d.%06d ProcessGroupNCCL.cpp:1783] [PG ID 0 Rank 1] "
    b'Failed to check the "should dump" flag on TCPStore\n'
)
STACK = [b"Exception raised from recvBytes\n", b"frame #0: c10::Error::Error\n"]


@given(
    text=st.lists(st.binary(min_size=0, max_size=30), max_size=10),
    cuts=st.lists(st.integers(0, 300), max_size=8),
)
def test_lines_are_whole_however_they_come(text: list[bytes], cuts: list[int]) -> None:
    data = b"\n".join(text)
    reader, writer = os.pipe()
    lines: list[bytes] = []
    pipe = LineReader(reader, lines.append)
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for begin, end in itertools.pairwise(places):
        os.write(writer, data[begin:end])
        pipe.read()
    os.close(writer)
    pipe.close()
    assert all(line.endswith(b"\n") for line in lines)
    assert b"".join(lines).removesuffix(b"\n") == data.removesuffix(b"\n")


def test_an_endless_line_is_not_kept_in_memory() -> None:
    reader, writer = os.pipe()
    lines: list[bytes] = []
    pipe = LineReader(reader, lines.append)
    os.set_blocking(writer, False)
    for _ in range(4):
        os.write(writer, b"x" * 60_000)
        pipe.read()
    os.close(writer)
    pipe.close()
    assert len(lines) > 1
    assert sum(map(len, lines)) == 240_000


def test_who_goes_on_to_print_is_not_waited_for() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"the last words\n" + b"x" * 50_000)
    lines: list[bytes] = []

    def take(line: bytes) -> None:
        lines.append(line)
        os.write(writer, b"y" * 30_000 + b"\n")

    pipe = LineReader(reader, take)
    pipe.close()
    os.close(writer)
    assert lines[0] == b"the last words\n"
    assert sum(map(len, lines)) > 50_000


def test_a_progress_bar_shows_what_it_drew_last() -> None:
    assert marked(3, b"10%|#\r50%|##\n") == "[3] 50%|##"
    assert marked(0, b"\xff\n") == "[0] \N{REPLACEMENT CHARACTER}"


def test_a_warning_of_each_second_is_shown_three_times() -> None:
    repeats = Repeats()
    text = b"".join(
        repeats.filtered(line)
        for second in range(10)
        for line in (WARNING % (second, 7 * second), *STACK, b"loss 0.5\n")
    )
    assert text.count(b"should dump") == text.count(b"frame #0") == 3
    assert text.count(b"only in its log") == 1
    assert text.count(b"loss 0.5") == 10


def test_other_lines_may_repeat() -> None:
    repeats = Repeats()
    other = WARNING.replace(b"1783", b"99") % (1, 2)
    assert [repeats.filtered(b"0\n") for _ in range(9)] == [b"0\n"] * 9
    for _ in range(5):
        repeats.filtered(WARNING % (1, 2))
    assert repeats.filtered(other) == other
