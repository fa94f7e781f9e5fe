"""`elasticrun status --scaling`, of a job with one replica."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from torch.optim import SGD

from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    Variables,
    save_all_states,
)
from elasticrun.__main__ import main
from tests.checkpoint.inspection.running import Said, make_model
from tests.support.data import Numbers
from tests.support.generations import run_once

STEPS = [[1, 1, 16.0, 1, 0.1], [1, 2, 8.0, 1, 0.06]]


def save(
    directory: Path, *names: str, num_models: int = 1, largest: int | None = None
) -> None:
    """Save what loaders, and models that measure their noise, would keep."""

    def script() -> None:
        for number in range(num_models):
            net = make_model()
            model = AdaptiveDataParallel(
                net, SGD(net.parameters(), 0.1), name=f"m{number}", measure_noise=True
            )
            steps = [[30.0, 1.0 + sign] for sign in (-0.1, 0.1)] * 10
            values = json.dumps({"steps": steps, "progress": 0.0})
            assert model._noise is not None
            model._noise.load(io.BytesIO(values.encode()))
        for name in names:
            loader = AdaptiveDataLoader(Numbers(64), {0: 8, 32: 16}, name=name)
            times: Any = loader._state.times
            times.decode({"batch_size": 16, "steps": STEPS})
            times.max_batch_size, times.min_efficiency = largest, 0.9
        AdaptiveDataLoader(Numbers(8), 4, name="valid")
        save_all_states()

    run_once(script, directory)


def scaling(directory: Path, *words: str) -> Said:
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        code = main(["status", str(directory), "--scaling", *words])
    return Said(code, output.getvalue(), errors.getvalue())


def test_the_table_of_a_loader(tmp_path: Path) -> None:
    save(tmp_path, "train")
    rows = scaling(tmp_path, "--json").values["train"]
    assert [row["basis"] for row in rows] == [*["measured"] * 2, *["predicted"] * 2]
    assert rows[1]["samples_per_second"] == 16 / 0.06
    assert rows[0]["efficiency"] == pytest.approx((30 / 8 + 1) / (30 / 16 + 1) / 2)
    lines = scaling(tmp_path).lines
    assert lines[0].startswith("train: critical batch size 30")
    assert "efficiency" in lines[1]
    assert lines[3].endswith("1.67  measured")
    assert lines[-1].split() == ["from", "5", "not", "measured"]


def test_the_table_of_a_loader_whose_sizes_the_job_decides(tmp_path: Path) -> None:
    save(tmp_path, "train", largest=64)
    rows = scaling(tmp_path, "--json").values["train"]
    assert max(row["batch_size"] for row in rows) == rows[-1]["batch_size"] == 12
    assert rows[-1]["efficiency"] == pytest.approx((30 + 8) / (30 + 12))


@pytest.mark.parametrize("num_models", [0, 2])
def test_without_one_noise_there_is_throughput_alone(
    tmp_path: Path, num_models: int
) -> None:
    save(tmp_path, "train", num_models=num_models)
    said = scaling(tmp_path)
    assert said.lines[2].split()[3:] == ["unknown", "unknown", "1.00", "measured"]
    rows = scaling(tmp_path, "--json").values["train"]
    assert rows[0]["goodput"] is None


def test_several_loaders_have_a_table_each(tmp_path: Path) -> None:
    save(tmp_path, "train", "other")
    assert set(scaling(tmp_path, "--json").values) == {"train", "other"}


def test_without_times_there_is_no_table(tmp_path: Path) -> None:
    def script() -> None:
        Variables(best=0.0)
        save_all_states()

    run_once(script, tmp_path)
    said = scaling(tmp_path)
    assert said.code == 2
    assert "has no times of steps" in said.errors
