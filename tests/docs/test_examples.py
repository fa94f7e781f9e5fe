"""The examples run, also through a stop and at another number of replicas."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from elasticrun.testing import run_generation, start_generation
from tests.docs.documents import ROOT, blocks_of
from tests.support.forkservers import forks_that_have_imported
from tests.support.whole_scripts import Leave, Run, printed, run_each

sys.path.insert(0, str(ROOT / "examples"))
import demo

EXAMPLES = [
    "accelerated.py",
    "digits.py",
    "fixmatch.py",
    "gpt.py",
    "lightning_digits.py",
    "same_bits.py",
    "stream.py",
    "text.py",
    "trainer_gpt2.py",
]


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_is_short(name: str) -> None:
    text = (ROOT / "examples" / name).read_text(encoding="utf-8")
    assert len(text.splitlines()) < 120


@pytest.mark.slow
def test_text_learns(tmp_path: Path) -> None:
    script = ROOT / "examples" / "text.py"
    argv = str(script), "--epochs=1", "--num-bytes=200000"
    run_generation(Run(script.read_text(), tmp_path, argv=argv), 1)
    (bits,) = re.findall(r"held out  ([\d.]+) bits", "\n".join(printed(tmp_path)))
    assert float(bits) < 4.0  # 7 without having learned anything


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_steps", "arguments", "last"),
    [
        ("gpt.py", 60, ["--num-bytes=200000"], r"held out +[1-4]\.\d+ bits"),
        ("fixmatch.py", 60, [], r"accuracy [789]\d\.\d+%"),
        ("trainer_gpt2.py", 12, ["--num-bytes=60000"], r"held out +[1-5]\.\d+ bits"),
    ],
)
@pytest.mark.wide
def test_steps_learn_the_same_through_a_stop(
    name: str, num_steps: int, arguments: list[str], last: str, tmp_path: Path
) -> None:
    calm, cut = tmp_path / "calm", tmp_path / "cut"
    script = ROOT / "examples" / name
    counts = f"--steps={num_steps}", f"--eval-every={num_steps // 3}"
    argv = str(script), *counts, *arguments
    run = functools.partial(Run, script.read_text(), argv=argv)
    runs = run(calm), run(cut, Leave("stop", after=num_steps * 5 // 12)), run(cut)
    ((_, stopped, _),) = run_generation(run_each, 1, *runs)
    assert stopped is None
    assert len(printed(calm)) == 3
    assert re.fullmatch(rf"step +{num_steps}  {last}", printed(calm)[-1])
    assert printed(cut) == printed(calm)


@pytest.mark.slow(30)
@pytest.mark.wide
def test_streams_learn_the_same_at_4_2_and_3_replicas(tmp_path: Path) -> None:
    script = ROOT / "examples" / "stream.py"
    calm, shaken = tmp_path / "calm", tmp_path / "shaken"
    argv = str(script), "--steps=100", f"--data={tmp_path / 'data'}"
    run = functools.partial(Run, script.read_text(), argv=argv)
    run_generation(run_each, 1, run(calm))
    for world_size, steps in ((4, 30), (2, 20), (3, None)):
        leave = None if steps is None else Leave("stop", after=steps)
        run_generation(run_each, world_size, run(shaken, leave))
    bits = [
        [
            float(number)
            for number in re.findall(r"([\d.]+) bits", "\n".join(printed(at)))
        ]
        for at in (calm, shaken)
    ]
    assert len(bits[0]) == 2
    assert bits[0][1] < 4.0
    assert bits[1] == pytest.approx(bits[0], abs=0.011)  # Rounding shows in one digit.


@pytest.mark.slow(30)
@pytest.mark.wide
def test_same_bits_at_1_3_2_and_4_replicas_and_through_a_kill(tmp_path: Path) -> None:
    script = ROOT / "examples" / "same_bits.py"
    calm, shaken = tmp_path / "calm", tmp_path / "shaken"
    run = functools.partial(Run, script.read_text(), argv=(str(script), "--epochs=3"))
    run_generation(run_each, 1, run(calm))
    for world_size, how in ((1, "stop"), (3, "stop"), (2, "stop"), (4, "kill")):
        with start_generation(run(shaken, Leave(how, after=14)), world_size) as started:
            exit_codes = [each.exit_code for each in started.wait(timeout=600)]
        assert exit_codes[-1] == (-9 if how == "kill" else 0)
    run_generation(run_each, 4, run(shaken))
    assert printed(shaken) == printed(calm)
    assert printed(calm)[-1].startswith("bits ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "framework"),
    [("accelerated.py", "accelerate"), ("lightning_digits.py", "lightning.pytorch")],
)
@pytest.mark.wide
def test_script_of_a_framework_learns_the_same_through_a_stop(
    name: str, framework: str, tmp_path: Path
) -> None:
    calm, cut = tmp_path / "calm", tmp_path / "cut"
    script = ROOT / "examples" / name

    def run(directory: Path, leave: Leave | None = None) -> Any:
        argv = str(script), "--epochs=4", f"--checkpoint-dir={directory}/own"
        run = Run(script.read_text(), directory, leave, argv)
        (ended,) = run_generation(run, 1)
        return ended

    with forks_that_have_imported(framework):
        run(calm)
        assert run(cut, Leave("stop", after=60)) is None
        run(cut)
    assert list((cut / "own").glob("checkpoint-*"))
    assert printed(cut) == printed(calm)
    epochs = re.findall(r"epoch +(\d+)  accuracy ([\d.]+)", "\n".join(printed(calm)))
    assert [int(number) for number, _ in epochs] == list(range(4))
    assert float(epochs[-1][1]) > 80


@pytest.mark.slow(120)
@pytest.mark.wide
def test_demo_passes() -> None:
    done = subprocess.run(
        [sys.executable, "demo.py"],
        cwd=ROOT / "examples",
        capture_output=True,
        text=True,
        timeout=3600,
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


@pytest.mark.slow(60)
@pytest.mark.wide
def test_readme_shows_what_the_terminal_shows(tmp_path: Path) -> None:
    (shown,) = [
        block.code
        for block in blocks_of(ROOT / "README.md")
        if block.language == "console"
    ]
    (command,) = re.findall(r"^\$ (elasticrun run .*)$", shown, re.MULTILINE)
    command = command.replace("/tmp/digits", str(tmp_path / "digits"))
    command += " --epochs 2000"  # It must not end before it is killed and stopped.
    log = tmp_path / "log"
    # A kill between a step and its sums is not rescued, and a slow machine's
    # checkpoints by time would have other numbers.
    settings = {"ELASTICRUN_RESCUE": "off", "ELASTICRUN_SAVE_INTERVAL": "off"}
    with log.open("w") as output:
        launcher = subprocess.Popen(
            [sys.executable, "-m", *command.split()],
            cwd=ROOT,
            env={**os.environ, **settings},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        await_line(log, "[0] epoch  1 ")
        demo.command(launcher, "scale", "2")
        await_line_after(
            log, "elasticrun: generation 1: 2 replicas started, resumed", "[0] epoch "
        )
        demo.kill(launcher, rank=1)
        await_line_after(
            log, "elasticrun: generation 2: 2 replicas started, resumed", "[0] epoch "
        )
        demo.command(launcher, "stop")
        assert launcher.wait(300) == demo.EXIT_STOPPED
    finally:
        launcher.kill()
        launcher.wait()
    written = log.read_text()
    (stopped_at,) = set(re.findall(r"stopping at (.*) because of a resc", written))
    assert set(re.findall(r"resumed gen.* at (.*) from", written)) == {stopped_at}
    lines = iter(without_values(written))
    for line in without_values(shown):
        if not line.startswith("$"):
            assert line in lines, f"{line!r} is not shown, or not in this place"


def without_values(text: str) -> list[str]:
    """Return the lines without what differs between two runs."""
    text = re.sub(
        r"; rank \d saved .*(?=; restart)", "", text
    )  # Without a rescue nobody has.
    text = re.sub(r"checkpoint([ -])\d+", r"checkpoint\1#", text)
    text = re.sub(r"\S*/digits", "digits", text)
    text = re.sub(r"(?m) at (epoch|the end).*?( because| from|:|$)", r" at #\2", text)
    text = re.sub(r"epoch +\d+  accuracy", "epoch #  accuracy", text)
    return re.sub(r"[\d.]+ s\b|[\d.]+%", "#", text).splitlines()


def await_line(log: Path, text: str) -> None:
    """Wait until the log has a line that begins so."""
    await_line_after(log, "", text)


def await_line_after(log: Path, first: str, text: str) -> None:
    """Wait until the log has a line that begins so, behind one that begins so."""
    deadline = time.monotonic() + 300
    sought = re.compile(
        f"^{re.escape(first)}.*?^{re.escape(text)}", re.MULTILINE | re.DOTALL
    )
    while not sought.search(log.read_text()):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
