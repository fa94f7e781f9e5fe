"""Scripts of well-known shapes, as they are and with elasticrun, through restarts.

Each file of docs/ports is a diff of a whole script, and docs/howto/loops.md has a table
of them. Few lines are new; what a script does is the same with a stop, a `kill -9`, and
another number of replicas in between.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elasticrun.lint.engine import lint_text
from elasticrun.lint.options import LintOptions
from elasticrun.testing import read_trace, run_generation, start_generation
from tests.docs.documents import ROOT, side_of
from tests.support.whole_scripts import Leave, Run, printed, run_each

# Each replica draws in their steps, so that two replicas train another model than one.
DRAWING = ["vae", "nanogpt", "ddpm", "reinforce", "dcgan"]
FOLDER = ROOT / "docs" / "ports"
PORTS = sorted(path.stem for path in FOLDER.iterdir())

Place = tuple[int, int, tuple[int, ...], str, int]  # Epoch, loops, member, batch.


def diff_of(name: str) -> str:
    return (FOLDER / f"{name}.diff").read_text()


def delivered(directory: Path) -> dict[Place, list[int]]:
    """Return the samples of each batch, in order, as they were delivered last."""
    batches: dict[Place, list[int]] = {}
    generation_of: dict[Place, int] = {}
    lines = read_trace(directory / "trace")
    for line in sorted(
        lines, key=lambda line: (line["generation"], line["rank"], line["micro"])
    ):
        inside = tuple(line.get("inside", ()))
        member = line.get("member", "")
        place = (line["epoch"], line["loop"], inside, member, line["batch"])
        if generation_of.get(place) != line["generation"]:
            generation_of[place], batches[place] = line["generation"], []
        batches[place] += line["indices"][: line["num_valid"]]
    return batches


def without_floats(lines: list[str]) -> list[str]:
    return list(dict.fromkeys(re.sub(r"-?\d+\.\d+", "#", line) for line in lines))


def written(directory: Path) -> dict[str, Any]:
    """Return what is in the files that the script itself wrote."""
    paths = (path for path in (directory / "work").rglob("*") if path.is_file())
    return {path.name: plain(torch.load(path)) for path in paths}


def plain(value: Any) -> Any:
    """Return tensors as numbers, in what holds them."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def run_killed(run: Run, world_size: int) -> None:
    with start_generation(run, world_size) as started:
        outcomes = started.wait(timeout=600)
    assert outcomes[-1].exit_code == -9, outcomes


@pytest.mark.slow
@pytest.mark.parametrize("name", PORTS)
def test_port_does_the_same_through_restarts(name: str, tmp_path: Path) -> None:
    before, port = side_of(diff_of(name), "-"), side_of(diff_of(name), "+")
    check_restarts(before, port, tmp_path, draws=name in DRAWING)


def check_restarts(before: str, port: str, tmp_path: Path, *, draws: bool) -> None:
    """Run a script calmly, through a stop and a kill, and with other replicas.

    Args:
        before: What it was, which runs to its end as well.
        draws: Whether each replica draws in its steps.
    """
    calm, same, other = tmp_path / "calm", tmp_path / "same", tmp_path / "other"
    (ended,) = run_generation(
        run_each,
        1,
        Run(before, tmp_path / "before"),
        Run(port, calm),
        Run(port, same, Leave("stop", after=5)),
    )
    assert ended[2] is None  # It was stopped; the others came to their ends.
    shutil.copytree(same, other)
    run_killed(Run(port, same, Leave("kill", after=6)), 1)
    run_killed(Run(port, other, Leave("kill", after=5)), 2)
    (finished,) = run_generation(run_each, 1, Run(port, same), Run(port, other))

    assert delivered(same) == delivered(other) == delivered(calm)
    assert printed(same) == printed(calm)
    assert without_floats(printed(other)) == without_floats(printed(calm))
    assert written(same) == written(calm)
    assert written(other).keys() == written(calm).keys()
    for wanted, exact, close in zip(ended[1], *finished, strict=True):
        np.testing.assert_array_equal(exact, wanted)
        if not draws:
            np.testing.assert_allclose(close, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.wide
@pytest.mark.parametrize("name", ["vae", "no_trainer", "ddpm"])
def test_port_ends_alike_at_any_number_with_virtual_replicas(
    name: str, tmp_path: Path
) -> None:
    port, ends = side_of(diff_of(name), "+"), []
    variables = {"ELASTICRUN_VIRTUAL_REPLICAS": "4"}
    for size in (1, 2, 3):
        run = Run(port, tmp_path / str(size))
        ends += run_generation(run, size, variables=variables)
    for end in ends:
        for found, wanted in zip(end, ends[0], strict=True):
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("name", PORTS)
def test_port_has_no_findings(name: str) -> None:
    result = lint_text(
        side_of(diff_of(name), "+"), name=f"{name}.py", options=LintOptions()
    )
    assert not result.problems
    assert not result.findings


def test_recipes_say_how_many_lines_are_new() -> None:
    recipes = (ROOT / "docs" / "howto" / "loops.md").read_text()
    said = re.findall(
        r"^\| \[\w+\]\(\.\./ports/(\w+)\.diff\) .* (\d+) \|$", recipes, re.M
    )
    num_new = {
        name: len(re.findall(r"^\+", (FOLDER / f"{name}.diff").read_text(), re.M))
        for name in PORTS
    }
    assert {name: int(number) for name, number in said} == num_new
    # Those of earlier ports of the scripts that these are like.
    before = {"nanogpt": 14, "fixmatch": 33, "mingpt": 9, "no_trainer": 18}
    assert all(num_new[name] < number for name, number in before.items())
