"""Scripts with Accelerate go on where they were, with the bare script's results."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from elasticrun import (
    AdaptiveDataLoader,
    ElasticRunError,
    rank,
    world_size,
)
from elasticrun.integrations.accelerate import INTERNALS, prepare
from elasticrun.testing import run_generation, start_generation
from tests.integrations.accelerated import (
    ACCUMULATED,
    NUM_BATCHES,
    NUM_EPOCHS,
    Script,
    forget_accelerator,
)
from tests.support.data import Numbers
from tests.support.foreign import delivered, deliveries
from tests.support.generations import Crash, run_once
from tests.support.programs import Leave, StopOnce
from tests.support.streams import Cut
from tests.support.variants import in_wide

TIMEOUT = 600.0


@pytest.fixture(autouse=True)
def _own_accelerator() -> Any:
    yield from forget_accelerator()


def run(directory: Path, script: Script, **options: Any) -> Any:
    trace = str(directory / "trace")
    with contextmanager(forget_accelerator)():
        return run_once(script.run, directory, trace_dir=trace, **options)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    directory = tmp_path_factory.mktemp("calm")
    return run(directory, Script()), delivered(directory / "trace")


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_one_replica_does_what_the_bare_script_does(
    tmp_path: Path, accumulated: int, precision: str
) -> None:
    script = Script(accumulated=accumulated, precision=precision)
    ours = run(tmp_path, script)
    assert script.run_bare(delivered(tmp_path / "trace")) == ours


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_stops_do_not_show(tmp_path: Path, calm: Any, precision: str) -> None:
    script = Script(precision=precision)
    expected = calm[0] if precision == "no" else run(tmp_path / "calm", script)
    for _ in range(NUM_BATCHES * NUM_EPOCHS):
        if run(tmp_path, replace(script, on_batch=StopOnce())) is not None:
            break
    assert run(tmp_path, script) == expected
    assert delivered(tmp_path / "trace") == calm[1]
    first: dict[int, tuple[int, int]] = {}
    for generation, place in sorted(deliveries(tmp_path / "trace")):
        first.setdefault(generation, place)
    # No stop came while gradients were accumulated.
    assert {batch for _, batch in first.values()} <= {0, ACCUMULATED}
    assert len(first) >= 3


@pytest.mark.parametrize("died_in", range(1, NUM_BATCHES * NUM_EPOCHS + 1))
def test_kills_do_not_show(tmp_path: Path, calm: Any, died_in: int) -> None:
    def die(count: Any) -> None:
        if count.batches == died_in:
            raise Crash

    assert run(tmp_path, Script(on_batch=die), save_interval=0) is None
    assert (run(tmp_path, Script()), delivered(tmp_path / "trace")) == calm


def test_micro_batches_do_not_show(tmp_path: Path, calm: Any) -> None:
    whole = run(tmp_path / "whole", Script(accumulated=1))
    cut = run(tmp_path / "cut", Script(accumulated=1, max_local_batch_size=2))
    assert cut["parameters"] == pytest.approx(whole["parameters"], abs=1e-6)
    assert cut["log"] == pytest.approx(whole["log"], abs=1e-6)
    script = Script(max_local_batch_size=2)
    with pytest.raises(ElasticRunError, match="counts the micro-batches"):
        run(tmp_path / "both", script)


def die_in_last_batch(count: Any) -> None:
    if count.batches == NUM_BATCHES * NUM_EPOCHS and rank() == world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({}, 1e-5),
        *in_wide(({"precision": "bf16"}, 1e-2)),
        *in_wide(({"data": Cut}, 1e-5)),
    ],
)
def test_stops_and_a_kill_at_1_to_3_replicas_do_not_show(
    tmp_path: Path, changes: dict[str, Any], tolerance: float
) -> None:
    calm = run(tmp_path / "calm", Script(**changes))
    script = Script(str(tmp_path / "job"), init_first=False, **changes)
    variables = {
        "ELASTICRUN_TRACE": str(tmp_path / "trace"),
        "ELASTICRUN_CHECKPOINT_DIR": script.directory,
    }
    stopping = replace(script, on_batch=StopOnce())
    left = run_generation(stopping, 2, timeout=TIMEOUT, variables=variables)
    assert left == [None] * 2
    dying = replace(
        script, on_batch=die_in_last_batch, save_interval=0, init_first=True
    )
    with start_generation(dying, 3, variables=variables) as started:
        outcomes = started.wait(timeout=TIMEOUT)
    assert outcomes[2].exit_code == -signal.SIGKILL
    (ended,) = run_generation(script, 1, timeout=TIMEOUT, variables=variables)
    for name, expected in calm.items():
        assert ended[name] == pytest.approx(expected, abs=tolerance)
    assert delivered(tmp_path / "trace") == delivered(tmp_path / "calm" / "trace")


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(8))
def test_stops_and_kills_at_random_do_not_show(
    tmp_path: Path, calm: Any, seed: int
) -> None:
    random = Random(seed)
    script = Script(str(tmp_path / "job"), save_interval=0)
    variables = {"ELASTICRUN_TRACE": str(tmp_path / "trace")}
    for _ in range(6):
        leave = Leave(random.choice(["stop", "kill"]), random.randint(1, 5))
        num_replicas = random.randint(1, 3)
        leaving = replace(script, on_batch=leave)
        with start_generation(leaving, num_replicas, variables=variables) as started:
            started.wait(timeout=TIMEOUT)
    (ended,) = run_generation(script, 1, timeout=TIMEOUT, variables=variables)
    for name, expected in calm[0].items():
        assert ended[name] == pytest.approx(expected, abs=1e-5)
    assert delivered(tmp_path / "trace") == calm[1]


def test_a_loader_of_ours_is_not_prepared_by_accelerate(job: Any) -> None:
    loader = AdaptiveDataLoader(Numbers(4), 2)
    with pytest.raises(TypeError, match=r"as accelerator.prepare\(loader\) does"):
        list(Accelerator(cpu=True).prepare(loader))
    script = Script()
    script._make()
    net, optimizer = script.net, script.optimizer
    with pytest.raises(TypeError, match="got a AdaptiveDataLoader as its scheduler"):
        prepare(script.accelerator, net, optimizer, loader)
    with pytest.raises(TypeError, match="got a AdaptiveDataLoader as its optimizer"):
        prepare(script.accelerator, net, loader)
    with pytest.raises(TypeError, match="got a SGD as its model"):
        prepare(script.accelerator, optimizer, net)


def test_other_accelerators_are_refused(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script()
    script._make()
    prepare(script.accelerator, script.net, script.optimizer, script.scheduler)
    with pytest.raises(ElasticRunError, match="another Accelerator already"):
        prepare(Accelerator(cpu=True), script.net, name="second")
    state = AcceleratorState()
    monkeypatch.setitem(AcceleratorState._shared_state, "num_processes", 2)
    with pytest.raises(ElasticRunError, match="2 processes, but the job 1 replicas"):
        prepare(script.accelerator, script.net, name="third")
    kind = type(state.distributed_type).FSDP
    monkeypatch.setitem(AcceleratorState._shared_state, "distributed_type", kind)
    with pytest.raises(ElasticRunError, match="trains by FSDP"):
        prepare(script.accelerator, script.net, name="fourth")


@pytest.mark.parametrize("path", INTERNALS.split())
def test_what_accelerate_has_no_more_is_named(job: Any, path: str) -> None:
    script = Script()
    script._make()
    owner, _, name = path.rpartition(".")
    part = attrgetter(owner)(script.accelerator) if owner else script.accelerator

    class Without(type(part)):  # type: ignore[misc]
        def __getattribute__(self, asked: str) -> Any:
            if asked == name:
                raise AttributeError(asked)
            return super().__getattribute__(asked)

    part.__class__ = Without
    with pytest.raises(
        ElasticRunError, match=f"Accelerator of .* has no {path}, which"
    ):
        prepare(script.accelerator, script.net)
