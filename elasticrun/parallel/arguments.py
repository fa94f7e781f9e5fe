"""Checks the arguments of `AdaptiveDataParallel` before it wraps anything."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elasticrun.checkpoint.states.stateful import Stateful
from elasticrun.errors import ElasticRunError


def name_states(name: str, given: Any) -> dict[str, Any]:
    """Return what is given, one object or a sequence, by names for checkpoints."""
    if given is None:
        return {}
    named = {name: given}
    if isinstance(given, Sequence):
        named = {f"{name}-{number}": each for number, each in enumerate(given)}
    for state_name, target in named.items():
        if isinstance(target, type):
            raise TypeError(
                f"{state_name} is the class {target.__name__}, which has no state of "
                f"its own. Make one: {target.__name__}(...)."
            )
        if not isinstance(target, Stateful):
            raise TypeError(
                f"{state_name} is a {type(target).__name__}, which has no state_dict() "
                "and load_state_dict(), so it cannot be kept in checkpoints."
            )
    return named


def check_options(options: dict[str, Any]) -> None:
    """Refuse options that `DistributedDataParallel` has not, or that cannot work."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    for option in options:
        if option not in known:
            raise TypeError(
                f"AdaptiveDataParallel() got {option!r}, which is neither its own "
                "argument nor one of DistributedDataParallel."
            )
    if options.get("static_graph"):
        raise ValueError(
            "AdaptiveDataParallel cannot have static_graph=True: DDP then expects all "
            "backward passes to be like the first one, but the number of micro-batches "
            "in a global batch depends on the number of replicas. Use "
            "find_unused_parameters=True for unused parameters, and "
            "use_reentrant=False for checkpointed layers."
        )


def check_module(module: nn.Module, wrapper: type[nn.Module]) -> None:
    """Refuse a module without anything to train, and one that is wrapped already."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"{type(module).__name__} stands in the place of the module, and is no "
            "nn.Module. Write AdaptiveDataParallel(module, optimizer, lr_scheduler)."
        )
    if any(isinstance(each, wrapper) for each in module.modules()):
        raise TypeError(
            f"{type(module).__name__} is or has an {wrapper.__name__}, which would "
            "weigh gradients a second time. Wrap the bare module, once."
        )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError(
            f"{type(module).__name__} has no parameter that requires a gradient, so "
            "there is nothing to train. Use the module itself, and keep it in "
            "checkpoints with register() if it should be."
        )


def check_belong(
    module: nn.Module, optimizers: Iterable[Any], schedulers: Iterable[Any]
) -> None:
    """Refuse optimizers and schedulers that cannot be those of a module."""
    swapped: list[Any] = [each for each in optimizers if isinstance(each, LRScheduler)]
    swapped += [each for each in schedulers if isinstance(each, Optimizer)]
    if swapped:
        raise TypeError(
            f"the {type(swapped[0]).__name__} is in the place of the other one. Write "
            "AdaptiveDataParallel(module, optimizer, lr_scheduler)."
        )
    own = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        if isinstance(optimizer, Optimizer) and own.isdisjoint(
            id(parameter)
            for group in optimizer.param_groups
            for parameter in group["params"]
        ):
            raise ValueError(
                f"the {type(optimizer).__name__} has none of the parameters of "
                f"{type(module).__name__}, so it would never train them. Make it from "
                "the parameters() of this module. Other modules that train need their "
                "own AdaptiveDataParallel, or must be part of this module."
            )


def check_sharded(module: nn.Module, options: Mapping[str, Any]) -> None:
    """Refuse a sharded module that is not as `fully_shard` makes it, or has options."""
    if options:
        raise TypeError(
            f"{type(module).__name__} is sharded, so there is no "
            f"DistributedDataParallel to have the options {', '.join(options)}."
        )
    if not hasattr(module, "set_requires_gradient_sync"):
        raise ElasticRunError(
            f"parameters of {type(module).__name__} are sharded, but not by a "
            "fully_shard of the whole. Call torch.distributed.fsdp.fully_shard for it, "
            "too, after its layers; or train it without AdaptiveDataParallel: "
            "register() it, and multiply the loss with loader.loss_weight."
        )


def check_optimizers(
    optimizers: Mapping[str, Any], *, scales: bool, measures: bool
) -> None:
    """Refuse to scale rates that nobody can find, and to measure steps without end."""
    others = [type(o) for o in optimizers.values() if not isinstance(o, Optimizer)]
    if scales and (others or not optimizers):
        what = f"a {others[0].__name__}" if others else "none"
        raise ValueError(
            "scaling multiplies the learning rates of a torch.optim.Optimizer, and "
            f"AdaptiveDataParallel was given {what}. Give it the optimizer, or leave "
            "scaling out."
        )
    if measures and len(others) == len(optimizers):
        raise ValueError(
            "measure_noise=True needs the optimizer, since a step ends with it: "
            "AdaptiveDataParallel(module, optimizer, measure_noise=True)."
        )


def check_closures(optimizers: Iterable[Any], *, world_size: int) -> None:
    """Refuse LBFGS over several replicas."""
    if world_size > 1 and any(isinstance(each, LBFGS) for each in optimizers):
        raise ElasticRunError(
            f"LBFGS cannot train over {world_size} replicas: the loss decides how "
            "often it calls its closure, and each replica has the loss of its own "
            "samples. So replicas would call it differently often, and wait for each "
            "other forever. Train with one replica, or use another optimizer."
        )


def check_virtual(module: nn.Module, *, is_sharded: bool, measures: bool) -> None:
    """Refuse sums over processes whose order depends on their number."""
    name = type(module).__name__
    what = f"parameters of {name} are sharded (fully_shard)" if is_sharded else ""
    if measures:
        what = "the noise of gradients is to be measured (measure_noise=, scaling=)"
    if what:
        raise ElasticRunError(
            f"{what}, in a job with virtual_replicas. Sums over processes would come "
            "into it whose order depends on their number. Leave it out, or "
            "virtual_replicas."
        )
