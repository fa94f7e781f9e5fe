"""Fits of Lightning's go on where they were, with the results of those left alone."""

from __future__ import annotations

import csv
import os
import random
import signal
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import (
    DeepSpeedStrategy,
    FSDPStrategy,
)
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    WeightedRandomSampler,
)

from elasticrun import AdaptiveDataLoader, CheckpointError, ElasticRunError, rank
from elasticrun.integrations.lightning import Elastic, patch
from elasticrun.integrations.lightning.checks import INTERNALS, INTERNALS_BESIDE
from elasticrun.testing import run_generation, start_generation
from tests.integrations.lightning.fitting import (
    KINDS,
    NUM_BATCHES,
    NUM_EPOCHS,
    NUM_SAMPLES,
    SILENT,
    Fit,
    Manual,
    Net,
    datasets,
    nothing,
    validate_by_steps,
)
from tests.support.foreign import delivered
from tests.support.generations import Crash, generation, run_once
from tests.support.programs import StopOnce, request_stop_and_wait
from tests.support.variants import in_wide

# Lightning warns of small loaders, directories that exist, and deprecations of torch's.
pytestmark = pytest.mark.filterwarnings("ignore")

TIMEOUT = 600.0
LAST_BATCH = NUM_BATCHES * NUM_EPOCHS


def run(directory: Path, fit: Fit, **options: Any) -> Any:
    trace = str(directory / "trace")
    return run_once(fit.run, directory, trace_dir=trace, **options)


class StopsEachFit:
    """Asks for a stop in the first batch of each fit."""

    def __init__(self) -> None:
        self._trainer: Trainer | None = None

    def __call__(self, trainer: Trainer) -> None:
        if trainer is not self._trainer:
            self._trainer = trainer
            request_stop_and_wait()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    directory = tmp_path_factory.mktemp("calm")
    ended = run(directory, Fit(str(directory)))
    return ended, delivered(directory / "trace")


@pytest.mark.parametrize("accumulated", [1, 3])
def test_one_replica_does_what_lightning_does(tmp_path: Path, accumulated: int) -> None:
    fit = Fit(str(tmp_path), accumulated=accumulated)
    ours = run(tmp_path, fit)
    bare = replace(fit, directory=str(tmp_path / "bare"))
    assert bare.run_bare(delivered(tmp_path / "trace")) == ours


@pytest.mark.parametrize("kind", KINDS)
def test_stops_in_every_batch_do_not_show(tmp_path: Path, kind: str) -> None:
    fit = Fit(str(tmp_path / "calm"), kind=kind)
    expected = run(tmp_path / "calm", fit)
    fit = replace(fit, directory=str(tmp_path / "cut"), on_batch=StopsEachFit())
    num_stops = 0
    while (ended := run(tmp_path / "cut", fit)) is None:
        num_stops += 1
        assert num_stops <= 40
    assert ended == expected
    if KINDS[kind].mode is None:  # A trace has no places for two loaders in a step.
        batches = delivered(tmp_path / "cut" / "trace")
        assert batches == delivered(tmp_path / "calm" / "trace")
    # A stop comes at the next boundary or at the one after it.
    assert num_stops >= 2


@pytest.mark.parametrize("accumulated", [1, 3])
def test_micro_batches_do_what_whole_batches_do(
    tmp_path: Path, accumulated: int
) -> None:
    fit = Fit(str(tmp_path / "whole"), kind="whole", accumulated=accumulated)
    whole = run(tmp_path / "whole", fit)
    fit = replace(fit, directory=str(tmp_path / "cut"), max_local_batch_size=2)
    cut = run(tmp_path / "cut", fit)  # Of 2, 2 and 2 samples, or 2, 2 and 1.
    for name, expected in whole.items():
        assert cut[name] == pytest.approx(expected, abs=1e-5), name


@pytest.mark.parametrize("accumulated", [1, 3])
def test_kills_in_every_batch_do_not_show(
    tmp_path: Path, calm: Any, accumulated: int
) -> None:
    """One kill after another: each generation comes one batch further."""

    def die(trainer: Trainer) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == died_in:
            raise Crash

    fit = Fit(str(tmp_path), accumulated=accumulated)
    for number in range(1, LAST_BATCH + 1):
        died_in = number
        assert run(tmp_path, replace(fit, on_batch=die), save_interval=0) is None
    ended = run(tmp_path, fit)
    if accumulated == 1:
        assert (ended, delivered(tmp_path / "trace")) == calm
    else:
        whole = replace(fit, directory=str(tmp_path / "whole"))
        assert ended == run(tmp_path / "whole", whole)


def test_a_callback_whose_state_would_not_come_back_is_refused(tmp_path: Path) -> None:
    class Odd(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"where": tmp_path}

    with pytest.raises(CheckpointError, match=r"'lightning' holds .*PosixPath"):
        fit_with(tmp_path, Odd())


def test_a_finished_or_early_stopped_fit_is_not_repeated(tmp_path: Path) -> None:
    fit = Fit(str(tmp_path), patience=0, num_epochs=40)
    ended = run(tmp_path, fit)
    assert ended["steps"] < 40 * NUM_BATCHES
    assert run(tmp_path, fit)["log"] == ended["log"]


def test_a_finished_fit_goes_on_with_more_epochs(tmp_path: Path, calm: Any) -> None:
    fit = Fit(str(tmp_path))
    assert run(tmp_path, replace(fit, num_epochs=1))["steps"] == NUM_BATCHES
    assert (run(tmp_path, fit), delivered(tmp_path / "trace")) == calm


def test_hooks_see_what_was_there(tmp_path: Path) -> None:
    class Hooked(Net):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            seen.append(("weights", checkpoint["state_dict"]["net.bias"].tolist()))

        def on_train_start(self) -> None:
            counts = self.trainer.current_epoch, self.trainer.global_step
            seen.append(("start", *counts, self.net.bias.tolist()))

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            seen.append(("batch", batch_idx))

    def script(*callbacks: Callback) -> Any:
        trainer = Trainer(max_epochs=2, callbacks=list(callbacks), **SILENT)
        net = Hooked()
        try:
            loader = AdaptiveDataLoader(datasets()[0], 6, shuffle=True)
            patch(trainer).fit(net, loader)
        finally:
            seen.append(("end", net.net.bias.tolist()))

    seen: list[Any] = []
    run_once(lambda: script(Ends(6, None)), tmp_path)
    bias = seen[-1][1]
    seen.clear()
    run_once(script, tmp_path)
    assert seen[:2] == [("weights", bias), ("start", 1, 6, bias)]
    assert seen[2:4] == [("batch", 2), ("batch", 3)]
    assert len(seen) == 5


def die_in_last_batch(trainer: Trainer) -> None:
    if trainer.fit_loop.total_batch_idx + 1 == LAST_BATCH and rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.usefixtures("lightning_in_forks")
@pytest.mark.parametrize(
    ("kind", "calm_kind"),
    [
        *[("plain", "plain"), ("cut", "whole")],
        *in_wide(("streams", "streams")),
    ],
)
def test_stops_and_a_kill_at_1_to_3_replicas_do_not_show(
    tmp_path: Path, calm: Any, kind: str, calm_kind: str
) -> None:
    """With micro-batches there is padding among them, of which nothing shows."""
    fit = Fit(str(tmp_path / "job"), kind=kind)
    if kind == "cut":
        fit = replace(fit, strategy="ddp_find_unused_parameters_true")
    expected, batches = calm
    if calm_kind != "plain":
        whole = Fit(str(tmp_path / "calm"), kind=calm_kind)
        expected = run(tmp_path / "calm", whole)
        batches = delivered(tmp_path / "calm" / "trace")
    variables = {"ELASTICRUN_TRACE": str(tmp_path / "trace")}
    stopping = replace(fit, on_batch=StopOnce())
    left = run_generation(stopping, 2, timeout=TIMEOUT, variables=variables)
    assert left == [None] * 2
    dying = replace(fit, on_batch=die_in_last_batch, save_interval=0)
    with start_generation(dying, 3, variables=variables) as started:
        outcomes = started.wait(timeout=TIMEOUT)
    assert outcomes[2].exit_code == -signal.SIGKILL
    (ended,) = run_generation(fit, 1, timeout=TIMEOUT, variables=variables)
    for name, value in expected.items():
        assert ended[name] == pytest.approx(value, abs=1e-5), name
    assert delivered(variables["ELASTICRUN_TRACE"]) == batches


@dataclass
class EndsAfter:
    """Sends one replica a signal after some batches of its generation."""

    num_batches: int
    rank: int
    number: int

    def __call__(self, trainer: Trainer) -> None:
        self.num_batches -= 1
        if self.num_batches == 0 and rank() == self.rank:
            os.kill(os.getpid(), self.number)


@pytest.mark.slow
@pytest.mark.usefixtures("lightning_in_forks")
@pytest.mark.parametrize("kind", ["paired", "shortest", "longest"])
def test_loaders_that_train_together_do_so_at_1_to_2_replicas(
    tmp_path: Path, kind: str
) -> None:
    fit = Fit(str(tmp_path / "calm"), kind=kind)
    calm = run(tmp_path / "calm", fit)
    fit = replace(fit, directory=str(tmp_path / "cut"), on_batch=StopOnce())
    assert run_generation(fit, 2, timeout=TIMEOUT) == [None] * 2
    (ended,) = run_generation(replace(fit, on_batch=nothing), 1, timeout=TIMEOUT)
    for name, expected in calm.items():
        tolerance = KINDS[kind].tolerance
        assert ended[name] == pytest.approx(expected, abs=tolerance), name


@pytest.mark.slow
@pytest.mark.usefixtures("lightning_in_forks")
def test_padding_counts_in_no_average_and_no_sum(tmp_path: Path) -> None:
    """The last batch has one sample, and one of the two replicas padding."""
    script = partial(validate_by_steps, str(tmp_path / "one"))
    ((alone, error),) = run_generation(script, 1, timeout=TIMEOUT)
    assert error == ""
    assert alone[-2:] == [NUM_SAMPLES, 17]  # Counted by metrics of torchmetrics.
    script = partial(validate_by_steps, str(tmp_path / "two"))
    for values, error in run_generation(script, 2, timeout=TIMEOUT):
        assert values == pytest.approx(alone, abs=1e-5)
        assert "self.log('sum', on_step=True, sync_dist=True)" in error


@pytest.mark.soak
@pytest.mark.usefixtures("lightning_in_forks")
# In which steps float16 overflows depends on the sizes of micro-batches.
@pytest.mark.parametrize("kind", [each for each in KINDS if each != "overflowing"])
def test_signals_at_random_at_1_to_3_replicas_do_not_show(
    tmp_path: Path, kind: str
) -> None:
    fit = Fit(str(tmp_path / "calm"), kind=kind)
    calm = run(tmp_path / "calm", fit)
    draws = random.Random(kind)
    ended = None
    while ended is None:
        num_replicas = draws.randint(1, 3)
        number = draws.choice([signal.SIGTERM, signal.SIGKILL])
        on_batch = EndsAfter(draws.randint(2, 4), num_replicas - 1, number)
        cut = replace(
            fit, directory=str(tmp_path / "cut"), on_batch=on_batch, save_interval=0
        )
        with start_generation(cut, num_replicas) as started:
            outcomes = started.wait(timeout=TIMEOUT)
        print(f"{num_replicas} replicas, {number.name}: {outcomes[-1].exit_code}")
        assert outcomes[-1].exit_code in (0, 143, -signal.SIGKILL)
        ended = outcomes[0].result
    tolerance = KINDS[kind].tolerance
    for name, expected in calm.items():
        assert ended[name] == pytest.approx(expected, abs=tolerance), name


# Loggers and the progress bar.


class Ends(Callback):
    """Ends the first fits, each in another batch, by a stop or a kill."""

    def __init__(self, after: int | None, error: type[BaseException] | None) -> None:
        self._after = after
        self._error = error

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self._after:
            if self._error is not None:
                raise self._error
            request_stop_and_wait()


class Logging(Net):
    """Logs each step, of a validation, too."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch[0])
        self.log("loss", loss)
        return loss

    def validation_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        loss = self.loss(batch[0])
        self.log("valid", loss, on_step=True, on_epoch=True)
        self.mean_valid.update(loss)  # Of all loaders so far.
        self.log("so_far", self.mean_valid, on_step=False, on_epoch=True)


def fit_with(directory: Path, *callbacks: Callback, **options: Any) -> Any:
    def script() -> Trainer:
        data, valid = datasets()
        trainer = patch(
            Trainer(
                max_epochs=2,
                callbacks=list(callbacks),
                log_every_n_steps=1,
                **{**SILENT, **options},
            ),
            batch_size="global",
        )
        train = DataLoader(data, 6, shuffle=True)
        trainer.fit(Logging(), train, [DataLoader(valid, 4) for _ in range(3)])
        return trainer

    return run_once(script, directory, save_interval=0, async_save=False)


@pytest.mark.parametrize("version", [None, 3])
def test_a_csv_logger_goes_on_in_its_file(tmp_path: Path, version: int | None) -> None:
    def rows(directory: str) -> list[dict[str, str]]:
        (path,) = (tmp_path / directory).glob("**/metrics.csv")
        assert len(list(path.parent.parent.iterdir())) == 1  # No other versions.
        return list(csv.DictReader(path.open(newline="")))

    for directory, ends in [
        ("calm", [Ends(None, None)]),
        ("cut", [Ends(2, None), Ends(4, None), Ends(6, Crash), Ends(None, None)]),
    ]:
        for end in ends:
            logger = CSVLogger(tmp_path / directory, version=version)
            fit_with(tmp_path / directory / "job", end, logger=logger)
    assert len(rows("calm")) == 2 * (NUM_BATCHES + 3 * 5 + 1)
    assert rows("cut") == rows("calm")


def test_the_progress_bar_stands_where_it_was(tmp_path: Path) -> None:
    class Look(Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            bar = trainer.progress_bar_callback.train_progress_bar
            seen.append((bar.desc, bar.initial, bar.n, bar.total))

    seen: list[tuple[str, int, int, int]] = []
    fit_with(tmp_path, Ends(6, None))
    fit_with(tmp_path, Look(), TQDMProgressBar(), enable_progress_bar=True)
    assert seen[0] == ("Epoch 1: ", 2, 2, NUM_BATCHES)


# What is refused, and what is there besides.


class Asking(Net):
    """Asks for batches itself."""

    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        return self.loss(next(dataloader_iter)[0][0])


def test_a_trainer_that_exists_is_patched_once() -> None:
    trainer = patch(Trainer(**SILENT))
    assert isinstance(trainer.callbacks[0], Elastic)
    with pytest.raises(ElasticRunError, match="an Elastic among its callbacks already"):
        patch(trainer)


@pytest.mark.parametrize(
    ("net", "batch_size", "devices", "expected"),
    [
        (Net, "global", None, [6, 6, 6, 5]),
        (Net, "per_device", 2, [6, 6, 6, 5]),  # In two steps, each on two of these.
        (Manual, "per_device", 2, [12, 11]),
    ],
)
def test_a_batch_size_means_what_is_said(
    tmp_path: Path,
    net: type[Net],
    batch_size: Any,
    devices: int | None,
    expected: list[int],
) -> None:
    class Sizes(net):  # type: ignore[misc, valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            sizes.append(len(batch[0]))
            return super().training_step(batch, batch_idx)

    def script(size: int, means: Any, devices: int | None) -> list[float]:
        loader = DataLoader(datasets()[0], size)
        trainer = patch(
            Trainer(max_epochs=1, **SILENT), batch_size=means, devices=devices
        )
        module = Sizes()
        trainer.fit(module, loader)
        return [float(each.sum()) for each in module.parameters()]

    sizes: list[int] = []
    trained = run_once(partial(script, 6, batch_size, devices))
    assert sizes == expected
    whole = run_once(partial(script, 6 * (devices or 1), "global", None))
    assert trained == pytest.approx(whole, abs=1e-6)


@pytest.mark.parametrize(
    "options", [{"batch_size": "all"}, {"batch_size": "per_device"}, {"devices": 2}]
)
def test_a_batch_size_without_a_meaning_is_refused(options: Any) -> None:
    with pytest.raises(ValueError, match="batch_size="):
        Elastic(**options)


def set_up(trainer: Any) -> None:
    """Do of a fit what comes first; a fit starts processes."""
    net = Net()
    trainer.strategy._lightning_module = net
    trainer.callbacks[0].setup(trainer, net, "fit")


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"overfit_batches": 2}, "overfit_batches: Lightning makes the loaders anew"),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs"),
        ({"devices": 2, "strategy": "ddp"}, "has 2 processes, but the job 1 replicas"),
    ],
)
def test_what_a_restart_would_change_is_refused(
    job: Any, options: dict[str, Any], what: str
) -> None:
    trainer = patch(Trainer(**{"accelerator": "cpu", **SILENT, **options}))
    with pytest.raises(ElasticRunError, match=what):
        set_up(trainer)


@pytest.mark.parametrize("kind", [FSDPStrategy, DeepSpeedStrategy])
def test_sharding_strategies_are_refused(job: Any, kind: Any) -> None:
    trainer: Any = patch(Trainer(**SILENT))
    strategy = kind.__new__(kind)  # They ask for GPUs, and for packages.
    trainer._accelerator_connector.strategy = strategy
    with pytest.raises(ElasticRunError, match=f"{kind.__name__}: of its states each"):
        set_up(trainer)


def test_loaders_that_cannot_go_on_are_refused() -> None:
    data = datasets()[0]

    def fit(loader: Any, batch_size: Any = None) -> None:
        trainer = patch(Trainer(max_epochs=1, **SILENT), batch_size=batch_size)
        with generation():
            trainer.fit(Net(), loader())

    drawn = WeightedRandomSampler([1.0] * len(data), 9)
    with pytest.raises(TypeError, match="got a DataLoader, whose batches depend"):
        fit(lambda: DataLoader(data, 6))
    with pytest.raises(TypeError, match="with a WeightedRandomSampler, which goes"):
        fit(lambda: DataLoader(data, 6, sampler=drawn), "global")
    again = RandomSampler(data, replacement=True)
    with pytest.raises(TypeError, match="with a RandomSampler, which goes"):
        fit(lambda: DataLoader(data, 6, sampler=again), "global")


@pytest.mark.parametrize(
    ("net", "mode", "evaluates", "what"),
    [
        (Net, None, True, "but evaluates, where there are no steps"),
        (Manual, None, False, "but the module optimizes manually: training_step"),
        (Asking, None, False, "but training_step takes a dataloader_iter"),
        (Net, "min_size", False, "but is one of 2 loaders that deliver together"),
    ],
)
def test_micro_batches_without_a_step_of_their_own_are_refused(
    job: Any, net: type[Net], mode: Any, evaluates: bool, what: str
) -> None:
    data = datasets()[0]
    cut = AdaptiveDataLoader(data, 6, max_local_batch_size=2, name="cut")
    whole = AdaptiveDataLoader(data, 6)
    trainer = patch(Trainer(max_epochs=1, **SILENT))
    train = CombinedLoader([cut, whole], mode) if mode else whole if evaluates else cut
    with pytest.raises(
        ElasticRunError, match=f"`cut` has max_local_batch_size, {what}"
    ):
        trainer.fit(net(), train, cut if evaluates else None)


def test_lightning_itself_trains_with_no_loaders_in_turn(job: Any) -> None:
    loaders = [AdaptiveDataLoader(datasets()[0], 6) for _ in range(2)]
    trainer = patch(Trainer(max_epochs=1, **SILENT))
    with pytest.raises(ValueError, match='does not support .*mode="sequential"'):
        trainer.fit(Net(), CombinedLoader(loaders, "sequential"))


@pytest.mark.parametrize("path", INTERNALS.split())
def test_what_lightning_has_no_more_is_named(job: Any, path: str) -> None:
    trainer = patch(Trainer(**SILENT))
    trainer.strategy._lightning_module = Net()
    owner, _, name = path.rpartition(".")
    attrgetter(path)(trainer)  # This Lightning has it.
    part = attrgetter(owner)(trainer) if owner else trainer

    class Without(type(part)):  # type: ignore[misc]
        def __getattribute__(self, asked: str) -> Any:
            if asked == name:
                raise AttributeError(asked)
            return super().__getattribute__(asked)

    part.__class__ = Without
    with pytest.raises(ElasticRunError, match=f"Trainer of .* has no {path}, which"):
        trainer.callbacks[0].setup(trainer, trainer.lightning_module, "fit")


@pytest.mark.parametrize("path", INTERNALS_BESIDE.split())
def test_what_is_gone_beside_the_trainer_is_named(
    job: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, _, name = path.partition(".")
    kind: type = {"ModelCheckpoint": ModelCheckpoint, "_ResultMetric": _ResultMetric}[
        owner
    ]
    known = kind.__getattribute__

    def without(self: Any, asked: str) -> Any:
        if asked == name:
            raise AttributeError(asked)
        return known(self, asked)

    trainer = patch(Trainer(**SILENT))
    trainer.strategy._lightning_module = Net()
    monkeypatch.setattr(kind, "__getattribute__", without)
    with pytest.raises(ElasticRunError, match=f"has no {path}, which"):
        trainer.callbacks[0].setup(trainer, trainer.lightning_module, "fit")


def test_a_checkpoint_of_lightnings_is_no_place_to_go_on(job: Any) -> None:
    trainer = patch(Trainer(max_epochs=1, **SILENT))
    with pytest.raises(ElasticRunError, match=r"given ckpt_path='some.ckpt', but"):
        trainer.fit(Net(), AdaptiveDataLoader(datasets()[0], 6), ckpt_path="some.ckpt")


def test_after_the_fit_any_loader_and_checkpoint_is_taken(
    job: Any, tmp_path: Path
) -> None:
    data = datasets()[0]
    trainer = Trainer(
        max_epochs=1, callbacks=[Elastic()], **{**SILENT, **Elastic.devices()}
    )
    own = AdaptiveDataLoader(data, 6, shuffle=True)
    net = Net()
    trainer.fit(net, own)
    first, again = (trainer.validate(net, x) for x in (own, DataLoader(data, 6)))
    assert first[0]["valid"] == pytest.approx(again[0]["valid"], rel=1e-5)
    trainer.save_checkpoint(tmp_path / "best")
    torch.nn.init.zeros_(net.net.weight)
    (best,) = trainer.validate(net, own, ckpt_path=tmp_path / "best")
    assert best == first[0]
    with pytest.raises(ElasticRunError, match=r"fit\(\) was called a second time"):
        trainer.fit(net, own)
