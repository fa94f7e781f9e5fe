"""Virtual replicas: any number of processes trains each global batch in the same way.

A global batch is always cut into as many shares as there are virtual replicas, and a
process trains those that it owns, one after the other. So no draw, no sum and no buffer
may depend on who trains which share:

draws     before each share the generators are seeded by the loop, the batch and the
          share; in an optimizer's step, and behind the last one, alike in all processes
sums      of gradients are added in a tree over the shares (parallel/tree.py)
buffers   each share begins with those from before the batch, and the first one's stay
          (parallel/virtual.py)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, BinaryIO
from weakref import WeakSet

import torch
from torch.optim import Optimizer

from elasticrun.checkpoint.draft import Checkpoint
from elasticrun.checkpoint.seeding import derive_seed
from elasticrun.checkpoint.states.expected import COUNT, TEXT, check_values
from elasticrun.checkpoint.states.generators import (
    program_generators_kept,
    seed_generators,
)
from elasticrun.checkpoint.states.state import BaseState
from elasticrun.errors import CheckpointError, ElasticRunError
from elasticrun.job.loop import LoaderInLoop, MicroBatch
from elasticrun.logger import Logger

logger = Logger(__name__)

_NAME = "virtual_replicas"
_DRAWS = 3  # Of a loop's key: 2 is that of what workers draw.


class VirtualReplicas(BaseState):
    """Seeds the generators for each share, and knows what kernels' sums depend on.

    Args:
        number: Of virtual replicas.
        device: Where this process trains.

    Attributes:
        number: As given.
        models: What looks at the backward passes of each model.
        optimizers: Those of all models.
        num_passes: Those that ended in the last share, in the batch under way.
    """

    def __init__(self, number: int, device: torch.device) -> None:
        super().__init__(_NAME)
        self.number = number
        self.models: list[Any] = []
        self.optimizers: WeakSet[Optimizer] = WeakSet()
        self.num_passes = 0
        self._device = (
            torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        )
        self._num_threads = 0  # Of the first generation; 0 in that one.
        self._has_warned = False
        self._batch: tuple[int, int] | None = None  # The loop's key, and its number.
        self._share = 0
        self._num_common = 0  # How often all have drawn alike in the batch.
        self._stepped: set[int] = set()  # The optimizers' ids that have, in the batch.
        self._is_over = False  # All have.
        self._ends: list[Callable[[], None]] = []
        self._views: list[Callable[[], AbstractContextManager[None]]] = []

    # Around shares and batches.

    def begin_share(self, key: int, micro_batch: MicroBatch) -> None:
        """Seed the generators unless the share has begun with another micro-batch.

        Args:
            key: Of the loop.
        """
        batch, share = (key, micro_batch.number), max(micro_batch.part.share, 0)
        if (batch, share) == (self._batch, self._share):
            return
        if batch != self._batch:
            self._num_common = self.num_passes = 0
            self._stepped.clear()
            self._is_over = False
        self._batch, self._share = batch, share
        self._seed(share)

    def end_batch(self, loader: LoaderInLoop) -> None:
        """Let all processes be alike again, at the end of a global batch."""
        del loader  # Whose batch it is does not matter.
        if self._batch is not None:
            self._end()
            self._seed(self.number)  # Once more: one process alone may have drawn.
            self._batch = None

    def _end(self) -> None:
        for end in self._ends:
            end()
        self._is_over = True

    def at_end_of_batch(
        self, act: Callable[[], None], view: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Call a function when a global batch is complete, and before its boundary.

        Args:
            view: Lets one see before what the function will leave.
        """
        self._ends.append(act)
        self._views.append(view)

    @property
    def num_models(self) -> int:
        """How many models are trained so."""
        return len(self._ends)

    @contextmanager
    def seen_alike(self) -> Iterator[None]:
        """Let what averages a model see the buffers that all processes will have."""
        with ExitStack() as stack:
            for view in self._views:
                stack.enter_context(view())
            yield

    @contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """Let all processes draw the same in an optimizer's step.

        With the step of the last one the global batch is complete, and all are alike
        from there on. Behind another one's the share draws on.
        """
        if self._batch is None or self._is_over:
            yield
        elif self._is_last(optimizer):
            self._seed(self.number)
            yield
            self._end()
        else:
            self._num_common += 1
            with program_generators_kept():
                self._seed(self.number + self._num_common)
                yield

    def leave_step_out(self, optimizer: Optimizer) -> None:
        """Note that an optimizer steps no more in the batch, if it has not stepped."""
        if id(optimizer) not in self._stepped:
            with self.stepping(optimizer):
                pass

    def _is_last(self, optimizer: Optimizer) -> bool:
        """Return whether all have stepped in the batch with this one."""
        self._stepped.add(id(optimizer))
        return self._stepped.issuperset(map(id, self.optimizers))

    def _seed(self, part: int) -> None:
        assert self._batch is not None
        key, number = self._batch
        seed = derive_seed(key, _DRAWS, number, part)
        seed_generators(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)

    # What kernels' sums depend on.

    def save(self, fileobj: BinaryIO) -> None:
        """Write the number, and what kernels add up by."""
        threads = torch.get_num_threads()
        self._num_threads = self._num_threads or threads
        if threads != self._num_threads and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "kernels compute with %d threads, but with %d in the first generation "
                "of the job. Sums depend on that in their last bits. Set "
                "OMP_NUM_THREADS=%d, and leave torch.set_num_threads alone",
                threads,
                self._num_threads,
                self._num_threads,
            )
        values = [self.number, self._num_threads, self._device]
        fileobj.write(json.dumps(values).encode())

    def load(self, fileobj: BinaryIO) -> None:
        """Refuse another number; compute with the threads of the first generation."""
        values = json.loads(fileobj.read())
        check_values(values, (COUNT, COUNT, TEXT), name=self.name)
        number, self._num_threads, device = values
        _check_number(number, self.number)
        if device != self._device:
            logger.warning(
                "the job trained on %s until now, and goes on on %s, whose kernels "
                "round differently: its end will not have the same bits",
                device,
                self._device,
            )
        if self._num_threads != torch.get_num_threads():
            logger.info(
                "kernels compute with %d threads, as in the first generation of the "
                "job, and not with %d; OMP_NUM_THREADS=%d says so from the start",
                self._num_threads,
                torch.get_num_threads(),
                self._num_threads,
            )
            torch.set_num_threads(self._num_threads)

    def remember(self) -> Callable[[], None]:
        return lambda: None  # Nothing of it changes.


def virtual_replicas(
    number: int | None,
    *,
    world_size: int,
    device: torch.device,
    newest: Checkpoint | None,
) -> VirtualReplicas | None:
    """Return what a job with that number of virtual replicas has; None without.

    Raises:
        ElasticRunError: There are more processes.
        CheckpointError: The newest checkpoint is of a job with them, and this one has
            none, or the other way round.
    """
    if number is not None and world_size > number:
        raise ElasticRunError(
            f"{world_size} replicas, but virtual_replicas={number}: each replica "
            "trains a share of each global batch, of which there are no more. "
            f"Start at most {number} replicas, or start anew with more virtual ones."
        )
    if newest is not None and newest.has(_NAME) != (number is not None):
        if number is not None:
            _check_number(None, number)
        with newest.open(_NAME) as file:
            _check_number(json.loads(file.read())[0], number)
    return None if number is None else VirtualReplicas(number, device)


def _check_number(saved: int | None, number: int | None) -> None:
    if saved != number:
        raise CheckpointError(
            f"the checkpoint is of a job with virtual_replicas={saved}, but now it is "
            f"{number}. Global batches would be cut into other shares, which draw and "
            "add up differently, so the job would not end with the bits that it was to "
            "have. Give it the same number (ELASTICRUN_VIRTUAL_REPLICAS), or start "
            "anew with another checkpoint directory."
        )
