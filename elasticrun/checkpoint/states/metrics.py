"""Metrics such as torchmetrics', whose states are merged over the replicas.

A replica's metric has seen only that replica's samples. Each state of a metric says how
to merge it over replicas (`dist_reduce_fx`), and whether `state_dict` has it (by
default not). torchmetrics is not imported: a metric is recognized by its attributes.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from elasticrun.checkpoint.states.expected import COUNT, check_values, misfit
from elasticrun.checkpoint.states.state import CannotRescueError
from elasticrun.checkpoint.states.stateful import StatefulState
from elasticrun.checkpoint.states.values import load_values, save_values
from elasticrun.errors import CheckpointError
from elasticrun.replicas.gathering import gather, num_replicas, own_rank

_COUNT = "_update_count"
# How states of several replicas become one; and whether all replicas then go on from
# that, as they may from a maximum, or rank 0 alone, as from a sum.
_MERGED: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "dim_zero_sum": (lambda stacked: stacked.sum(0), False),
    "dim_zero_mean": (lambda stacked: stacked.mean(0), True),
    "dim_zero_max": (lambda stacked: stacked.amax(0), True),
    "dim_zero_min": (lambda stacked: stacked.amin(0), True),
}


class MetricState(StatefulState):
    """A metric, or a module that may have metrics in it.

    It is saved as a module is, with all states of its metrics, merged.

    Args:
        module: The one whose names its state has, if the target is a wrapper of that.
    """

    def __init__(
        self, name: str, target: nn.Module, module: nn.Module | None = None
    ) -> None:
        super().__init__(name, target)
        self._module = target if module is None else module
        self._merged: dict[str, Any] = {}
        self._is_uneven = False  # Whether some replicas update it, and others do not.
        self._found: list[Any] | None = None  # Its metrics: boundaries do not search.
        for key, metric, state in self._states():
            kind = _kind_of(metric, state)
            if num_replicas() > 1 and kind not in _MERGED and kind != "list":
                raise CheckpointError(
                    f"the state {state!r} of the metric {name + '.' + key!r} "
                    f"({type(metric).__name__}) cannot be merged over {num_replicas()} "
                    f"replicas: its dist_reduce_fx is {kind}, not sum, mean, max, min "
                    "or cat. After a restart all replicas would have rank 0's. Gather "
                    "the samples before you compute it, use a metric that can be "
                    "merged, or do not register it."
                )

    def sync(self) -> None:
        """Bring all replicas' states to rank 0, and merge them. Collective."""
        if not find_metrics(self._module):
            return
        _share_state_in_groups(self._module)
        own = {key: getattr(metric, state) for key, metric, state in self._states()}
        own |= {
            f"{prefix}{_COUNT}": metric._update_count
            for prefix, metric in find_metrics(self._module)
        }
        file = io.BytesIO()
        save_values(own, file)
        every = [
            load_values(io.BytesIO(base64.b64decode(text)))
            for text in gather(base64.b64encode(file.getvalue()).decode())
        ]
        self._merged = {
            key: _merge(_kind_of(metric, state), [values[key] for values in every])
            for key, metric, state in self._states()
        }
        for prefix, _ in find_metrics(self._module):
            count = f"{prefix}{_COUNT}"
            counts = [values[count] for values in every]
            self._merged[count] = max(counts)
            self._is_uneven |= any(counts) and not all(counts)

    def after_save(self) -> None:
        self._merged = {}

    def remember(self) -> Callable[[], None]:
        if self._found is None:
            self._found = [metric for _, metric in find_metrics(self._module)]
        self._check_is_empty()
        put_module_back = super().remember()
        assert put_module_back is not None

        def put_back() -> None:
            self._check_is_empty()
            put_module_back()

        return put_back

    def _check_is_empty(self) -> None:
        if any(metric._update_count for metric in self._found or ()):
            raise CannotRescueError(
                f"each replica has a part of the metric {self.name!r}",
                "add up in an Accumulator instead",
            )

    def own_part(self) -> Any:
        return [] if self._is_uneven else None

    def add_parts(self, parts: Iterable[Any]) -> None:
        del parts

    def current(self) -> Any:
        return {
            "module": self.target.state_dict(),
            "states": {key: getattr(each, name) for key, each, name in self._states()},
            "counts": [each._update_count for _, each in find_metrics(self._module)],
        }

    def put_back(self, values: Any) -> None:
        super().put_back(values["module"])
        for key, metric, name in self._states():
            setattr(metric, name, values["states"][key])
        metrics = find_metrics(self._module)
        for (_, metric), count in zip(metrics, values["counts"], strict=True):
            metric._update_count, metric._computed = count, None

    def values_to_save(self) -> Any:
        values = super().values_to_save()
        values.update(self._merged)
        return values

    def set_values(self, values: Any) -> None:
        """Give each metric its states; sums to rank 0 alone: they count once."""
        if not find_metrics(self._module):
            super().set_values(values)
            return
        values = type(values)(values)
        is_first = own_rank() == 0
        counts = {
            prefix: values.pop(f"{prefix}{_COUNT}", 0)
            for prefix, _ in find_metrics(self._module)
        }
        for key, metric, state in self._states():
            if key not in values:  # It was saved before metrics were known.
                continue
            kind, own = _kind_of(metric, state), getattr(metric, state)
            if kind != "list" and _is_real(values[key]) != _is_real(own):
                what = f"a tensor of {own.dtype}"
                raise misfit(f"{self.name}.{key}", values[key], what)
            if kind == "list":
                every = [each.to(metric.device) for each in values[key]]
                values[key] = (
                    every if is_first else _without_samples(metric, state, every)
                )
            else:
                # A copy, as metrics of one group share what they add to in place.
                value = values[key].to(metric.device, copy=True)
                has_it = is_first or _MERGED[kind][1]
                values[key] = value if has_it else torch.zeros_like(value)
        super().set_values(values)
        for prefix, metric in find_metrics(self._module):
            check_values(counts[prefix], COUNT, name=f"{self.name}.{prefix}{_COUNT}")
            metric._update_count = counts[prefix]
            metric._computed = None

    def _states(self) -> Iterator[tuple[str, Any, str]]:
        """Yield the key of each metric's state, the metric, and the state's name."""
        for prefix, metric in find_metrics(self._module):
            for state in metric._defaults:
                yield f"{prefix}{state}", metric, state


def find_metrics(target: object) -> list[tuple[str, Any]]:
    """Return the metrics in a module, with the prefix of their keys in its state."""
    if not isinstance(target, nn.Module):
        return []
    return [
        (f"{name}." if name else "", module)
        for name, module in target.named_modules()
        if all(
            isinstance(vars(module).get(each), dict)
            for each in ("_defaults", "_reductions", "_persistent")
        )
    ]


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _kind_of(metric: Any, state: str) -> str:
    """Return how a state is merged: "list", or the name of what reduces tensors."""
    if isinstance(metric._defaults[state], list):
        return "list"
    reduction = metric._reductions[state]
    return getattr(reduction, "__name__", str(reduction))


def _without_samples(metric: Any, state: str, values: list[Tensor]) -> list[Tensor]:
    """Return what a replica has of a list that is gathered, if all of it is rank 0's.

    torchmetrics gathers one that is concatenated where it is not empty: on all replicas
    or on none.
    """
    reduction = metric._reductions[state]
    if not values or getattr(reduction, "__name__", "") != "dim_zero_cat":
        return []
    return [values[0].new_empty((0, *values[0].shape[1:]))]


def _merge(kind: str, values: Sequence[Any]) -> Any:
    if kind == "list":
        lists = (each if isinstance(each, list) else [each] for each in values)
        return [tensor for each in lists for tensor in each]
    if len(values) == 1:
        return values[0]
    merge, _ = _MERGED[kind]
    stacked = torch.stack(list(values))
    return merge(stacked).to(stacked.dtype)


def _share_state_in_groups(target: nn.Module) -> None:
    """Bring metrics of a collection up to date: one of each group counts for all."""
    for module in target.modules():
        if isinstance(module, nn.ModuleDict) and hasattr(module, "_groups_checked"):
            collection: Any = module
            list(collection.values(copy_state=False))
