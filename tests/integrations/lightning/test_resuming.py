"""What Lightning promises of a resumed fit, where the job resumes it instead.

Its own tests compare a fit that goes on from a checkpoint with one that was left alone:
the progress of its loops, states, hooks, and the checkpoints that it writes later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer

from elasticrun import AdaptiveDataLoader
from elasticrun.integrations.lightning import Elastic
from tests.integrations.lightning.fitting import Patient, datasets
from tests.support.generations import Crash, run_once
from tests.support.programs import request_stop_and_wait

pytestmark = pytest.mark.filterwarnings("ignore")

# After each batch, validation and epoch.
PROMISES: dict[str, Callable[[Any], Any]] = {
    "the progress of all loops": lambda trainer: trainer.fit_loop.state_dict(),
    "epoch and steps": lambda trainer: [
        trainer.current_epoch,
        trainer.global_step,
        trainer.fit_loop.total_batch_idx,
        trainer.fit_loop.batch_idx,
    ],
    "whether the batch is the last one": lambda trainer: trainer.is_last_batch,
    "how many batches there are": lambda trainer: [
        trainer.num_training_batches,
        trainer.num_val_batches,
        trainer.estimated_stepping_batches,
    ],
    "weights": lambda trainer: trainer.lightning_module.state_dict(),
    "optimizers": lambda trainer: [each.state_dict() for each in trainer.optimizers],
    "schedulers": lambda trainer: [
        each.scheduler.state_dict() for each in trainer.lr_scheduler_configs
    ],
    "callbacks": lambda trainer: [
        each.state_dict() for each in trainer.callbacks if not isinstance(each, Timer)
    ],
    "what was logged": lambda trainer: trainer.callback_metrics,
    "whether it is to stop": lambda trainer: trainer.should_stop,
}
# Of a batch and a validation, in the order in which they are called.
HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
)


@dataclass
class Seen:
    """What one job saw, in all of its generations."""

    directory: Path
    values: dict[str, list[Any]] = field(default_factory=dict)
    hooks: list[str] = field(default_factory=list)
    num_generations: int = 0

    def fit(self, on_hook: Callable[[Trainer, str], None]) -> Any:
        """Run one generation; return whether it came to the end."""
        witness = Witness(self, on_hook)
        self.num_generations += 1

        def script() -> bool:
            data, valid = datasets()
            files = self.directory / "files"
            callbacks = [
                Elastic(),
                ModelCheckpoint(str(files), every_n_train_steps=2, save_top_k=-1),
                EarlyStopping("valid", patience=9),
                Timer(),
                witness,
            ]
            trainer = Trainer(
                max_epochs=3,
                val_check_interval=2,
                accumulate_grad_batches=2,
                callbacks=callbacks,
                logger=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                num_sanity_val_steps=0,
                **Elastic.devices(),
            )
            train = AdaptiveDataLoader(data, 5, shuffle=True)
            trainer.fit(Patient(), train, AdaptiveDataLoader(valid, 4))
            return True

        return run_once(script, self.directory / "job", save_interval=0)

    def keep(self, trainer: Trainer) -> None:
        """Keep what there is now."""
        for name, read in PROMISES.items():
            self.values.setdefault(name, []).append(self.plain(read(trainer)))

    def files(self) -> dict[str, Any]:
        """Return what the checkpoints of Lightning's have."""
        files = sorted((self.directory / "files").iterdir())
        return {
            path.name: self.plain(torch.load(path, weights_only=False))
            for path in files
        }

    def plain(self, value: Any) -> Any:
        """Return a value that is equal in another directory, and does not change."""
        if isinstance(value, dict):
            each = {
                key: self.plain(one) for key, one in value.items() if key != "Timer"
            }
            return {self.plain(key): one for key, one in each.items()}
        if isinstance(value, list | tuple):
            return [self.plain(each) for each in value]
        if isinstance(value, str):
            return value.replace(str(self.directory), "")
        return value.tolist() if isinstance(value, torch.Tensor) else value


class Witness(Callback):
    """Keeps what there is, and calls a function in each hook."""

    def __init__(self, seen: Seen, on_hook: Callable[[Trainer, str], None]) -> None:
        for name in HOOKS:
            setattr(self, name, self._hook(seen, on_hook, name))

    def _hook(self, seen: Seen, on_hook: Any, name: str) -> Any:
        def hook(trainer: Trainer, *args: Any) -> None:
            seen.hooks.append(name)
            if name in (
                "on_train_batch_end",
                "on_validation_end",
                "on_train_epoch_end",
            ):
                seen.keep(trainer)
            on_hook(trainer, name)

        return hook


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    seen = Seen(tmp_path_factory.mktemp("calm"))
    assert seen.fit(lambda trainer, name: None)
    return seen


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """A fit that stops as soon as it can, again and again."""
    seen = Seen(tmp_path_factory.mktemp("cut"))

    def stop(trainer: Trainer, name: str) -> None:
        if name == "on_train_batch_start" and trainer not in stopped:
            stopped.append(trainer)
            request_stop_and_wait()

    stopped: list[Trainer] = []
    while not seen.fit(stop):
        assert seen.num_generations < 20
    return seen


@pytest.mark.parametrize("promise", PROMISES)
def test_a_resumed_fit_has(promise: str, calm: Seen, cut: Seen) -> None:
    assert cut.num_generations > 2
    assert cut.values[promise] == calm.values[promise]


def test_a_resumed_fit_calls_each_hook_once(calm: Seen, cut: Seen) -> None:
    assert cut.hooks == calm.hooks


def test_a_resumed_fit_writes_the_same_checkpoints(calm: Seen, cut: Seen) -> None:
    assert cut.files() == calm.files()


def test_a_fit_that_failed_in_a_validation_validates_again(
    tmp_path: Path, calm: Seen
) -> None:
    def fail(trainer: Trainer, name: str) -> None:
        if name == "on_validation_batch_end" and trainer.current_epoch == 1:
            raise Crash

    seen = Seen(tmp_path)
    assert not seen.fit(fail)
    assert seen.hooks[-1] == "on_validation_batch_end"
    assert seen.fit(lambda trainer, name: None)
    for name, values in calm.values.items():
        assert seen.values[name][-1] == values[-1], name
