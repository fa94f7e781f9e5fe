"""Saves what a transformers Trainer knows of its training."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any, BinaryIO

from transformers.trainer_callback import ExportableState

from elasticrun.checkpoint.states.values import load_values, save_values
from elasticrun.integrations.transformers.checks import check_in_training
from elasticrun.job.states import State
from elasticrun.replicas.gathering import gather

# What of the Trainer's state follows from the process and the arguments.
_NOT_KEPT = {
    *("is_local_process_zero", "is_world_process_zero", "stateful_callbacks"),
    *("max_steps", "num_train_epochs", "train_batch_size"),
    *("logging_steps", "eval_steps", "save_steps"),
    *("is_hyper_param_search", "trial_name", "trial_params"),
}


class TrainingState(State):
    """What a Trainer knows of its training.

    Attributes:
        has_ended: Whether it has ended for good: by a callback, or within an epoch.
        began: When it would have begun without the time between generations.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__("trainer")
        self._trainer = trainer
        self._loaded: dict[str, Any] | None = None
        self._captured: dict[str, Any] = {}
        self.num_epochs = 0
        self.has_ended = False
        self.began = 0.0

    def current(self) -> None:
        """Nothing: it is restored where the framework begins, behind replayed code."""

    def sync(self) -> None:
        trainer = self._trainer
        if not self.began:  # What was loaded is not in its places yet.
            self._captured = self._loaded or {}
            return
        trainer.store_flos()
        state = asdict(trainer.state)
        self._captured = {
            "state": {name: state[name] for name in state if name not in _NOT_KEPT},
            "callbacks": [
                (type(each).__name__, each.state()["attributes"])
                for each in callbacks_of(trainer)
            ],
            "loss": self.mean_loss(),
            "logged_loss": trainer._total_loss_scalar,
            "logged_at": trainer._globalstep_last_logged,
            "num_epochs": self.num_epochs,
            "has_ended": self.has_ended,
            "is_training": trainer.model.training,  # Not after an evaluation.
            "seconds": time.time() - self.began,
            # What the trainers of TRL log next, and the tokens that they have counted.
            "metrics": {
                mode: {name: list(values) for name, values in lists.items()}
                for mode, lists in getattr(trainer, "_metrics", {}).items()
            },
            "tokens": getattr(trainer, "_total_train_tokens", None),
        }

    def mean_loss(self) -> float:
        """Return the loss since the last log, as the mean over replicas. Collective."""
        losses: list[float] = gather(float(self._trainer._tr_loss))
        return sum(losses) / len(losses)

    def save(self, fileobj: BinaryIO) -> None:
        save_values(self._captured, fileobj)

    def load(self, fileobj: BinaryIO) -> None:
        self._loaded = load_values(fileobj) or None
        if self._loaded is not None:
            self.num_epochs = self._loaded["num_epochs"]
            self.has_ended = self._loaded["has_ended"]

    def restore_state(self) -> None:
        """Put back counters, log, best value, and what callbacks know."""
        if self._loaded is None:
            return
        for name, value in self._loaded["state"].items():
            setattr(self._trainer.state, name, value)
        callbacks = callbacks_of(self._trainer)
        for kind, attributes in self._loaded["callbacks"]:
            for callback in callbacks:
                if type(callback).__name__ == kind:
                    vars(callback).update(attributes)
                    callbacks.remove(callback)
                    break

    def restore_sums(self, start_time: float) -> None:
        """Put back, once, what the Trainer sets to 0 before the first epoch."""
        if self.began:
            return
        trainer = self._trainer
        check_in_training(trainer)
        self.began = start_time
        if self._loaded is not None:
            self.began -= self._loaded["seconds"]
            trainer._tr_loss += self._loaded["loss"]
            trainer._total_loss_scalar = self._loaded["logged_loss"]
            trainer._globalstep_last_logged = self._loaded["logged_at"]
            trainer._initial_global_step = 0
            trainer._initial_num_input_tokens_seen = 0
            trainer.model.train(self._loaded["is_training"])
            for mode, lists in self._loaded["metrics"].items():
                trainer._metrics[mode].update(lists)
            if self._loaded["tokens"] is not None:
                trainer._total_train_tokens = self._loaded["tokens"]
            self._loaded = None


def callbacks_of(trainer: Any) -> list[Any]:
    """Return the callbacks that say what they know."""
    callbacks = trainer.callback_handler.callbacks
    return [each for each in callbacks if isinstance(each, ExportableState)]
