"""What torch's threads say each second is shown a few times, and all else always."""

from __future__ import annotations

from elasticrun.launcher.terminal.repeats import Repeats

WARNING = (
    b"[rank1]:[W1122 13:00:%02d.%06d ProcessGroupNCCL.cpp:1783] [PG ID 0 Rank 1] "
    b'Failed to check the "should dump" flag on TCPStore\n'
)
STACK = [b"Exception raised from recvBytes\n", b"frame #0: c10::Error::Error\n"]


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
