"""A fit goes on before a validation, in which no stop comes, as if it had not stopped.

Each case is trained once, with a checkpoint at each boundary, and goes on from some of
these: what it then sees is compared with what the first one saw from there on.
"""

from __future__ import annotations

import io
import logging
import os
import shutil
import signal
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from elasticrun import init, rank, world_size
from elasticrun.checkpoint.states.values import load_values
from elasticrun.integrations.lightning import Elastic
from elasticrun.replicas.environment import read_environment
from elasticrun.testing import (
    Job,
    Settings,
    run_generation,
    start_generation,
    use_job,
)
from tests.integrations.lightning.fitting import SILENT, datasets
from tests.integrations.lightning.validating import (
    CASES,
    OF_SEVERAL,
    Case,
    Filling,
)
from tests.support.generations import JOB, run_once, scramble_generators
from tests.support.programs import StopOnce

# Lightning warns of small loaders, and deprecations of torch's.
pytestmark = pytest.mark.filterwarnings("ignore")

TIMEOUT = 600.0
NUM_BATCHES = 5  # Of a validation with batches of 4.

Seen = list[tuple[str, tuple[int, ...], Any]]


@dataclass(frozen=True)
class Ended:
    """What a replica saw of one fit.

    Attributes:
        is_before_validation: Whether it went on before a validation.
    """

    seen: Seen
    is_before_validation: bool


def fit(case: Case) -> Ended:
    """Train for two epochs, each with a validation."""
    seen: Seen = []

    class Seeing(Callback):
        """Keeps batches of validations, what is logged, and weights, elsewhere."""

        def on_validation_batch_end(
            self,
            trainer: Trainer,
            module: Any,
            outputs: Any,
            batch: Any,
            number: int,
            loader: int = 0,
        ) -> None:
            place = (trainer.current_epoch, loader, number)
            logged = {
                name: float(value)
                for name, value in trainer._logger_connector.metrics["log"].items()
                if name.endswith("_step")
            }
            seen.append(("batch", place, (batch[0].flatten().tolist(), logged)))

        def on_validation_end(self, trainer: Trainer, module: Any) -> None:
            logged = {k: float(v) for k, v in trainer.callback_metrics.items()}
            seen.append(("logged", (trainer.current_epoch,), logged))

        def on_train_batch_start(
            self, trainer: Trainer, module: Any, *args: Any
        ) -> None:
            weights = [each.flatten().tolist() for each in module.parameters()]
            place = (trainer.current_epoch, trainer.fit_loop.batch_idx)
            seen.append(("trained", place, weights))

        def on_fit_end(self, trainer: Trainer, module: Any) -> None:
            weights = [each.flatten().tolist() for each in module.parameters()]
            seen.append(("trained", (-1,), weights))

    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    others = [] if case.other is None else [case.other()]
    elastic = Elastic("global")
    trainer = Trainer(
        max_epochs=2,
        callbacks=[elastic, *others, Seeing()],
        **SILENT,
        **Elastic.devices(),
    )
    data, valid = datasets()
    loaders = [DataLoader(valid, size) for size in case.sizes]
    trainer.fit(case.net(), DataLoader(data, 6), loaders)
    loaded = elastic._state.loaded
    return Ended(seen, bool(loaded and loaded["validated"]))


def fit_in_turn(jobs: list[tuple[Case, Path]], save_interval: Any) -> list[Ended]:
    """Train each case in its directory, in this process."""
    ended, variables = [], dict(os.environ)
    for number, (case, directory) in enumerate(jobs):
        scramble_generators()
        os.environ.update(variables)  # Lightning takes away some at each end.
        settings = Settings.read(
            {},
            job=JOB,
            checkpoint_dir=directory,
            save_interval=save_interval,
            async_save=False,
            keep=1000,
        )
        environment = replace(read_environment(), step=str(number))
        with use_job(Job(environment, settings)):
            ended.append(fit(case))
    return ended


def telling(directory: Path, into: Path) -> list[Path]:
    """Return jobs that have a checkpoint each: those before validations are chosen.

    And the first one behind an epoch, and the last one of all.
    """
    found = sorted(directory.glob("checkpoint-*"))
    told = [
        load_values(io.BytesIO((each / "lightning").read_bytes())) for each in found
    ]
    chosen = [path for path, each in zip(found, told, strict=True) if each["validated"]]
    assert len(chosen) == 2
    chosen += [p for p, t in zip(found, told, strict=True) if not t["is_in_epoch"]][:1]
    copies = []
    for path in sorted({*chosen, found[-1]}):
        shutil.copytree(path, into / path.name / path.name)
        copies.append(into / path.name)
    return copies


def flat(value: Any) -> list[float]:
    """Return all numbers in a value, and of names the order."""
    if isinstance(value, dict):
        return [each for key in sorted(value) for each in flat(value[key])]
    if isinstance(value, list | tuple):
        return [each for inner in value for each in flat(inner)]
    return [value]


def assert_goes_on(ended: Ended, calm: Seen) -> None:
    """Compare what one saw with what another one saw from there on."""
    assert ended.seen
    rest = calm[len(calm) - len(ended.seen) :]
    for (kind, place, values), expected in zip(ended.seen, rest, strict=True):
        assert (kind, place) == expected[:2]
        if isinstance(values, dict):
            assert values.keys() == expected[2].keys()
        assert flat(values) == pytest.approx(flat(expected[2]), abs=1e-5), place
    if ended.is_before_validation:
        kind, (_, loader, number), _ = ended.seen[0]
        assert (kind, (loader, number)) == ("batch", (0, 0))


@pytest.mark.parametrize("name", CASES)
def test_a_fit_goes_on_before_a_validation(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    (calm,) = fit_in_turn([(case, tmp_path / "calm")], save_interval=0)
    for directory in telling(tmp_path / "calm", tmp_path / "copies"):
        (ended,) = fit_in_turn([(case, directory)], save_interval="off")
        assert_goes_on(ended, calm.seen)


# Two replicas. All cases are trained in the same processes, one after another.


@dataclass(frozen=True)
class Fits:
    """Fits in turn, in a replica of its own."""

    jobs: list[tuple[Case, Path]]
    save_interval: Any

    def __call__(self) -> list[Ended]:
        return fit_in_turn(self.jobs, self.save_interval)


def both(*every: Ended) -> Ended:
    """Return what two replicas saw together: of each batch, the samples of both."""
    samples: dict[Any, list[float]] = {}
    for each in every:
        for kind, place, values in each.seen:
            if kind == "batch":
                samples.setdefault(place, []).extend(values[0])
    seen: Seen = []
    for kind, place, values in every[0].seen:
        is_batch = kind == "batch"
        seen.append((kind, place, (samples[place], values[1]) if is_batch else values))
    return Ended(seen, every[0].is_before_validation)


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    """What is seen of each case that is not interrupted."""
    directory = tmp_path_factory.mktemp("wholes")
    jobs = [(case, directory / name) for name, case in OF_SEVERAL.items()]
    return fit_in_turn(jobs, "off")


@pytest.mark.slow
@pytest.mark.usefixtures("lightning_in_forks")
@pytest.mark.parametrize(
    ("before", "sizes"),
    [(2, (1, 2)), pytest.param(1, (2,), marks=pytest.mark.wide)],
)
def test_a_validation_begins_at_another_number_of_replicas(
    tmp_path: Path, before: int, sizes: tuple[int, ...], wholes: list[Ended]
) -> None:
    cases = OF_SEVERAL
    run = tmp_path / "run"
    begun = Fits([(case, run / name) for name, case in cases.items()], 0)
    run_generation(begun, before, timeout=TIMEOUT)
    for after in sizes:
        jobs, calm = [], []
        for (name, case), whole in zip(cases.items(), wholes, strict=True):
            for copy in telling(run / name, tmp_path / f"{after}" / name):
                jobs.append((case, copy))
                calm.append(whole)
        every = run_generation(Fits(jobs, "off"), after, timeout=TIMEOUT)
        for number in range(len(jobs)):
            ended = both(*(each[number] for each in every))
            assert_goes_on(ended, calm[number].seen)


# Stops that are asked for in a validation.


def stop_by_signal(*_: Any) -> None:
    """Get a signal, and come to no boundary any more."""
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()


@dataclass
class Stopped:
    """A fit of two epochs, each with a validation, that keeps a list.

    Attributes:
        how: By what its first validation is stopped, in its first batch.
    """

    directory: Path
    how: str = ""

    def __call__(self) -> dict[str, float]:
        """Run in a replica of its own."""
        directory = str(self.directory / "job")
        init(directory, save_interval="off", async_save=False)
        return self.run()

    def run(self) -> dict[str, float]:
        path = self.directory / f"seen-{rank()}"
        act: Any = {"request": StopOnce(), "signal": stop_by_signal}.get(self.how)

        class Noting(Callback):
            """Notes which batches come."""

            def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
                self.note(f"train-{trainer.fit_loop.batch_idx}")

            def on_validation_batch_end(
                self,
                trainer: Trainer,
                module: Any,
                outputs: Any,
                batch: Any,
                number: int,
            ) -> None:
                self.note(str(number))
                if act is not None:
                    act(trainer)
                if world_size() > 1 and number < NUM_BATCHES - 1:
                    dist.barrier()  # Or the others would be through before the stop.

            def note(self, what: str) -> None:
                with path.open("a") as file:
                    file.write(f"{what} ")

        torch.set_num_threads(1)
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        data, valid = datasets()
        trainer = Trainer(
            max_epochs=2,
            callbacks=[Elastic("global"), Noting()],
            **SILENT,
            **Elastic.devices(),
        )
        trainer.fit(Filling(), DataLoader(data, 6), DataLoader(valid, 4))
        return {name: float(value) for name, value in trainer.callback_metrics.items()}

    def seen(self) -> list[str]:
        """Return the batches of all generations so far."""
        return (self.directory / "seen-0").read_text().split()


VALIDATED = [str(number) for number in range(NUM_BATCHES)]
EPOCH = [*(f"train-{number}" for number in range(4)), *VALIDATED]


@pytest.fixture
def calm(tmp_path: Path) -> dict[str, float]:
    fit = Stopped(tmp_path / "calm")
    fit.directory.mkdir()
    return run_once(fit.run, fit.directory / "job")


@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stop_waits_for_the_end_of_a_validation(
    tmp_path: Path,
    calm: dict[str, float],
    num_replicas: int,
    request: pytest.FixtureRequest,
) -> None:
    fit = Stopped(tmp_path, how="request")
    if num_replicas == 1:
        left = [run_once(fit.run, tmp_path / "job")]
    else:
        request.getfixturevalue("lightning_in_forks")
        named = {"ELASTICRUN_JOB": JOB}
        left = run_generation(fit, num_replicas, timeout=TIMEOUT, variables=named)
    assert left == [None] * num_replicas
    assert fit.seen() == EPOCH
    ended = run_once(replace(fit, how="").run, tmp_path / "job")
    assert ended == pytest.approx(calm, abs=1e-5)
    assert fit.seen() == EPOCH * 2


@pytest.mark.slow
@pytest.mark.usefixtures("lightning_in_forks")
def test_a_stop_that_cannot_wait_repeats_the_validation_alone(
    tmp_path: Path, calm: dict[str, float]
) -> None:
    """Nothing was to be saved but what a stop might lose."""
    fit = Stopped(tmp_path, how="signal")
    with start_generation(fit, 1, variables={"ELASTICRUN_GRACE": "0.1"}) as started:
        (outcome,) = started.wait(timeout=TIMEOUT)
    assert outcome.exit_code == 128 + signal.SIGTERM
    assert fit.seen() == EPOCH[:5]
    (ended,) = run_generation(replace(fit, how=""), 1, timeout=TIMEOUT)
    assert ended == pytest.approx(calm, abs=1e-5)
    assert fit.seen() == [*EPOCH[:5], *VALIDATED, *EPOCH]


def test_nothing_is_saved_before_a_validation_that_a_stop_can_wait_for(
    tmp_path: Path,
) -> None:
    """But before the first one: nobody knows how long that takes."""
    fit = Stopped(tmp_path)
    assert run_once(fit.run, tmp_path / "job", keep=100)
    saved = sorted((tmp_path / "job").glob("checkpoint-*"))
    told = [load_values(io.BytesIO((p / "lightning").read_bytes())) for p in saved]
    assert [bool(each["validated"]) for each in told] == [True, False]
