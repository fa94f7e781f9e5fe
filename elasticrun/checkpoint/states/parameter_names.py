"""Converts an optimizer's state between torch's numbers and parameter names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from elasticrun.errors import CheckpointError

BUILD_AS_SAVED = (
    "Build it as it was when it was saved, or start anew with another checkpoint "
    "directory."
)
ADD_GROUPS_BEFORE = (
    "It is loaded when it is registered: a group that add_param_group() adds in a loop "
    "or an epoch is not there yet. Make the optimizer with all groups, and freeze "
    "those that begin later with requires_grad_(False), since an optimizer skips "
    "parameters without gradients; or add the group before you register the optimizer."
)
_FIXED = frozenset({float, bool, int, type(None), tuple})


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a group's options, such as its learning rate."""
    options = dict(group)
    options.pop("params", None)
    if _FIXED.issuperset(map(type, options.values())):
        return options
    for key, value in options.items():
        if isinstance(value, Tensor):
            options[key] = value.clone()
        elif isinstance(value, list):
            options[key] = list(value)
    return options


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer, in its own order."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def in_groups(names: Iterable[str], optimizer: Optimizer) -> list[list[str]]:
    """Return the names of an optimizer's parameters, in its own order, by groups."""
    rest = iter(names)
    groups = optimizer.param_groups
    return [list(islice(rest, len(group["params"]))) for group in groups]


def name_parameters(modules: Iterable[tuple[str, nn.Module]]) -> dict[Tensor, str]:
    """Return the names of modules' parameters, each by the first module that has it."""
    names: dict[Tensor, str] = {}
    for module_name, module in modules:
        for parameter_name, parameter in module.named_parameters():
            names.setdefault(parameter, f"{module_name}.{parameter_name}")
    return names


def find_names(
    name: str, optimizer: Optimizer, modules: Iterable[tuple[str, nn.Module]]
) -> dict[str, Tensor]:
    """Return an optimizer's parameters by their names in modules, in order."""
    names = name_parameters(modules)
    found: dict[str, Tensor] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in names:
                raise CheckpointError(
                    f"a parameter of {name!r}, with the shape "
                    f"{list(parameter.shape)} in group {number}, is in no registered "
                    "module. Its state is sharded and saved under its name, so it "
                    "could not be found again. Register the module before, or "
                    f"together: register(model=net, {name}=optimizer)."
                )
            found[names[parameter]] = parameter
    return found


def by_names(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return an optimizer's state dict with parameter names instead of numbers."""
    numbers = [n for group in values["param_groups"] for n in group["params"]]
    if len(numbers) != len(names):
        raise CheckpointError(
            f"the saved optimizer has {len(numbers)} parameters, but this one has "
            f"{len(names)}. {BUILD_AS_SAVED}"
        )
    name_of = dict(zip(numbers, names, strict=True))
    return {
        **values,
        "state": {name_of.get(n, n): each for n, each in values["state"].items()},
        "param_groups": [
            {**group, "params": [name_of[number] for number in group["params"]]}
            for group in values["param_groups"]
        ],
    }


def by_numbers(values: Any, groups: Sequence[Sequence[str]] | None = None) -> Any:
    """Return such a state dict with numbers again; anything else as it is.

    Args:
        groups: The names in the optimizer's groups, in order; those of the values
            themselves if None.
    """
    if not has_names(values):
        return values
    saved = [group["params"] for group in values["param_groups"]]
    groups = saved if groups is None else groups
    if not _have_same_names(saved, groups):
        values = _without_wrappers(values)
        saved = [group["params"] for group in values["param_groups"]]
        groups = [list(map(_unwrapped, names)) for names in groups]
        if not _have_same_names(saved, groups):
            raise CheckpointError(_describe_difference(saved, groups))
    names = [name for group in groups for name in group]
    number_of = {name: number for number, name in enumerate(names)}
    return {
        **values,
        "state": {number_of.get(n, n): each for n, each in values["state"].items()},
        "param_groups": [
            {
                **group,
                **_param_names_in_order(group, own),
                "params": [number_of[name] for name in own],
            }
            for group, own in zip(values["param_groups"], groups, strict=True)
        ],
    }


def _have_same_names(
    saved: Sequence[Sequence[str]], own: Sequence[Sequence[str]]
) -> bool:
    return [set(names) for names in saved] == [set(names) for names in own]


def _without_wrappers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by the names that parameters have in bare modules."""
    names = [name for group in values["param_groups"] for name in group["params"]]
    return by_names(by_numbers(values), [_unwrapped(name) for name in names])


def _unwrapped(name: str) -> str:
    """Return a parameter's name without what DDP and torch.compile put into it."""
    return name.replace("_orig_mod.", "").replace("module.", "")


def _param_names_in_order(
    group: Mapping[str, Any], names: Sequence[str]
) -> dict[str, Any]:
    """Return torch's own names, if a group has them, in the order of these."""
    if "param_names" not in group:
        return {}
    name_of = dict(zip(group["params"], group["param_names"], strict=True))
    return {"param_names": [name_of[name] for name in names]}


def has_names(values: Any) -> bool:
    """Return whether values are an optimizer's state with names for numbers."""
    if (
        not isinstance(values, Mapping)
        or not {"state", "param_groups"} <= values.keys()
    ):
        return False
    names = [name for group in values["param_groups"] for name in group["params"]]
    return bool(names) and all(isinstance(name, str) for name in names)


def _describe_difference(
    saved: Sequence[Sequence[str]], own: Sequence[Sequence[str]]
) -> str:
    before = {name for group in saved for name in group}
    now = {name for group in own for name in group}
    if before == now:
        text = "are in other groups"
    else:
        gone, new = sorted(before - now), sorted(now - before)
        text = f"are others (only saved: {gone[:5]}, only here: {new[:5]})"
    what_to_do = ADD_GROUPS_BEFORE if len(saved) > len(own) else BUILD_AS_SAVED
    return f"the saved optimizer's parameters {text}. {what_to_do}"
