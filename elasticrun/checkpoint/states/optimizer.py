"""The state of an optimizer, saved by the names of its parameters.

`Optimizer.state_dict` numbers parameters in the order in which they were given. If that
order changes (parameters from a set, for example), each parameter would get the state
of another one, and torch would not notice.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elasticrun.checkpoint.states.loading import SHAPED_LIKE_PARAMETER
from elasticrun.checkpoint.states.parameter_names import (
    ADD_GROUPS_BEFORE,
    BUILD_AS_SAVED,
    by_names,
    by_numbers,
    has_names,
    in_groups,
    name_parameters,
    options_of,
    parameters_of,
)
from elasticrun.checkpoint.states.state import BaseState, CannotRescueError
from elasticrun.checkpoint.states.stateful import StatefulState, has_shards
from elasticrun.errors import CheckpointError

_MOST_SHOWN = 5


class OptimizerState(StatefulState):
    """An optimizer whose parameters are whole on each replica.

    It is saved under the names that they have in registered modules. Where one has
    none, the optimizer's own `param_names` are compared, if it has them.
    """

    def __init__(self, name: str, target: Optimizer) -> None:
        super().__init__(name, target)
        self._optimizer = target
        self._registered: Iterable[BaseState] = ()
        self._named: tuple[list[Tensor], list[str] | None] = [], None
        # The names in a state that was loaded by numbers, to be compared when a module
        # has been registered from which the parameters have theirs.
        self._taken_by_order: list[str] | None = None

    def note_states(self, states: Iterable[BaseState]) -> None:
        self._registered = states  # Also those that will be registered after this one.

    def remember(self) -> Callable[[], None]:
        """Remember the options of its groups: all else changes in its step alone."""
        if self._consolidate is not None:
            raise CannotRescueError(f"each replica has a part of {self.name!r}")
        before = [options_of(group) for group in self._optimizer.param_groups]
        counts = self._counts()

        def put_back() -> None:
            if self._counts() != counts:
                raise CannotRescueError(
                    f"{self.name!r} has other groups or states than at the boundary",
                    "change them right before optimizer.step()",
                )
            for group, options in zip(
                self._optimizer.param_groups, before, strict=True
            ):
                for key in group.keys() - options.keys() - {"params"}:
                    del group[key]  # A scheduler's, which was made since.
                group.update(options)

        return put_back

    def _counts(self) -> tuple[int, int, int]:
        optimizer = self._optimizer
        groups = optimizer.param_groups
        return len(groups), _count(groups), len(optimizer.state)

    def values_to_save(self) -> Any:
        """Return the optimizer's state, by names if each parameter has one."""
        values, names = self._optimizer.state_dict(), self._find_names()
        if names is None or not _is_usual(values, len(names)):
            return values
        self._check_order(names)
        return by_names(values, names)

    def set_values(self, values: Any) -> None:
        if _is_usual(values):
            check_kind(self.name, self._optimizer, values)
            values = self._in_own_order(values)
            self._check_groups(values)
            check_entries(self.name, self._optimizer, values, self._find_names())
        super().set_values(values)

    def _in_own_order(self, values: Mapping[str, Any]) -> Any:
        own_names = self._find_names()
        if has_names(values) and own_names is not None:
            return by_numbers(values, in_groups(own_names, self._optimizer))
        if has_names(values):  # Their module is registered later, or not at all.
            groups = values["param_groups"]
            self._taken_by_order = [name for each in groups for name in each["params"]]
            return by_numbers(values)
        saved, own = (
            [name for group in groups for name in group.get("param_names", ())]
            for groups in (values["param_groups"], self._optimizer.param_groups)
        )
        if not (saved and own and len(saved) == _count(values["param_groups"])):
            return values
        return by_numbers(by_names(values, saved), in_groups(own, self._optimizer))

    def _check_order(self, names: Sequence[str]) -> None:
        """Refuse to go on if a state that was taken by numbers was in another order."""
        taken, self._taken_by_order = self._taken_by_order, None
        if taken is not None and set(taken) == set(names) and taken != names:
            raise CheckpointError(
                f"{self.name!r} was loaded before its parameters had names, and they "
                f"are in another order than in the checkpoint: {taken[:5]} there, "
                f"{names[:5]} here, so each has the state of another one. Register the "
                f"module before, or together: register(model=net, {self.name}=...)."
            )

    def _check_groups(self, values: Mapping[str, Any]) -> None:
        saved, own = len(values["param_groups"]), len(self._optimizer.param_groups)
        if saved != own:
            what_to_do = ADD_GROUPS_BEFORE if saved > own else BUILD_AS_SAVED
            raise CheckpointError(
                f"the saved optimizer {self.name!r} has {saved} parameter groups, but "
                f"this one has {own}. {what_to_do}"
            )

    def _find_names(self) -> list[str] | None:
        """Return the parameters' names in registered modules, None if one has none."""
        parameters = parameters_of(self._optimizer)
        known, names = self._named
        is_same = len(known) == len(parameters) and all(
            old is new for old, new in zip(known, parameters, strict=True)
        )
        if not is_same or names is None:
            names_of = name_parameters(modules_among(self._registered))
            found = [names_of.get(parameter) for parameter in parameters]
            names = [name for name in found if name is not None]
            self._named = parameters, names if len(names) == len(found) else None
        return self._named[1]


def modules_among(states: Iterable[BaseState]) -> list[tuple[str, nn.Module]]:
    """Return the modules that are registered, and under which names."""
    return [
        (state.name, state.target)
        for state in states
        if isinstance(state.target, nn.Module)
    ]


def check_kind(name: str, optimizer: Optimizer, values: Mapping[str, Any]) -> None:
    """Refuse the state of another kind of optimizer, as its groups' options tell."""
    groups = zip(values["param_groups"], optimizer.param_groups, strict=False)
    for before, now in groups:
        foreign = (before.keys() - now.keys()) & _options_of_torchs()
        lacking = optimizer.defaults.keys() - before.keys()
        if foreign and lacking:
            raise CheckpointError(
                f"the saved state {name!r} is not that of a "
                f"{type(optimizer).__name__}: its groups have "
                f"{', '.join(sorted(foreign))}, and lack "
                f"{', '.join(sorted(lacking))}. {BUILD_AS_SAVED}"
            )


def check_entries(
    name: str,
    optimizer: Optimizer,
    values: Mapping[str, Any],
    names: Sequence[str] | None,
) -> None:
    """Refuse entries with which one of torch's optimizers could not step.

    Args:
        values: By the numbers of parameters, as `Optimizer.state_dict` has them.
    """
    step = type(optimizer).step
    if not f"{step.__module__}.".startswith("torch.optim."):
        return
    misfits = []
    groups = zip(values["param_groups"], optimizer.param_groups, strict=False)
    for place, (saved, own) in enumerate(groups):
        for key in saved.keys() & own.keys() - {"params"}:
            if _is_number(own[key]) and not _is_number(saved[key]):
                what = _describe(saved[key])
                misfits.append(f"{key} of group {place} is {what}, not a number")
    numbers = [n for group in values["param_groups"] for n in group["params"]]
    parameters = parameters_of(optimizer)
    for place, (number, parameter) in enumerate(zip(numbers, parameters, strict=False)):
        state = values["state"].get(number)
        called = f"number {place}" if names is None else names[place]
        if number in values["state"] and not isinstance(state, Mapping):
            misfits.append(f"what it has of {called} is {_describe(state)}")
            continue
        for key, value in (state or {}).items():
            wanted = _misfit(key, value, parameter)
            if wanted:
                misfits.append(f"{key} of {called} is {_describe(value)}, {wanted}")
    misfits = misfits or _try_steps(optimizer, values)
    if misfits:
        raise CheckpointError(
            f"the saved state {name!r} does not fit the {type(optimizer).__name__} of "
            f"this program: {'; '.join(misfits[:_MOST_SHOWN])}. It has other "
            "parameters, or in another order, or the state was changed. "
            f"{BUILD_AS_SAVED}"
        )


def _misfit(key: str, value: Any, parameter: Tensor) -> str:
    """Return what is wrong with an entry of a parameter's state, or nothing."""
    if key not in SHAPED_LIKE_PARAMETER:  # A count, a factor; LBFGS has lists.
        is_plain = _is_number(value) or isinstance(value, list | tuple | NoneType)
        if key == "step" and isinstance(value, Tensor) and value.numel() != 1:
            return "not a number"
        return "" if is_plain else "not a number or a tensor"
    if not isinstance(value, Tensor):
        # SGD's, before its first step.
        return "" if value is None and key == "momentum_buffer" else "not a tensor"
    if value.shape != parameter.shape:
        return f"but the parameter is {list(parameter.shape)}"
    has_kind = value.is_floating_point() or value.is_complex()
    return "" if has_kind else f"but of {value.dtype}"


def _try_steps(optimizer: Optimizer, values: Mapping[str, Any]) -> list[str]:
    """Return how a step fails with loaded options, and with counts as loaded.

    A copy of the optimizer takes it, which has a parameter of one element for each kind
    of state that is there.
    """
    if has_shards(optimizer):
        return []
    tried = set()
    groups = zip(values["param_groups"], optimizer.param_groups, strict=False)
    for place, (saved, own) in enumerate(groups):
        for number, parameter in zip(saved["params"], own["params"], strict=False):
            state = values["state"].get(number) or {}
            kind = (
                *(place, parameter.dim(), parameter.dtype, parameter.device),
                *((key, _kind_of(value)) for key, value in state.items()),
            )
            if kind in tried:
                continue
            tried.add(kind)
            small = torch.ones(
                [1] * parameter.dim(), dtype=parameter.dtype, device=parameter.device
            )
            small.grad = torch.zeros_like(small)
            state = {key: _small(value) for key, value in state.items()}
            error = _try_step(optimizer, small, saved, state)
            # Some could not step with their own either: they need a closure, say.
            if error is not None and not _try_step(optimizer, small, own, {}):
                return [f"a step with group {place} fails ({error!r})"]
    return []


def _kind_of(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return repr(value)
    return (value.dim(), value.dtype) if value.dim() else value.item()


def _small(value: Any) -> Any:
    """Return an entry of a parameter's state for a parameter of one element."""
    if not isinstance(value, Tensor):
        return value
    return value.new_zeros([1] * value.dim()) if value.dim() else value.clone()


def _try_step(
    optimizer: Optimizer, parameter: Tensor, options: Mapping[str, Any], state: Any
) -> Exception | None:
    """Return what a step raises; hooks, and what the program's class adds, are not."""
    kind = type(optimizer)
    trial = kind.__new__(kind)
    group = {**options, "params": [parameter]}
    try:
        trial.__setstate__(
            {
                "defaults": optimizer.defaults,
                "state": defaultdict(dict, {parameter: state} if state else {}),
                "param_groups": [group],
            }
        )
        with torch.no_grad():
            for _ in range(2):  # A power of something negative may be right by chance.
                inspect.unwrap(kind.step)(trial)
    except Exception as error:
        return error
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | Tensor)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(list(value.shape))
    return f"of type {type(value).__name__}"


@cache
def _options_of_torchs() -> frozenset[str]:
    """Return the arguments of torch's own optimizers."""
    kinds = (
        kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, Optimizer)
    )
    return frozenset(
        option for kind in kinds for option in inspect.signature(kind).parameters
    )


def _is_usual(values: Any, num_parameters: int | None = None) -> bool:
    """Return whether a state is as `Optimizer.state_dict` makes it."""
    if not isinstance(values, Mapping):
        return False
    groups, state = values.get("param_groups"), values.get("state")
    is_usual = (
        isinstance(state, Mapping)
        and isinstance(groups, (list, tuple))
        and all(isinstance(group, Mapping) and "params" in group for group in groups)
    )
    return is_usual and num_parameters in (None, _count(groups))


def _count(groups: Any) -> int:
    return sum(len(group["params"]) for group in groups)
