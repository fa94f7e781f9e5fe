"""A status as text."""

from __future__ import annotations

from elasticrun.launcher.terminal.status_table import render, speed_text


def test_a_status_reads_as_text() -> None:
    member = {"memory": 2**30, "cpu": 0.5, "gpu_memory": None, "gpu_utilization": None}
    status = {
        "job": "train.py",
        "pid": 7,
        "state": "rescaling",
        "seconds_in_state": 130.0,
        "replicas": 2,
        "target": 3,
        "generation": 4,
        "position": "epoch 1, loop 0, sample 64 of `train`",
        "place": "epoch 1 of 20, batch 2 of 40",
        "seconds_left": 2460.0,
        "no_boundary": None,
        "samples_per_second": 812.4,
        "unit": "sample",
        "last_output": "[1] " + "x" * 200,
        "seconds_since_output": 3.0,
        "checkpoint": 5,
        "seconds_since_checkpoint": 600.0,
        "failed_saves": 2,
        "checkpoint_dir": "/c",
        "restarts": 1,
        "causes": ["generation 3: rank 1 exited with code 4"],
        "spares": 2,
        "spare_memory": 2**29,
        "members": [
            {**member, "rank": 0, "pid": 8},
            {**member, "rank": 1, "pid": 9, "gpu_memory": 2**31, "gpu_utilization": 97},
        ],
    }
    on_gpu = "2048 MiB on the GPU, which is 97 % busy"
    assert render([status]).splitlines() == [
        "train.py (7): rescaling for 2 min, 2 replicas (going to 3), generation 4",
        "  position     epoch 1 of 20, batch 2 of 40, 41 min left",
        "  speed        812 samples/s",
        "  checkpoint   5, 10 min ago (2 saves failed), in /c",
        "  crashes      1 since this start",
        "               generation 3: rank 1 exited with code 4",
        "  spares       2 ready, 512 MiB",
        "  rank 0       process 8, 1024 MiB, 50% CPU",
        f"  rank 1       process 9, 1024 MiB, 50% CPU, {on_gpu}",
        f"  last output  [1] {'x' * 95}\N{HORIZONTAL ELLIPSIS} (3 s ago)",
    ]


def test_slow_speeds_have_two_digits() -> None:
    speeds = [0, 0.0123, 1.46, 9.96, 812.4]
    texts = [speed_text(each, "step") for each in speeds]
    assert [text.split()[0] for text in texts] == ["0", "0.012", "1.5", "10", "812"]
    assert texts[-1] == "812 steps/s"
