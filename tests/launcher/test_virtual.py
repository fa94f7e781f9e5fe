"""Virtual replicas bound the number of replicas before anything stops."""

from __future__ import annotations

import pytest

from tests.launcher.running import Start, running
from tests.support.stage import Stage, wait_until

SCRIPT = """
import time
import torch
import elasticrun

elasticrun.init(virtual_replicas=2)
loader = elasticrun.AdaptiveDataLoader(range(1_000_000), 2)
for _ in loader:
    if loader.batch_index == 0:
        print("trains with", torch.get_num_threads(), flush=True)
    time.sleep(0.01)
"""


@pytest.mark.slow
def test_more_than_the_script_has_virtual_ones_are_refused(stage: Stage) -> None:
    script = stage.root / "script.py"
    script.write_text(SCRIPT)
    with running(stage, "--replicas", 1, script=script) as job:
        wait_until(lambda: "trains with" in job.output, "a batch")
        refused = job.ask("scale", 3, "--force")
        assert refused.returncode != 0
        assert "3 replicas: the job has 2 virtual replicas" in refused.stderr
        assert job.status()["generation"] == 0
        assert job.ask("stop").returncode == 0


@pytest.mark.slow(20)
@pytest.mark.wide
def test_a_node_above_the_number_is_refused_before_anything_stops(
    stage: Stage, start: Start
) -> None:
    script = stage.root / "script.py"
    script.write_text(SCRIPT)
    job = start(script=script, nodes="1:2")
    wait_until(lambda: "trains with" in job.output, "a batch")
    late = start("--replicas", 2, script=script, nodes="1:2")
    assert late.wait() == 1
    assert "brings 2 replicas to 1 of a job with 2 virtual replicas" in late.events
    assert "Bring at most 1" in late.events
    assert job.status()["generation"] == 0
    assert "saving" not in job.events
    job.process.terminate()
    assert job.wait() == 143
