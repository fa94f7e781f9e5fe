"""transformers: a Trainer that goes on where it was, at any number of devices."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any, BinaryIO

import torch
import transformers.trainer
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from transformers import Trainer
from transformers.trainer_callback import ExportableState
from transformers.trainer_pt_utils import LengthGroupedSampler

from elasticrun.checkpoint.states.values import load_values, save_values
from elasticrun.data.loader import AdaptiveDataLoader
from elasticrun.data.order.partition import partition
from elasticrun.data.order.ready import LengthGroups
from elasticrun.errors import ElasticRunError, JobStopped
from elasticrun.job.current import current_job
from elasticrun.job.foreign import ForeignLoop
from elasticrun.job.states import State, register
from elasticrun.replicas.gathering import gather

# What is used of the Trainer beside its public names: of a method the parameters that
# it must have, of anything else None. A version without one of them is refused.
PRIVATE: dict[str, tuple[str, ...] | None] = {
    "_finalize_training": ("trial", "num_train_samples", "start_time"),
    "_get_collator_with_removed_columns": ("data_collator", "description"),
    "_get_dataloader": (
        *("dataset", "description", "batch_size", "sampler_fn", "is_training"),
    ),
    "_get_num_items_in_batch": ("batch_samples", "device"),
    "_init_training_state": (
        *("max_steps", "num_update_steps_per_epoch", "num_train_epochs"),
        *("resume_from_checkpoint", "trial"),
    ),
    "_load_rng_state": ("checkpoint",),
    "_prepare_for_training": (
        *("max_steps", "train_dataloader", "resume_from_checkpoint"),
    ),
    "_run_epoch": (
        *("epoch", "train_dataloader", "steps_in_epoch", "start_time"),
        *("resume_from_checkpoint", "epochs_trained", "steps_trained_in_current_epoch"),
    ),
    "_track_num_input_tokens": ("inputs",),
    # Set when it begins to train.
    "_globalstep_last_logged": None,
    "_initial_global_step": None,
    "_initial_num_input_tokens_seen": None,
    "_total_loss_scalar": None,
    "_tr_loss": None,
}
# What of the Trainer's state follows from the process and the arguments.
_NOT_KEPT = {
    *("is_local_process_zero", "is_world_process_zero", "stateful_callbacks"),
    *("max_steps", "num_train_epochs", "train_batch_size"),
    *("logging_steps", "eval_steps", "save_steps"),
    *("is_hyper_param_search", "trial_name", "trial_params"),
}
_RESUMED = "where the job was"  # Stands for a checkpoint of the Trainer's.


class ElasticMixin(Trainer):
    """Gives a Trainer, or what descends from it, a place in the job.

        class Elastic(ElasticMixin, SFTTrainer): ...

        trainer = Elastic(model, args, train_dataset=data, num_devices=4)
        trainer.train()

    The job saves and stops between two optimizer steps, after all that belongs to the
    first one: logs, evaluation, callbacks. The model, the optimizer, the scheduler,
    the Trainer's state with its log, callbacks that are an `ExportableState`, and the
    loss that has been summed up since the last log are in each checkpoint.

    A batch is that of `num_devices` devices, at any number of replicas: its size is
    `per_device_train_batch_size` times `num_devices`, and an optimizer step takes
    `gradient_accumulation_steps` of them. If there are fewer replicas, each has several
    micro-batches of at most `per_device_train_batch_size` instead. Evaluation has
    batches of `per_device_eval_batch_size` times `num_devices`, and counts each sample
    once.

    Collective: `train`, `evaluate` and `predict` are called on every replica; `train`
    once in a job.
    Replay: `train` goes on where the job was; give it no `resume_from_checkpoint`.

    Args:
        args: The Trainer's.
        num_devices: For how many devices the batch sizes are meant.
        kwargs: The Trainer's.

    Raises:
        ElasticRunError: It is told to do what is not supported, or this version of
            transformers is not.
        TypeError: Data has no length.
    """

    def __init__(self, *args: Any, num_devices: int = 1, **kwargs: Any) -> None:
        _check_version()
        if num_devices < 1:
            raise ValueError(
                f"num_devices={num_devices}: the global batch is that many times the "
                "batch of a device, so it is 1 at least."
            )
        self.num_devices = num_devices
        self._progress: _Progress | None = None
        self._evaluation: _Evaluation | None = None
        self._is_in_step = False
        # Batches of the step that is trained; those of the epoch up to it.
        self._num_waiting = self._num_taken = 0
        super().__init__(*args, **kwargs)
        _check(self)

    # Before the first epoch.

    def train(
        self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train from where the job is."""
        if resume_from_checkpoint:
            raise ElasticRunError(
                "train(resume_from_checkpoint=...) is not supported: the job goes on "
                "from its own checkpoint, which has the place in the epoch for any "
                "number of devices. Leave it out; to begin with the weights of a "
                "Trainer's checkpoint, make the model from_pretrained(checkpoint)."
            )
        if self._progress is not None:
            raise ElasticRunError(
                "train() was called a second time in a job, which has one place and "
                "one state for it. Give the later training a job of its own, with "
                "another checkpoint directory."
            )
        return super().train(None, *args, **kwargs)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return how many samples an optimizer step takes."""
        batch_size: int = args.per_device_train_batch_size * self.num_devices
        return batch_size * int(args.gradient_accumulation_steps)

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Any = None,
        is_training: bool = False,
        **_: Any,
    ) -> Any:
        """Return a loader whose batches are shared by all replicas, also unevenly."""
        _check_length(dataset, description)
        args, job = self.args, current_job()
        options = {
            "collate_fn": self._get_collator_with_removed_columns(
                self.data_collator, description=description
            ),
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory and args.device.type == "cuda",
            "prefetch_factor": args.dataloader_prefetch_factor,
            "multiprocessing_context": args.dataloader_multiprocessing_context,
        }
        size = batch_size * self.num_devices
        if not is_training:
            shares = _SharedBatches(len(dataset), size, job.rank, job.world_size)
            return DataLoader(dataset, batch_sampler=shares, **options)
        return AdaptiveDataLoader(
            dataset,
            size,
            **_order(sampler_fn(dataset), size * args.gradient_accumulation_steps),
            seed=args.seed if args.data_seed is None else args.data_seed,
            drop_last=args.dataloader_drop_last,
            max_local_batch_size=batch_size,
            name="trainer-batches",
            persistent_workers=args.dataloader_persistent_workers,
            **options,
        )

    def _init_training_state(
        self, max_steps: int, *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        """Load what the Trainer knows; return the epoch at which to go on."""
        super()._init_training_state(max_steps, *args, **kwargs)
        self._progress = progress = _Progress(self)
        self._loop = ForeignLoop("Trainer.train")
        progress.restore_state()
        has_ended = progress.has_ended or self.state.global_step >= max_steps
        num_epochs = self.state.num_train_epochs if has_ended else progress.num_epochs
        return num_epochs, 0

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not isinstance(train_dataloader, AdaptiveDataLoader):
            raise TypeError(
                f"get_train_dataloader() returned a {type(train_dataloader).__name__}, "
                "whose batches depend on the number of devices and whose place is lost "
                "at a restart. Let it return an AdaptiveDataLoader(data, batch_size) "
                "with the batch size of all devices together, or do not override it."
            )
        prepared = super()._prepare_for_training(
            max_steps, train_dataloader, *args, **kwargs
        )
        optimizer: Any = self.optimizer
        register(
            model=self.model,
            optimizer=getattr(optimizer, "optimizer", optimizer),  # In Accelerate's.
            lr_scheduler=self.lr_scheduler,
        )
        if self.accelerator.scaler is not None:
            register(scaler=self.accelerator.scaler)
        return prepared

    # The epochs.

    def _run_epoch(
        self,
        *,
        epoch: int,
        train_dataloader: Any,
        steps_in_epoch: int,
        start_time: float,
        **others: Any,
    ) -> None:
        """Train the rest of an epoch, between its place in the job and its end."""
        progress, loop = self._progress, self._loop
        assert progress is not None
        progress.restore_sums(start_time)
        epoch_of_job, step = loop.begin(steps_in_epoch)
        accumulated = self.args.gradient_accumulation_steps
        if step % accumulated:
            raise ElasticRunError(
                f"gradient_accumulation_steps={accumulated}, but the job was left "
                f"after {step} batches of epoch {epoch}, in the midst of one of those "
                "steps. Give it the number from before until the epoch has ended."
            )
        self._num_waiting, self._num_taken = 0, step
        others |= {
            "resume_from_checkpoint": _RESUMED if step else None,
            "epochs_trained": epoch,
            "steps_trained_in_current_epoch": step,
        }
        try:
            super()._run_epoch(
                epoch=epoch,
                train_dataloader=_Batches(train_dataloader, epoch_of_job, step),
                steps_in_epoch=steps_in_epoch,
                start_time=progress.began,
                **others,
            )
        except JobStopped:
            raise
        except BaseException:
            loop.leave()
            raise
        progress.num_epochs += 1
        is_cut = self._num_taken < steps_in_epoch
        progress.has_ended = self.control.should_training_stop and (
            is_cut or self.state.global_step < self.state.max_steps
        )
        loop.end()

    def _load_rng_state(self, checkpoint: Any) -> None:
        if checkpoint is not _RESUMED:  # Those of the job have come back already.
            super()._load_rng_state(checkpoint)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the next optimizer step takes; the one before is finished."""
        if self._num_waiting:
            num_batches, self._num_waiting = self._num_waiting, 0
            self._loop.pass_boundary(num_batches)
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        self._num_waiting = len(batches)
        self._num_taken += len(batches)
        return batches, num_items

    def _finalize_training(
        self, trial: Any, num_train_samples: Any, start_time: float
    ) -> Any:
        progress = self._progress
        assert progress is not None
        progress.restore_sums(start_time)
        self._loop.finish()
        return super()._finalize_training(trial, num_train_samples, progress.began)

    # A step.

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Train with a batch; gradients are averaged at its last micro-batch."""
        losses = []
        self._is_in_step = True
        try:
            for micro_batch, share in inputs.pairs:
                self._loop.take(share)
                is_last = self._loop.is_step
                with nullcontext() if is_last else self.accelerator.no_sync(model):
                    loss = super().training_step(model, micro_batch, *args, **kwargs)
                losses.append(loss)
        finally:
            self._is_in_step = False
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the loss, weighed so that the mean over devices is that of the batch.

        One that is divided by the number of items (tokens) in all of the batch needs
        nothing, another one this replica's share.
        """
        result = super().compute_loss(
            model,
            inputs,
            return_outputs=return_outputs,
            num_items_in_batch=num_items_in_batch,
        )
        is_scaled = self.loss_is_scaled_for_ga
        if is_scaled is None:
            is_scaled = self.model_accepts_loss_kwargs or self.compute_loss_func
        counts_items = num_items_in_batch is not None and bool(is_scaled)
        if self._evaluation is not None:
            self._evaluation.counts_items = counts_items
        if not self._is_in_step:
            return result
        loop = self._loop
        weight = float(loop.num_valid > 0) if counts_items else loop.loss_weight
        if weight == 1.0:
            return result
        if return_outputs:
            return result[0] * weight, *result[1:]
        return result * weight

    # What is counted in a batch.

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        counted: list[Any] = []
        for batch in batch_samples:
            if isinstance(batch, _LocalBatch):
                counted += batch.without_padding()
            elif self._evaluation is not None and not self._evaluation.num_own:
                counted.append(_without_rows(batch))
            else:
                counted.append(batch)
        return super()._get_num_items_in_batch(counted, device)

    def floating_point_ops(self, inputs: Any) -> Any:
        """Return the operations of a batch."""
        if not isinstance(inputs, _LocalBatch):
            return super().floating_point_ops(inputs)
        own = super().floating_point_ops
        return sum(own(each) for each in inputs.without_padding())

    def _track_num_input_tokens(self, inputs: Any) -> None:
        for each in inputs.without_padding():
            super()._track_num_input_tokens(each)

    # Evaluation.

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate each sample once, at any number of replicas."""
        batches = getattr(dataloader, "batch_sampler", None)
        if not isinstance(batches, _SharedBatches):
            raise TypeError(
                f"an evaluation got a {type(dataloader).__name__} of its own, whose "
                "shares are not known here: samples would be counted twice. Do not "
                "override get_eval_dataloader or get_test_dataloader, or let them call "
                "the Trainer's."
            )
        self._evaluation = _Evaluation(batches, self.accelerator)
        self.gather_function = self._evaluation.gather
        try:
            return super().evaluation_loop(dataloader, *args, **kwargs)
        finally:
            self._evaluation = None

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return loss, logits and labels of a batch."""
        evaluation = self._evaluation
        if evaluation is None:
            return super().prediction_step(*args, **kwargs)
        evaluation.begin_batch()
        loss, logits, labels = super().prediction_step(*args, **kwargs)
        evaluation.is_loss_next = loss is not None
        return loss, logits, labels


class ElasticTrainer(ElasticMixin):
    """The Trainer of transformers, in a job; see `ElasticMixin`."""


class _LocalBatch:
    """This replica's part of a global batch, in micro-batches, each with its share."""

    def __init__(self, pairs: list[tuple[Any, Any]]) -> None:
        self.pairs = pairs

    def without_padding(self) -> list[Any]:
        """Return the micro-batches, one of padding without its rows."""
        return [
            inputs if part.num_valid else _without_rows(inputs)
            for inputs, (_, _, part) in self.pairs
        ]


def _without_rows(inputs: Any) -> dict[str, Any]:
    """Return inputs of no sample, in which everything counts 0."""
    return {
        name: value[:0] if isinstance(value, Tensor | list) else value
        for name, value in inputs.items()
    }


class _Batches:
    """Stands for the loader where the Trainer iterates an epoch.

    Args:
        first: The batch to begin with.
    """

    def __init__(self, loader: AdaptiveDataLoader[Any], epoch: int, first: int) -> None:
        self._loader = loader
        self._epoch = epoch
        self._first = first

    def __iter__(self) -> Iterator[_LocalBatch]:
        pairs = []
        for inputs, share in self._loader.read(self._epoch, self._first):
            pairs.append((inputs, share))
            if share[2].is_step:
                yield _LocalBatch(pairs)
                pairs = []


def _skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Skip batches as the Trainer does; ours begin where the job is."""
    if isinstance(dataloader, _Batches):
        return dataloader
    return _skip_of_accelerate(dataloader, num_batches)


_skip_of_accelerate = transformers.trainer.skip_first_batches
transformers.trainer.skip_first_batches = _skip_first_batches


class _Progress(State):
    """What a Trainer knows of its training.

    Attributes:
        num_epochs: How many are finished.
        has_ended: Whether it has ended for good: by a callback, or within an epoch.
        began: When it would have begun without the time between generations.
    """

    def __init__(self, trainer: ElasticMixin) -> None:
        super().__init__("trainer")
        self._trainer = trainer
        self._loaded: dict[str, Any] | None = None
        self._captured: dict[str, Any] = {}
        self.num_epochs = 0
        self.has_ended = False
        self.began = 0.0

    def sync(self) -> None:
        trainer = self._trainer
        if not self.began:  # What was loaded is not in its places yet.
            self._captured = self._loaded or {}
            return
        trainer.store_flos()
        losses = gather(float(trainer._tr_loss))
        state = asdict(trainer.state)
        self._captured = {
            "state": {name: state[name] for name in state if name not in _NOT_KEPT},
            "callbacks": [
                (type(each).__name__, each.state()["attributes"])
                for each in _callbacks_of(trainer)
            ],
            "loss": sum(losses) / len(losses),
            "logged_loss": trainer._total_loss_scalar,
            "logged_at": trainer._globalstep_last_logged,
            "num_epochs": self.num_epochs,
            "has_ended": self.has_ended,
            "seconds": time.time() - self.began,
        }

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
        callbacks = _callbacks_of(self._trainer)
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
        _check_attributes(trainer)
        self.began = start_time
        if self._loaded is not None:
            self.began -= self._loaded["seconds"]
            trainer._tr_loss += self._loaded["loss"]
            trainer._total_loss_scalar = self._loaded["logged_loss"]
            trainer._globalstep_last_logged = self._loaded["logged_at"]
            trainer._initial_global_step = 0
            trainer._initial_num_input_tokens_seen = 0
            self._loaded = None


def _callbacks_of(trainer: ElasticMixin) -> list[Any]:
    """Return the callbacks that say what they know."""
    callbacks = trainer.callback_handler.callbacks
    return [each for each in callbacks if isinstance(each, ExportableState)]


class _SharedBatches:
    """The batches of an evaluation, in order, each shared out; a batch sampler.

    A replica without a sample in a batch gets its first one, which is not counted.
    """

    def __init__(
        self, num_samples: int, batch_size: int, rank: int, world_size: int
    ) -> None:
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._world_size = world_size
        self.rank = rank

    def __len__(self) -> int:
        return -(-self._num_samples // self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(len(self)):
            yield list(self.shares(number)[self.rank]) or [number * self._batch_size]

    def shares(self, number: int) -> list[range]:
        """Return the samples of each replica in a batch."""
        start = number * self._batch_size
        size = min(self._batch_size, self._num_samples - start)
        return [
            partition(start, size, rank=rank, world_size=self._world_size)
            for rank in range(self._world_size)
        ]


class _Evaluation:
    """An evaluation that is running, and how its batches are shared out.

    Attributes:
        counts_items: Whether the loss of this batch is divided by its items.
        is_loss_next: Whether that loss is what is gathered next.
    """

    def __init__(self, batches: _SharedBatches, accelerator: Any) -> None:
        self._batches = batches
        self._accelerator = accelerator
        self._number = -1
        self._lengths: list[int] = []
        self.counts_items = False
        self.is_loss_next = False

    def begin_batch(self) -> None:
        """Go on to the next batch."""
        self._number += 1
        self._lengths = [len(share) for share in self._batches.shares(self._number)]
        self.counts_items = False

    @property
    def num_own(self) -> int:
        """How many samples of the batch are this replica's."""
        return self._lengths[self._batches.rank]

    def gather(self, values: Any, **_: Any) -> Any:
        """Return the values of all replicas, in the order of the samples.

        Collective.
        """
        if self.is_loss_next:
            self.is_loss_next = False
            values = self._loss_of_each(values[0])
        return recursively_apply(self._gather, values, error_on_other_type=True)

    def _loss_of_each(self, loss: Tensor) -> Tensor:
        """Return a loss for each sample, with the batch's as the mean of all."""
        if self.counts_items and self.num_own:
            share = self.num_own * len(self._lengths) / sum(self._lengths)
            loss = loss / share
        return loss.repeat(max(1, self.num_own))

    def _gather(self, rows: Tensor) -> Tensor:
        lengths = self._lengths
        if len(lengths) == 1:
            return rows
        longest = max(lengths)
        padded = rows.new_zeros(longest, *rows.shape[1:])
        padded[: self.num_own] = rows[: self.num_own]
        gathered = self._accelerator.gather(padded).split(longest)
        return torch.cat(
            [part[:length] for part, length in zip(gathered, lengths, strict=True)]
        )


def _order(sampler: Any, batch_size: int) -> dict[str, Any]:
    """Return the loader's arguments for the order that the Trainer would have.

    Raises:
        ElasticRunError: It is one that cannot be read at a position.
    """
    if type(sampler) is RandomSampler and not sampler.replacement:
        return {"shuffle": True}
    if type(sampler) is SequentialSampler:
        return {}
    if type(sampler) is LengthGroupedSampler:
        return {"sampler": LengthGroups(sampler.lengths, batch_size)}
    raise ElasticRunError(
        f"the Trainer's sampler is a {type(sampler).__name__}, an order that cannot be "
        "read from a place on at any number of devices. train_sampling_strategy is "
        '"random", "sequential" or "group_by_length" here; for another order let '
        "get_train_dataloader return an AdaptiveDataLoader with it."
    )


def _check_length(dataset: Any, description: str) -> None:
    """Refuse data without a length.

    Raises:
        TypeError: It has none.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"{description}: a {type(dataset).__name__} is iterable data, which has no "
            "samples by number. They cannot be shared out so that each is taken once "
            "at any number of devices, nor read from a place in the midst. Give a data "
            "set with __len__ and __getitem__."
        )


def _check_version() -> None:
    """Refuse a version of transformers that does not do as is relied upon.

    Raises:
        ElasticRunError: It is one.
    """
    for name, parameters in PRIVATE.items():
        if parameters is None:
            continue
        method = getattr(Trainer, name, None)
        known = () if method is None else inspect.signature(method).parameters
        if missing := [each for each in parameters if each not in known]:
            raise _gone(f"Trainer.{name}({', '.join(missing)})")


def _check_attributes(trainer: ElasticMixin) -> None:
    for name, parameters in PRIVATE.items():
        if parameters is None and not hasattr(trainer, name):
            raise _gone(f"Trainer.{name}")


def _gone(what: str) -> ElasticRunError:
    return ElasticRunError(
        f"transformers {transformers.__version__} has no {what}, without which "
        "training cannot go on where it was. docs/integrations.md says which versions "
        "are tested; install one of them."
    )


def _check(trainer: ElasticMixin) -> None:
    """Refuse what would not be the same after a restart or at other devices.

    Raises:
        ElasticRunError: The Trainer is told to do it.
    """
    args, accelerator = trainer.args, trainer.accelerator
    config = args.accelerator_config
    kind = accelerator.distributed_type.value
    refused = {
        f"training by {kind}": kind not in ("NO", "MULTI_CPU", "MULTI_GPU"),
        "several devices in one process": args.n_gpu > 1,
        "a model on several devices": trainer.is_model_parallel,
        "a sharded model": trainer.is_distributed_loading_by_transformers,
        "parallelism_config": args.parallelism_config is not None,
        "auto_find_batch_size": args.auto_find_batch_size,
        "average_tokens_across_devices=False": not args.average_tokens_across_devices,
        "batch_eval_metrics": args.batch_eval_metrics,
        "enable_jit_checkpoint": args.enable_jit_checkpoint,
        "eval_on_start": args.eval_on_start,
        "eval_use_gather_object": args.eval_use_gather_object,
        "ignore_data_skip": args.ignore_data_skip,
        "split_batches": config.split_batches,
        "dispatch_batches": bool(config.dispatch_batches),
    }
    for what, is_asked_for in refused.items():
        if is_asked_for:
            raise ElasticRunError(
                f"an elastic Trainer does not support {what}: after a restart, or at "
                "another number of devices, it would not do what it did before. "
                "docs/integrations.md says what works, and what to do instead."
            )
    world_size = current_job().world_size
    if args.world_size != world_size:
        raise ElasticRunError(
            f"the Trainer has {args.world_size} processes, but the job {world_size} "
            "replicas, so it would not train all of a global batch. Start the script "
            "with `elasticrun run` or torchrun; on CPUs make "
            "TrainingArguments(use_cpu=True), without which it takes part in no "
            "process group."
        )
