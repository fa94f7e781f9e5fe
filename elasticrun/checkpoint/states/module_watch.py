"""Remembers a module at each boundary, without copying its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from elasticrun.checkpoint.states.state import CannotRescueError

_LOOKED_AT = 16  # Elements of each tensor.
_SMALL = 1 << 14  # Bytes of a buffer that is copied at each boundary, changed or not.
_SAVING = ("state_dict", "_save_to_state_dict", "get_extra_state")
# Whose ways of saving these are, if they are no module's own.
_KNOWN = ("torch.nn.", "torchmetrics.", "elasticrun.")
_CHANGE_LATER = "change them behind optimizer.step(), not in the forward pass"
_VERSION = attrgetter("_version")
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class ModuleWatch:
    """A module's parameters and buffers as they were at a boundary.

    Parameters change when an optimizer steps, so of these only what a look at them sees
    is remembered. Buffers, such as the statistics of a BatchNorm, change in each
    forward pass: they are copied, large ones if they have changed since the last copy.

    Args:
        has_common_statistics: Whether the averages in BatchNorms are the same on all
            replicas, or this is the replica whose averages are saved.

    Attributes:
        looks_at_gradients: Whether to find out if gradients wait for a step.
    """

    looks_at_gradients = True

    def __init__(
        self, name: str, module: nn.Module, has_common_statistics: Callable[[], bool]
    ) -> None:
        self._name = name
        self._module = module
        self._has_common_statistics = has_common_statistics
        self._statistics: list[Tensor] = []
        self._statistics_at: list[int] = []
        self._parameters: _Watched | None = None
        self._trained: list[Tensor] = []
        self._buffers: list[Tensor] = []
        self._shapes: list[torch.Size] = []
        self._small = self._large = _Watched([], first_of)
        self._copies: list[Tensor] = []
        self._copied: Any = None  # What a look at large buffers has seen then.
        self._num_copied = 0
        self._seen: Any = None  # Of the parameters, and of a gradient.
        self._with_gradient: Tensor | None = None
        self._gradient: Any = None
        self._wait = False

    def remember(self) -> Callable[[], None]:
        """Return what puts the module back."""
        if self._parameters is None:
            self._check()
            self._begin()
        assert self._parameters is not None
        looked, sample = self._parameters.look(), self._parameters.sample_of_gpu()
        if self._trained and self.looks_at_gradients:
            self._note_gradients(looked)
            if self._wait:
                return self._refuse
        if self._copies and (seen := self._large.look()) != self._copied:
            try:
                with torch.no_grad():
                    torch._foreach_copy_(self._copies, self._large.tensors)
            except RuntimeError as error:
                raise CannotRescueError(
                    f"buffers of {self._name!r} change their shapes"
                ) from error
            self._copied = seen
            self._num_copied += 1
        return partial(
            self._put_back,
            looked,
            sample,
            self._small.read(),
            self._copied,
            self._num_copied,
            has_common=self._has_common_statistics(),
        )

    def _begin(self) -> None:
        self._parameters = _Watched(list(self._module.parameters()), first_of)
        parameters = self._parameters.tensors
        self._trained = [each for each in parameters if each.requires_grad]
        self._buffers = list(self._module.buffers())
        self._shapes = [each.shape for each in self._buffers]
        small = [each for each in self._buffers if _is_small(each)]
        large = [each for each in self._buffers if not _is_small(each)]
        self._small = _Watched(small, _all_of)
        self._large = _Watched(large, first_of)
        self._copies = [each.detach().clone() for each in self._large.tensors]
        self._copied = self._large.look()
        self._statistics = _statistics_of(self._module)
        self._statistics_at = versions_of(self._statistics)

    def _check(self) -> None:
        for part in self._module.modules():
            for name in _SAVING:
                if not getattr(type(part), name).__module__.startswith(_KNOWN):
                    raise CannotRescueError(
                        f"{type(part).__name__} in {self._name!r} has a way of its own "
                        f"to save ({name})",
                        "keep what it saves in buffers",
                    )
        devices = {torch.device("cpu")}
        for each in [*self._module.parameters(), *self._module.buffers()]:
            is_known = type(each) in (Tensor, nn.Parameter) and not each.is_inference()
            # Else its bytes are not its values, or nowhere.
            is_known &= each.layout == torch.strided and not each.is_nested
            is_known = is_known and not (each.is_conj() or each.is_neg())
            devices.add(each.device)
            if not is_known or each.device.type not in ("cpu", "cuda"):
                raise CannotRescueError(
                    f"nothing tells whether a {type(each).__name__} of {self._name!r} "
                    "changes",
                    "keep torch's own dense tensors in it, and no inference mode",
                )
        if len(devices) > 2:
            raise CannotRescueError(f"{self._name!r} is on more than one GPU")

    def _note_gradients(self, parameters: Any) -> None:
        """Find out if gradients wait: if they have changed and the parameters not."""
        with_one = self._with_gradient
        if with_one is None or with_one.grad is None:
            trained = (each for each in self._trained if each.grad is not None)
            self._with_gradient = with_one = next(trained, None)
        first = None if with_one is None else with_one.grad
        gradient = None if first is None else (id(first), first._version)
        has_stepped = parameters != (self._seen or parameters)
        self._wait = not (first is None or has_stepped) and (
            self._wait or gradient != self._gradient
        )
        self._seen, self._gradient = parameters, gradient

    def _refuse(self) -> None:
        # They are in no checkpoint. What was kept at the last step still serves.
        raise CannotRescueError(f"gradients of {self._name!r} wait for a step")

    def _put_back(
        self,
        parameters: Any,
        sample: Tensor | None,
        small: bytes,
        large: Any,
        number: int,
        *,
        has_common: bool,
    ) -> None:
        assert self._parameters is not None
        is_same = (
            _are_these(self._parameters.tensors, self._module.parameters())
            and self._parameters.look() == parameters
            and _are_equal(self._parameters.sample_of_gpu(), sample)
        )
        if not is_same:
            raise CannotRescueError(
                f"parameters of {self._name!r} have changed since", _CHANGE_LATER
            )
        is_same = _are_these(self._buffers, self._module.buffers())
        is_same &= self._shapes == [each.shape for each in self._buffers]
        if not is_same or self._num_copied != number:
            raise CannotRescueError(
                f"buffers of {self._name!r} have changed since", _CHANGE_LATER
            )
        have_changed = versions_of(self._statistics) != self._statistics_at
        if have_changed and not has_common:
            raise CannotRescueError(
                f"BatchNorms in {self._name!r} have other averages on rank 0, whose "
                "are saved",
                "AdaptiveDataParallel makes them the same in forward passes with "
                "gradients; run others in eval()",
            )
        if self._small.read() != small:
            self._small.write(small)
        if not self._copies:
            return
        if self._large.look() != large:
            with torch.no_grad():
                torch._foreach_copy_(self._large.tensors, self._copies)
        elif not all(map(torch.equal, self._large.tensors, self._copies)):
            raise CannotRescueError(
                f"buffers of {self._name!r} have changed through `tensor.data`",
                "change them in torch.no_grad()",
            )


def _statistics_of(module: nn.Module) -> list[Tensor]:
    """Return the averages that a module's own forward passes change."""
    if isinstance(module, AveragedModel):
        return []  # They are copied from another one.
    return [
        buffer
        for part in module.modules()
        if isinstance(part, BATCH_NORMS) and part.training
        for buffer in part.buffers()
    ]


class _Watched:
    """Some tensors, and what they have in memory.

    A change through `tensor.data`, as of moving averages, is none that torch counts. So
    a look sees also where they are, and elements there: without torch, which would take
    microseconds for each of them.

    Args:
        part: Returns the bytes of a tensor that count.
    """

    def __init__(self, tensors: list[Tensor], part: Callable[[Tensor], Tensor]) -> None:
        self.tensors = tensors
        self._part = part
        self._places: list[int] = []
        self._views: list[memoryview] = []  # Of those on the CPU.
        self._on_gpu: list[Tensor] = []

    def look(self) -> tuple[list[int], list[int], bytes]:
        """Return torch's counts of changes in place, places, and their bytes."""
        data = self.read()
        return versions_of(self.tensors), self._places, data

    def read(self) -> bytes:
        """Return the bytes of those on the CPU."""
        places = [*map(Tensor.data_ptr, self.tensors)]
        if places != self._places:  # Where they were may be no memory any more.
            self._places = places
            parts = [self._part(each) for each in self.tensors]
            self._views = [p.numpy().data for p in parts if not p.is_cuda]
            self._on_gpu = [each for each in parts if each.is_cuda]
        return b"".join(self._views)

    def write(self, data: bytes) -> None:
        """Put back what `read` has returned, after another `read`."""
        end = 0
        for view in self._views:
            begin, end = end, end + len(view)
            view[:] = data[begin:end]

    def sample_of_gpu(self) -> Tensor | None:
        """Return a copy of the bytes on a GPU, for which nobody waits here.

        After a look.
        """
        return torch.cat(self._on_gpu) if self._on_gpu else None


def _are_these(tensors: list[Tensor], now: Iterable[Tensor]) -> bool:
    return list(map(id, tensors)) == list(map(id, now))


def versions_of(tensors: list[Tensor]) -> list[int]:
    """Return how often torch has counted a change in place of each."""
    return [*map(_VERSION, tensors)]


def _is_small(tensor: Tensor) -> bool:
    is_plain = tensor.is_cpu and tensor.layout == torch.strided
    return is_plain and tensor.is_contiguous() and tensor.nbytes <= _SMALL


def _all_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a small tensor."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def first_of(tensor: Tensor) -> Tensor:
    """Return a tensor's first elements in memory, as bytes; of a sparse one, none."""
    if tensor.layout != torch.strided:
        return torch.empty(0, dtype=torch.uint8)
    there = tensor.untyped_storage().nbytes() // tensor.element_size()
    number = max(0, min(_LOOKED_AT, tensor.numel(), there - tensor.storage_offset()))
    return tensor.detach().as_strided((number,), (1,)).view(torch.uint8)


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
