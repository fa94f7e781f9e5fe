"""Accelerate: saves and weighs what an Accelerator prepares; the loop is your own."""

from __future__ import annotations

from typing import Any

import accelerate
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.optim import Optimizer

from elasticrun.data.combined import current_dataloader
from elasticrun.errors import ElasticRunError
from elasticrun.integrations.checks import check_internals, check_num_processes
from elasticrun.job.current import current_job
from elasticrun.job.states import register
from elasticrun.parallel.module import AdaptiveDataParallel

_SUPPORTED = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
)
# What is needed here of an Accelerator, and is not public.
INTERNALS = """
    ddp_handler gradient_state._add_dataloader scaler
"""


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    scheduler: Any = None,
    *,
    name: str = "model",
) -> tuple[AdaptiveDataParallel, Any, Any]:
    """Do what `accelerator.prepare` does, and keep all three in every checkpoint.

        accelerator = Accelerator()
        train = AdaptiveDataLoader(train_set, batch_size=64, shuffle=True)
        model, optimizer, scheduler = prepare(accelerator, net, optimizer, scheduler)
        for epoch in remaining_epochs_until(10):
            for x, y in train:
                with accelerator.accumulate(model):
                    accelerator.backward(criterion(model(x), y))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()

    The loader is elasticrun's, and is not prepared: give it
    `device=accelerator.device`. `accelerator.backward` is weighed by each micro-batch's
    share in the global batch; other means than over samples go through `model.weigh`.
    `accelerator.accumulate` counts global batches, and ends with the loop; a job saves
    and stops where no gradients wait. The scheduler steps once for each step of the
    optimizer, and not once for each replica. A scaler is kept as well.

    Collective: call it on every replica, in the same order.
    Replay: prepares again in each generation; loads the newest checkpoint.

    Args:
        accelerator: Made before or after the job has started.
        model: On any device; options of DDP come from the accelerator's handlers.
        optimizer: Over the model's parameters; not yet prepared.
        scheduler: Of the optimizer; its length is counted in the optimizer's steps.
        name: What the model is called in checkpoints, if there are several.

    Returns:
        An `AdaptiveDataParallel`, and Accelerate's optimizer and scheduler (None for
        what was not given).

    Raises:
        ElasticRunError: The accelerator shards, or is that of another process group.
        TypeError: The model is wrapped already, or an argument is something else.
    """
    _check_kinds(model, optimizer, scheduler)
    _check(accelerator)
    accumulation = current_job().get_or_make(_Accumulation, accelerator)
    _check_is_only_one(accelerator, accumulation)
    # As for an evaluation, that is without Accelerate's own DDP.
    module = accelerator.prepare_model(model, evaluation_mode=True)
    handler = accelerator.ddp_handler
    parallel = AdaptiveDataParallel(
        module,
        optimizer,
        scheduler,
        name=name,
        **({} if handler is None else handler.to_kwargs()),
    )
    if handler is not None:
        handler.register_comm_hook(parallel)
    if optimizer is not None:  # What was loaded is on its device already.
        optimizer = accelerator.prepare_optimizer(optimizer, device_placement=False)
    if scheduler is not None:
        scheduler = accelerator.prepare_scheduler(scheduler)
        scheduler.split_batches = True  # One step of it for one of the optimizer.
    return parallel, optimizer, scheduler


class _Accumulation:
    """Stands for Accelerate's loader: says where gradients are not to wait any longer.

    Attributes:
        remainder: How many samples `gather_for_metrics` is to leave of a last batch:
            all, since none is there twice.
    """

    remainder = -1

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        # Accelerate asks the last one that was added, and holds it weakly.
        accelerator.gradient_state._add_dataloader(self)
        if accelerator.scaler is not None:
            register(scaler=accelerator.scaler)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the running global batch is the last one of its loop."""
        loader = current_dataloader()
        if loader is None:
            return False
        loop = loader.running_loop
        if self.accelerator.gradient_accumulation_steps > 1 and not (
            loader.is_first and loader.is_step
        ):
            raise ElasticRunError(
                f"accelerator.accumulate counts the micro-batches of `{loader.name}` "
                f"({loader.where}), into which max_local_batch_size cuts a global "
                "batch, and their number depends on the number of replicas. Leave out "
                "gradient_accumulation_steps, and give the loader a batch_size that "
                "is larger by that factor: max_local_batch_size accumulates it."
            )
        return loop.num_batches == loader.batch_index + 1


def _check_kinds(model: Any, optimizer: Any, scheduler: Any) -> None:
    """Refuse loaders, and another order: Accelerate itself would take any."""
    fits = {
        "model": (model, isinstance(model, nn.Module)),
        "optimizer": (optimizer, optimizer is None or isinstance(optimizer, Optimizer)),
        "scheduler": (scheduler, scheduler is None or hasattr(scheduler, "step")),
    }
    for name, (given, is_one) in fits.items():
        if not is_one:
            raise TypeError(
                f"prepare got a {type(given).__name__} as its {name}. Call it as "
                "prepare(accelerator, model, optimizer, scheduler). Loaders are not "
                "prepared: an AdaptiveDataLoader delivers this replica's part itself."
            )


def _check(accelerator: Accelerator) -> None:
    """Refuse accelerators that train otherwise, and unknown ones."""
    check_internals(
        f"the Accelerator of Accelerate {accelerate.__version__}",
        accelerator,
        INTERNALS,
        tested="Accelerate 1.15",
    )
    kind = accelerator.distributed_type
    if kind not in _SUPPORTED:
        raise ElasticRunError(
            f"the Accelerator trains by {kind.value}, whose model and optimizer cannot "
            "be kept here. Train with plain data parallelism, or shard the model with "
            "fully_shard, register it, and step as docs/howto/own-ddp.md says."
        )
    check_num_processes(
        "the Accelerator",
        accelerator.num_processes,
        "Start the script with `elasticrun run` or torchrun; on CPUs, make it as "
        "Accelerator(cpu=True), without which it takes part in no process group.",
    )


def _check_is_only_one(accelerator: Accelerator, known: _Accumulation) -> None:
    """Refuse a second Accelerator in the job."""
    if known.accelerator is not accelerator:
        raise ElasticRunError(
            "the job has another Accelerator already. They share their count of "
            "accumulated batches, and each has a scaler, of which one is kept. Make "
            "one, and prepare all models with it."
        )
