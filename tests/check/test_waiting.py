"""Where the replicas of a hung generation wait."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import torch
import torch.distributed

import elasticrun
from elasticrun.check import waiting
from elasticrun.check.runs.source import WORK, find_source
from elasticrun.check.waiting import waits_of


def test_stacks_tell_where_each_replica_waits(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    script = str(tmp_path / "train.py")
    source = find_source(script, directory=str(tmp_path), linked=[])
    copy = f"/tmp/elasticrun-check-x/elasticrun-run-3/{WORK}/train.py"
    torch_file = "/usr/lib/torch/distributed/distributed_c10d.py"
    lines = [
        "Thread 0x1 (most recent call first):",
        '  File "/usr/lib/threading.py", line 9 in wait',
        "",
        "Current thread 0x2 (most recent call first):",
        f'  File "{torch_file}", line 40 in all_reduce',
        '  File "/usr/lib/torch/distributed/c10d_logger.py", line 83 in wrapper',
        f'  File "{copy}", line 12 in train',
        f'  File "{copy}", line 20 in <module>',
        '  File "/usr/elasticrun/launcher/replica/main.py", line 130 in _run_script',
    ]
    first, second = waits_of({0: lines}, 2, source)
    assert first.describe() == f"rank 0 waits in all_reduce at {script}:12 in train"
    assert second.describe() == "rank 1 said nothing"


def test_a_boundary_is_told_from_what_waits_in_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    source = find_source(str(tmp_path / "train.py"), directory=str(tmp_path), linked=[])
    lines = [
        "Current thread 0x2 (most recent call first):",
        '  File "/usr/lib/threading.py", line 9 in wait',
        '  File "/usr/elasticrun/replicas/gate.py", line 101 in _arrive_attentively',
        '  File "/usr/elasticrun/job/boundary.py", line 99 in reach',
        '  File "/usr/elasticrun/launcher/replica/main.py", line 130 in _run_script',
    ]
    (wait,) = waits_of({0: lines}, 1, source)
    assert wait.describe() == "rank 0 waits in a boundary, for other replicas"


def test_what_is_looked_for_in_stacks_is_there() -> None:
    texts = [
        node.value
        for node in ast.walk(ast.parse(inspect.getsource(waiting)))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    files = [text for text in texts if text.endswith(".py")]
    assert len(files) > 4
    package, of_torch = (Path(each.__path__[0]) for each in (elasticrun, torch))
    for file in files:
        folder = of_torch.parent if file.startswith("torch/") else package.parent
        assert (folder / file.removeprefix("/")).is_file(), file
    assert set(dir(torch.distributed)) >= waiting._COLLECTIVES
    assert "_run_script" in texts
    replica = package / "launcher" / "replica" / "main.py"
    assert "def _run_script(" in replica.read_text(encoding="utf-8")
