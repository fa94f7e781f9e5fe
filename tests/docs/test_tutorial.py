"""The tutorial shows what its script is, and what its commands print."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from elasticrun.lint.engine import lint_text
from elasticrun.lint.options import LintOptions
from tests.docs.documents import ROOT, blocks_of, side_of
from tests.docs.test_examples import await_line, await_line_after

FOLDER = ROOT / "docs" / "tutorial"
PAGE = FOLDER / "first-job.md"
NUM_EPOCHS = 60  # Of 200: enough to type commands in between.


def source(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def test_the_diff_is_what_differs_between_the_files() -> None:
    (diff,) = [block.code for block in blocks_of(PAGE) if block.language == "diff"]
    parts = [part.strip() for part in re.split(r"^ \.\.\.$", diff, flags=re.MULTILINE)]
    for side, name in (("-", "plain.py"), ("+", "train.py")):
        for part in parts:
            assert side_of(part, side).strip() in source(name)
    rest = [line[1:] for line in diff.splitlines() if line[:1] == "+"]
    new = set(source("train.py").splitlines()) - set(source("plain.py").splitlines())
    assert {line for line in new if not line.startswith('"""')} <= set(rest)


def test_the_script_has_no_findings() -> None:
    found = lint_text(source("train.py"), name="train.py", options=LintOptions())
    assert not found.problems
    assert not found.findings


@pytest.mark.slow(120)
@pytest.mark.wide
def test_the_commands_print_what_the_page_shows(tmp_path: Path) -> None:
    for name in ("plain.py", "train.py"):
        text = source(name).replace("200)", f"{NUM_EPOCHS})")
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "tmp").mkdir()
    variables = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "OMP_NUM_THREADS": "1"}
    log = tmp_path / "log"

    def command(words: str, *, code: int = 0) -> str:
        """Run a command that the page shows; return what it prints."""
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(words)],
            cwd=tmp_path,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert done.returncode == code, done.stdout
        return f"$ {words}\n{done.stdout}"

    said = command("elasticrun lint plain.py", code=1)
    with log.open("w") as output:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "elasticrun", "run", "--replicas", "2", "train.py"],
            cwd=tmp_path,
            env=variables,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        await_line(log, "[0] epoch 3 ")
        said += command("elasticrun status")
        said += command("elasticrun scale 3")
        await_line_after(
            log, "elasticrun: generation 1: 3 replicas started, resumed", "[0] epoch "
        )
        pids = re.findall(r"rank 1 +process (\d+)", command("elasticrun status"))
        os.kill(int(pids[0]), 9)
        await_line_after(
            log, "elasticrun: generation 2: 3 replicas started, resumed", "[0] epoch "
        )
        said += command("elasticrun stop")
        assert launcher.wait(300) == 75
    finally:
        launcher.kill()
        launcher.wait()
    said += "$ elasticrun run --replicas 2 train.py\n" + log.read_text()
    said += command("elasticrun run --replicas 1 train.py")
    said += command("elasticrun run --replicas 1 train.py")
    said += command("elasticrun checkpoints")
    said += command("elasticrun checkpoints export newest digits.safetensors")
    said = said.replace(str(tmp_path), "/tmp/tutorial")

    shown = [b.code for b in blocks_of(PAGE) if b.language == "console"]
    lines = set(shapes(said))
    missing = [line for text in shown for line in shapes(text) if line not in lines]
    assert not missing, said


def shapes(text: str) -> list[str]:
    """Return the lines without positions and numbers, which differ from run to run.

    Without a rescue's, too: a process may die where nobody can save for it.
    """
    place = r"(the end of )?epoch \d+(, loop \d+(, sample \d+ of `\w+`( of \d+)?)?)?"
    left_out = r"; rank \d+ saved .*|; no rescue: .*|, [^,]* left$"
    text = re.sub(left_out, "", text, flags=re.MULTILINE)
    lines = re.sub(r"\d[\d.]*%?", "#", re.sub(place, "#", text)).splitlines()
    return [
        re.sub(r" +", " ", line).strip()
        for line in lines
        if line not in ("...", "") and not line.startswith("  speed")
    ]
