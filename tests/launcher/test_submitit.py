"""The recipe for submitit, by its executor that needs no Slurm."""

from __future__ import annotations

import json
import re
import signal
import sys
import textwrap
from importlib import import_module
from pathlib import Path

import psutil
import pytest

from tests.launcher.running import REPOSITORY, elasticrun, processes_of, variables
from tests.support.stage import Stage, wait_until

pytestmark = pytest.mark.slow

RECIPE = re.compile(r"( {4}class Train\(submitit.*?)\n    job = submitit", re.DOTALL)
NUM_SAMPLES = 240
MODULE = """
import sys
from pathlib import Path
import elasticrun
import submitit
from tests.support.loops import hold
from tests.support.stage import Stage

def train(root):
    loader = elasticrun.AdaptiveDataLoader(range(240), 6, shuffle=True)
    for _ in elasticrun.remaining_epochs_until(1):
        for batch in loader:
            if loader.batch_index == 9 + 10 * elasticrun.generation():
                hold(Stage(Path(root)))
    return elasticrun.generation()

"""


@pytest.mark.parametrize("is_all", [True, pytest.param(False, marks=pytest.mark.soak)])
@pytest.mark.wide
def test_a_call_that_is_preempted_goes_on_where_it_was(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, is_all: bool
) -> None:
    """Slurm signals all processes of a step; the call that ends waits for the save."""
    submitit = pytest.importorskip(
        "submitit", reason="requirements-dev.txt installs it"
    )
    text = (REPOSITORY / "docs" / "howto" / "slurm.md").read_text()
    [recipe] = RECIPE.findall(text)
    module = stage.root / "recipe.py"
    module.write_text(MODULE + textwrap.dedent(recipe))
    monkeypatch.syspath_prepend(stage.root)
    for name, value in variables(stage).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", ":".join([str(REPOSITORY), *sys.path]))
    monkeypatch.delenv("ELASTICRUN_JOB")
    monkeypatch.delenv("ELASTICRUN_CHECKPOINT_DIR")
    own = import_module("recipe")

    executor = submitit.LocalExecutor(Path(stage.root / "submitit"))
    executor.update_parameters(timeout_min=60)
    job = executor.submit(own.Train(str(stage.checkpoints)), str(stage.root))
    wait_until(lambda: stage.has("held-0-0", "held-0-1") or job.done(), "a batch")
    # The launcher hears of it a moment later.
    wait_until(lambda: _state(stage) == "training", "training")
    signalled = psutil.Process(int(job.job_id)).children(recursive=is_all)
    for process in signalled:
        process.send_signal(signal.SIGUSR2)
    stage.mark("stop-0")
    wait_until(lambda: stage.has("held-1-0"), "the next submission")
    stage.mark("go-1")
    results = job.result()
    assert set(results) == {1}
    wait_until(lambda: not processes_of(stage))
    stage.check_exactly_once(NUM_SAMPLES)


def _state(stage: Stage) -> str:
    (job,) = json.loads(elasticrun(stage, "status", "--json").stdout)
    return str(job["state"])
