"""The examples run, also through a stop and at another number of replicas."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.documents import ROOT

sys.path.insert(0, str(ROOT / "examples"))
import demo  # noqa: E402

EXAMPLES = ["digits.py", "text.py"]


def run_example(name: str, *arguments: str, num_replicas: int = 1) -> str:
    command = [sys.executable]
    if num_replicas > 1:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(num_replicas)]
    command += [str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_is_short(name: str) -> None:
    text = (ROOT / "examples" / name).read_text(encoding="utf-8")
    assert len(text.splitlines()) < 120


@pytest.mark.slow
def test_digits_go_on_with_two_replicas(tmp_path: Path) -> None:
    directory = ("--checkpoint-dir", str(tmp_path))
    first = run_example("digits.py", "--epochs", "1", *directory)
    assert re.search(r"started generation 0 with world size 1", first)
    second = run_example("digits.py", "--epochs", "2", *directory, num_replicas=2)
    assert re.search(r"resumed generation 1 with world size 2 at the end of epoch 0", second)
    assert re.findall(r"^epoch +(\d+) ", second, re.MULTILINE) == ["1"]


@pytest.mark.slow
def test_text_learns(tmp_path: Path) -> None:
    output = run_example("text.py", "--epochs", "1", "--num-bytes", "200000")
    (bits,) = re.findall(r"held out  ([\d.]+) bits", output)
    assert float(bits) < 4.0  # 7 without having learned anything


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_demo_passes() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py")],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The same samples, batches and model." in done.stdout


CALM = {(0, 0, 0): {0: [3, 1]}, (0, 0, 1): {0: [2, 0]}}


def test_demo_accepts_the_same_batches_from_several_generations() -> None:
    same = {(0, 0, 0): {0: [3, 1]}, (0, 0, 1): {0: [2, 0], 1: [2, 0]}}
    comparison = demo.compare(CALM, same, killed={0})
    assert comparison.differences == []
    assert (comparison.num_samples, comparison.num_redone) == (4, 2)


@pytest.mark.parametrize(
    "actual",
    [
        {(0, 0, 0): {0: [3, 1]}},
        {(0, 0, 0): {0: [3, 1]}, (0, 0, 1): {0: [0, 2]}},
        {(0, 0, 0): {0: [3, 1]}, (0, 0, 1): {0: [2, 0], 1: [2, 0]}},
        {**CALM, (0, 0, 2): {0: [1]}},
    ],
    ids=["a batch lost", "another order", "again after a stop", "a batch too many"],
)
def test_demo_sees_a_difference(actual: demo.Deliveries) -> None:
    assert demo.compare(CALM, actual, killed=set()).differences


def test_demo_sees_a_repeated_sample() -> None:
    loop = {(0, 1, 0): {0: [*range(357), 3]}}
    assert demo.repeated_samples(loop)
