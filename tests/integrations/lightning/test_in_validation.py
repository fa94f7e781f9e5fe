"""A validation that goes on ends as if it had not stopped, or does not stop.

Each case is trained once, with a checkpoint wherever there may be one, and goes on from
each of these: what it then sees is compared with what the first one saw from there on.
"""

from __future__ import annotations

import io
import logging
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from elasticrun.checkpoint.states.values import load_values
from elasticrun.integrations.lightning import Elastic
from elasticrun.replicas.environment import read_environment
from elasticrun.testing import Job, Settings, run_generation, use_job
from tests.integrations.lightning.fitting import SILENT, datasets
from tests.integrations.lightning.validating import CASES, OF_SEVERAL, Case, InState
from tests.support.generations import JOB, scramble_generators

# Lightning warns of small loaders, and deprecations of torch's.
pytestmark = pytest.mark.filterwarnings("ignore")

TIMEOUT = 600.0


Seen = list[tuple[str, tuple[int, ...], Any]]


@dataclass(frozen=True)
class Ended:
    """What a replica saw of one fit.

    Attributes:
        began: In a validation, its loader, and how many batches of it were finished.
    """

    seen: Seen
    began: tuple[int, int] | None


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
    elastic = Elastic("global", saves_in_validation=None)
    trainer = Trainer(
        max_epochs=2,
        callbacks=[elastic, *others, Seeing()],
        **SILENT,
        **Elastic.devices(),
    )
    data, valid = datasets()
    if case.data is not None:
        trainer.fit(case.net(), datamodule=case.data())
    else:
        loaders = [DataLoader(valid, size) for size in case.sizes]
        trainer.fit(case.net(), DataLoader(data, 6), loaders)
    loaded = elastic._state.loaded
    return Ended(seen, loaded["validated"] if loaded else None)


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
    """Return jobs that have a checkpoint each: all of validations, and two others.

    These are the first one behind an epoch, and the last one of all.
    """
    found = sorted(directory.glob("checkpoint-*"))
    told = [
        load_values(io.BytesIO((each / "lightning").read_bytes())) for each in found
    ]
    chosen = [path for path, each in zip(found, told, strict=True) if each["validated"]]
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
    if ended.began is not None:
        kind, (_, loader, number), _ = ended.seen[0]
        assert (kind, (loader, number)) == ("batch", ended.began)


def places(case: Case) -> list[tuple[int, int]]:
    """Return where a validation may stop, or by the case may not."""
    numbers = [-(-17 // size) for size in case.sizes]
    return [
        (loader, finished)
        for loader, number in enumerate(numbers)
        for finished in range(1, number - 1)
    ]


@pytest.mark.parametrize("name", CASES)
def test_a_validation_goes_on_from_each_batch(
    tmp_path: Path,
    name: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    case = CASES[name]
    (calm,) = fit_in_turn([(case, tmp_path / "calm")], save_interval=0)
    begun = []
    for directory in telling(tmp_path / "calm", tmp_path / "copies"):
        (ended,) = fit_in_turn([(case, directory)], save_interval="off")
        begun += [ended.began] if ended.began else []
        assert_goes_on(ended, calm.seen)
    said = [each for each in caplog.messages if "saves and stops wait" in each]
    if case.waits_for is None:
        assert begun == places(case) * 2
        assert not said
    else:
        assert begun == []
        assert len(said) == 1
        assert f"`{case.waits_for}` " in said[0]


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
    return Ended(seen, every[0].began)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 2)])
def test_a_validation_goes_on_at_another_number_of_replicas(
    tmp_path: Path, before: int, after: int
) -> None:
    cases = OF_SEVERAL
    expected = fit_in_turn([(c, tmp_path / n) for n, c in cases.items()], "off")
    run = tmp_path / "run"
    begun = Fits([(case, run / name) for name, case in cases.items()], 0)
    run_generation(begun, before, timeout=TIMEOUT)
    jobs, calm = [], []
    for (name, case), whole in zip(cases.items(), expected, strict=True):
        for copy in telling(run / name, tmp_path / "copies" / name):
            jobs.append((case, copy))
            calm.append(whole)
    every = run_generation(Fits(jobs, "off"), after, timeout=TIMEOUT)
    for number, (case, _) in enumerate(jobs):
        ended = both(*(each[number] for each in every))
        assert_goes_on(ended, calm[number].seen)
        waits = case.waits_for or (case.other is InState and before > 1)
        assert not waits or ended.began is None
    assert {each.began for each in every[0]} == {None, *places(CASES["three loaders"])}
