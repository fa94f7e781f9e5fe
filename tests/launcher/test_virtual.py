"""Virtual replicas bound the number of replicas before anything stops."""

from __future__ import annotations

import pytest

from tests.launcher.running import running
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
