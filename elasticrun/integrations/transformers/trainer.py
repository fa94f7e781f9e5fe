"""`ElasticTrainer`, and the mixin that makes any Trainer elastic."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer

from elasticrun.data.loader import AdaptiveDataLoader
from elasticrun.errors import ElasticRunError, JobStopped
from elasticrun.integrations.transformers.batches import (
    Evaluation,
    LocalBatch,
    LocalBatches,
    SharedBatches,
    gather_rows,
    order,
    with_length,
    without_rows,
)
from elasticrun.integrations.transformers.checks import check, check_version
from elasticrun.integrations.transformers.state import TrainingState
from elasticrun.job.current import current_job
from elasticrun.job.foreign import ForeignLoop
from elasticrun.job.states import register

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
        TypeError: Data has no length, or the mixin comes behind another Trainer.
    """

    def __init__(self, *args: Any, num_devices: int = 1, **kwargs: Any) -> None:
        check_version()
        kinds = type(self).__mro__
        for kind in kinds[: kinds.index(ElasticMixin)]:
            if issubclass(kind, Trainer) and not issubclass(kind, ElasticMixin):
                raise TypeError(
                    f"{kind.__name__} comes before ElasticMixin, which would not see "
                    "the losses that it computes. Write the mixin first: "
                    f"class {kinds[0].__name__}(ElasticMixin, {kind.__name__})."
                )
        if num_devices < 1:
            raise ValueError(
                f"num_devices={num_devices}: the global batch is that many times the "
                "batch of a device, so it is 1 at least."
            )
        self.num_devices = num_devices
        self._training: TrainingState | None = None
        self._evaluation: Evaluation | None = None
        self._is_in_step = False
        # Batches of the step that is trained; those of the epoch up to it.
        self._num_waiting = self._num_taken = 0
        super().__init__(*args, **kwargs)
        check(self)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the Accelerator, whose `gather` takes shares of different sizes here."""
        super().create_accelerator_and_postprocess()
        accelerator: Any = self.accelerator
        if accelerator.num_processes > 1:
            accelerator.gather = partial(gather_rows, accelerator.gather)

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
        if self._training is not None:
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
        is_iterable = isinstance(dataset, IterableDataset)
        dataset = with_length(dataset, description)
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
            shares = SharedBatches(len(dataset), size, job.rank, job.world_size)
            return DataLoader(dataset, batch_sampler=shares, **options)
        sampler = None if is_iterable else sampler_fn(dataset)
        return AdaptiveDataLoader(
            dataset,
            size,
            **order(sampler, size * args.gradient_accumulation_steps),
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
        self._training = training = TrainingState(self)
        self._loop = ForeignLoop("Trainer.train")
        training.restore_state()
        has_ended = training.has_ended or self.state.global_step >= max_steps
        num_epochs = self.state.num_train_epochs if has_ended else training.num_epochs
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
        training, loop = self._training, self._loop
        assert training is not None
        training.restore_sums(start_time)
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
                train_dataloader=LocalBatches(train_dataloader, epoch_of_job, step),
                steps_in_epoch=steps_in_epoch,
                start_time=training.began,
                **others,
            )
        except JobStopped:
            raise
        except BaseException:
            loop.leave()
            raise
        training.num_epochs += 1
        is_cut = self._num_taken < steps_in_epoch
        training.has_ended = self.control.should_training_stop and (
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
        training = self._training
        assert training is not None
        training.restore_sums(start_time)
        self._loop.finish()
        self._tr_loss.fill_(training.mean_loss())
        return super()._finalize_training(trial, num_train_samples, training.began)

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
        labels, evaluation = inputs.get("labels"), self._evaluation
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
        if evaluation is not None and counts_items:
            evaluation.share = 1 / evaluation.num_replicas
        elif evaluation is not None and is_scaled and labels is not None:
            # A descendant has not said how many tokens there are, as TRL's evaluation.
            evaluation.count_items((labels[..., 1:] != -100).sum())
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
            if isinstance(batch, LocalBatch):
                counted += batch.without_padding()
            elif self._evaluation is not None and not self._evaluation.num_own:
                counted.append(without_rows(batch))
            else:
                counted.append(batch)
        return super()._get_num_items_in_batch(counted, device)

    def floating_point_ops(self, inputs: Any) -> Any:
        """Return the operations of a batch."""
        if not isinstance(inputs, LocalBatch):
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
        if not isinstance(batches, SharedBatches):
            raise TypeError(
                f"an evaluation got a {type(dataloader).__name__} of its own, whose "
                "shares are not known here: samples would be counted twice. Do not "
                "override get_eval_dataloader or get_test_dataloader, or let them call "
                "the Trainer's."
            )
        self._evaluation = Evaluation(batches, self.accelerator)
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
