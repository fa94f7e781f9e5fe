"""Where the replicas of a hung generation wait."""

from __future__ import annotations

from pathlib import Path

from elasticrun.check.problems import where_it_waits
from elasticrun.check.runs.source import WORK, find_source
from elasticrun.launcher.supervisor.generation import Stack


def test_stacks_tell_where_each_replica_waits(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def train():\n    dist.all_reduce(x)\n\n\ntrain()\n")
    source = find_source(str(script), directory=str(tmp_path), linked=[])
    copy = f"/tmp/elasticrun-check-x/elasticrun-run-3/{WORK}/train.py"
    stack = Stack()
    for line in (
        "Thread 0x1 (most recent call first):",
        f'  File "{copy}", line 1 in in_a_thread',
        "",
        "Current thread 0x2 (most recent call first):",
        '  File "/usr/lib/torch/distributed/distributed_c10d.py", line 4 in all_reduce',
        f'  File "{copy}", line 2 in train',
        f'  File "{copy}", line 5 in <module>',
        '  File "/usr/elasticrun/launcher/replica/main.py", line 130 in _run_script',
    ):
        stack.take(line.encode())
    assert where_it_waits(0, stack, source) == (
        f"rank 0 waits at {script}:2 in train: dist.all_reduce(x)"
    )
    assert where_it_waits(1, Stack(), source) == "rank 1 did not say where it waits"
