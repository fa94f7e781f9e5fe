"""Measures the noise of gradients, in some of the steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn.utils import get_total_norm

from elasticrun.adaptive.noise import is_measured
from elasticrun.checkpoint.states.stateful import local_shard
from elasticrun.errors import ElasticRunError, warn_at_program
from elasticrun.job.loop import Loop, MicroBatch
from elasticrun.job.noise_record import NoiseRecord, StepPart

Scalers = Callable[[], Iterable[GradScaler]]

_LOW = (torch.float16, torch.bfloat16)

_BATCH_NORM = (
    "measure_noise=True measures nothing here: it compares the gradients of parts of a "
    "global batch. Here a batch is one part (one replica, or sharded parameters), and "
    "a model with BatchNorm does not allow to cut it in two. Give the "
    "AdaptiveDataLoader a max_local_batch_size."
)


class NoiseMeter:
    """Measures steps, each from its first backward pass to its first optimizer.

    A chunk is what one replica has in one micro-batch, without padding. Chunks are seen
    as they add to the gradient that is stepped with, so whatever weighs them counts.

    Args:
        parameters: Those of the model.
        record: Where this replica's part of each step goes.
        num_summed: How many replicas' gradients are averaged after they were seen.
        scalers: Returns those that the job has registered.
        warns_of_one_chunk: Whether a step in one chunk is to be warned of, once.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        record: NoiseRecord,
        *,
        num_summed: int,
        scalers: Scalers,
        warns_of_one_chunk: bool,
    ) -> None:
        self._parameters = parameters
        self._record = record
        self._num_summed = num_summed
        self._scalers = scalers
        self._warns_of_one_chunk = warns_of_one_chunk
        self._keeps = False  # Whether a chunk's gradients come in several pieces.
        self._step: _Step | None = None

    @staticmethod
    def measures(micro_batch: MicroBatch) -> bool:
        """Return whether a micro-batch is one of a step that is to be measured.

        In loops that count steps, nobody knows how many samples these have.
        """
        return is_measured(micro_batch.number) and len(micro_batch.indices) > 0

    def begin_pass(self, loop: Loop) -> None:
        """Begin a backward pass in a micro-batch that is measured."""
        micro_batch = loop.current
        step = self._step
        if step is None or not step.is_in(loop):
            step = self._step = _Step(loop, _gradients(self._parameters))
        if step.micro_batch is not micro_batch:
            step.end_chunk()
            step.micro_batch = micro_batch

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        """Take a gradient, as it adds to what is averaged over the replicas."""
        step = self._step
        if step is None:
            return
        if not self._keeps:
            if (
                parameter in step.sums
            ):  # Norms do not add up: sums are kept from now on.
                self._keeps = step.is_spoilt = True
            step.sums[parameter] = None
            step.norms.append(_norm(gradient))
            return
        before = step.sums.get(parameter)
        gradient = gradient.detach()
        step.sums[parameter] = gradient.clone() if before is None else before + gradient

    def correct(self, factor: Tensor | float) -> None:
        """Note that the chunks before this one were multiplied with a factor."""
        if self._step is not None:
            self._step.squares = [each * factor**2 for each in self._step.squares]

    def spoil(self) -> None:
        """Note that the step's chunks are not what it steps with."""
        if self._step is not None:
            self._step.is_spoilt = True

    def end_pass(self) -> None:
        """Take the gradients of the whole global batch: a backward pass has ended."""
        if self._step is not None:
            self._step.take_total(_gradients(self._parameters))

    def end_step(self, loop: Loop | None) -> None:
        """Keep what the step tells: an optimizer has stepped with its gradients."""
        step = self._step
        if step is None or loop is None or not step.is_in(loop) or step.is_over:
            return
        step.is_over = True
        step.end_chunk()
        part = loop.current.part
        is_one_chunk = part.micro == 0 and self._num_summed == 1
        if is_one_chunk and part.global_batch_size > 1:
            self._warn_of_one_chunk()
        unit = torch.nan if step.is_spoilt else self._unit()
        squares = [square / self._num_summed**2 for square in step.squares]
        self._record.add(
            StepPart(
                torch.stack([*squares, step.total_square.to(squares[0])]) / unit**2,
                tuple(step.sizes),
                part.global_batch_size,
            )
        )

    def _unit(self) -> float:
        """Return what a GradScaler has multiplied gradients with."""
        scales = {scaler.get_scale() for scaler in self._scalers()}
        if len(scales) > 1:
            raise ElasticRunError(
                "measure_noise=True with several GradScalers, which scale gradients "
                f"differently ({', '.join(map(str, sorted(scales)))}): it is unknown "
                "which one scaled those of this model. Use one for all losses."
            )
        return scales.pop() if scales else 1.0

    def _warn_of_one_chunk(self) -> None:
        if self._warns_of_one_chunk:
            self._warns_of_one_chunk = False
            warn_at_program(_BATCH_NORM)


class _Step:
    """A step while it is measured.

    Attributes:
        micro_batch: In which the last backward pass was.
        norms: Of the current chunk's gradients.
        sums: These gradients by their parameters; None where only their norm is kept.
        squares: Of the chunks before, each a mean over the global batch.
        sizes: How many samples of this replica's these have.
        total_square: Of the gradients of all replicas together.
        is_spoilt: Whether it tells nothing.
        is_over: Whether an optimizer has stepped, and what the step tells is kept.
    """

    def __init__(self, loop: Loop, gradients: list[Tensor]) -> None:
        self._loop = loop
        self._number = loop.current.number
        # Of earlier batches, to which this one's are added: it is not measured then.
        self._earlier = _square(gradients)
        self.micro_batch: MicroBatch = loop.current
        self.norms: list[Tensor] = []
        self.sums: dict[Tensor, Tensor | None] = {}
        self.squares: list[Tensor] = []
        self.sizes: list[int] = []
        self.total_square = torch.full((), torch.nan)
        self.is_spoilt = self.is_over = False

    def is_in(self, loop: Loop) -> bool:
        """Return whether it is that of the running global batch."""
        return self._loop is loop and self._number == loop.current.number

    def end_chunk(self) -> None:
        """Add the square of the chunk's gradient, which is complete."""
        self.norms += [_norm(each) for each in self.sums.values() if each is not None]
        self.squares.append(_square(self.norms))
        self.sizes.append(self.micro_batch.part.num_valid)
        self.norms, self.sums = [], {}

    def take_total(self, gradients: list[Tensor]) -> None:
        """Take the gradients of the whole global batch."""
        total = _square(gradients)
        self.total_square = torch.where(self._earlier == 0, total, torch.nan)


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [_values(each.grad) for each in parameters if each.grad is not None]


def _values(gradient: Tensor) -> Tensor:
    """Return what of a gradient may be other than 0, without its graph.

    Of a sharded one it is this replica's shard; of a shard that several replicas have,
    what makes their squares add up to the whole.
    """
    if gradient.requires_grad:
        gradient = gradient.detach()
    shard = local_shard(gradient)
    if shard is not gradient:
        sharded: Any = gradient
        copies = [
            sharded.device_mesh.size(dim)
            for dim, placement in enumerate(sharded.placements)
            if placement.is_replicate()
        ]
        return shard / math.sqrt(math.prod(copies)) if copies else shard
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _norm(gradient: Tensor) -> Tensor:
    """Return the norm; that of a low precision would be too rough, or infinite."""
    dtype = torch.float32 if gradient.dtype in _LOW else None
    norm: Tensor = torch.linalg.vector_norm(_values(gradient), dtype=dtype)
    return norm


def _square(gradients: list[Tensor]) -> Tensor:
    """Return the squared norm of gradients together; or of norms, of all these."""
    if any(gradient.dtype in _LOW for gradient in gradients):
        gradients = [_norm(gradient) for gradient in gradients]
    return get_total_norm(gradients).double().square()
