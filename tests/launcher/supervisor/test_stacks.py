"""What the message of a hang takes from printed stacks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from elasticrun.launcher.supervisor.generation import Stack, describe_places

# A thread is printed as well, and the main one hangs in the standard library.
PROGRAM = """
import contextlib, faulthandler, threading

def main():
    with contextlib.ExitStack() as stack:
        stack.callback(faulthandler.dump_traceback)

threading.Thread(target=threading.Event().wait, daemon=True).start()
main()
"""


def stack_of(text: bytes) -> Stack:
    stack = Stack()
    for line in text.splitlines(keepends=True):
        stack.take(line)
    return stack


def test_the_programs_line_is_found_in_a_real_stack(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    run = subprocess.run([sys.executable, script], capture_output=True, check=True)
    assert run.stderr.count(b"most recent call first") == 2
    assert stack_of(run.stderr).place == "train.py:5, in _exit_wrapper"


def test_places_with_few_ranks_come_first() -> None:
    stacks = {
        rank: stack_of(
            b"Thread 0x1 (most recent call first):\n"
            b'  File "/x/other.py", line 9 in run\n\n'
            b"Current thread 0x2 (most recent call first):\n"
            b'  File "/v/lib/site-packages/torch/d.py", line 3 in all_reduce\n'
            b'  File "/x/train.py", line %d in main\n' % (7 if rank == 5 else 4)
        )
        for rank in range(11)
    }
    stacks[11] = Stack()
    assert describe_places(stacks) == (
        "rank 5 at train.py:7, in all_reduce; "
        "ranks 0, 1, 2, 3, 4, 6, 7, 8 and others at train.py:4, in all_reduce"
    )
    assert describe_places({0: Stack()}) == ""
