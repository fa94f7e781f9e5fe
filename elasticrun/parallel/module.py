"""`AdaptiveDataParallel`: gradients that do not depend on the number of replicas."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.optim import Optimizer

from elasticrun.adaptive.noise import Noise
from elasticrun.checkpoint.states.metrics import MetricState
from elasticrun.checkpoint.states.stateful import has_shards
from elasticrun.errors import ElasticRunError
from elasticrun.job.current import current_job
from elasticrun.job.job import Job
from elasticrun.job.loop import LoaderInLoop
from elasticrun.job.noise_record import NoiseRecord
from elasticrun.job.states import state_of
from elasticrun.job.stepping import act_once_per_global_batch, replace_method
from elasticrun.parallel.arguments import (
    check_belong,
    check_closures,
    check_module,
    check_optimizers,
    check_options,
    check_sharded,
    check_virtual,
    name_states,
)
from elasticrun.parallel.gradient_hooks import GradientHooks
from elasticrun.parallel.noise_meter import NoiseMeter
from elasticrun.parallel.partial_gradients import loop_if_any
from elasticrun.parallel.rates import Rates, Scaling, needs_gain
from elasticrun.parallel.read_ahead import ReadAhead
from elasticrun.parallel.reduction import Reduction
from elasticrun.parallel.virtual import VirtualReduction
from elasticrun.parallel.weighing import Weighing

if TYPE_CHECKING:
    from elasticrun.parallel.sharded import ShardedGradients

_PREFIX = "module."
_COMPILED = "_orig_mod."  # What torch.compile puts before the names in a module.

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

# Attributes that only some models have, and what gives them to one.
_MEASURED = {"noise": "measure_noise=True", "progress": 'scaling="adascale"'}


class AdaptiveDataParallel(nn.Module):
    """A module whose training step is the same at any world size.

    With several replicas it is a `DistributedDataParallel`, with one the bare module. A
    module that `fully_shard` has sharded stays what it is.

    Gradients are weighed by each micro-batch's share of the global batch, which is
    right for a mean over samples. Pass other means, sums, and losses over outputs of
    other replicas through `weigh`. If `max_local_batch_size` cuts the batch
    into micro-batches, gradients accumulate and are reduced once. The optimizer, the
    scheduler and a registered `GradScaler` act once, and your loop does not change.

    The module, the optimizer and the scheduler are in every checkpoint, the module as
    if it were bare. You reach its attributes and methods through this object. Its
    parameters and buffers keep their names, also after `torch.compile`; `module` is
    what was given. A copy (`copy.deepcopy`, `AveragedModel`) is a copy of that.

    Buffers, such as BatchNorm's averages, are rank 0's on all replicas after each
    training step. Forward passes without gradients communicate nothing, so replicas may
    evaluate different numbers of batches. Neither is true of a sharded module.

    Parameters may be frozen and unfrozen later, but none added. Refused are gradients
    that would stay on one replica: those of a second backward pass after one forward
    pass, and those that come around this object, as by a method that calls `self(x)`.

    Collective: make it on every replica, in the same order, and let each micro-batch
    have its forward and backward pass on all of them.
    Replay: made again in each generation; loads the newest checkpoint.

    Args:
        module: On the device where it is trained, with parameters to train.
        optimizer: Over the module's parameters; a sequence if there are several.
        lr_scheduler: Of the optimizer; a sequence if there are several. It may be
            stepped in the batch loop or after it.
        name: What the module is called in checkpoints. The others are called
            `optimizer` and `lr_scheduler` (of a sequence `optimizer-0` and so on),
            after the module's name and a dot if that is not "model".
        measure_noise: Measure the noise of gradients in every 32nd global batch of a
            loop over a loader; see `noise`. One replica that has such a batch in one
            micro-batch gets it in two, unless the model has BatchNorm; so do several
            whose parameters are sharded.
        scaling: How learning rates follow the size of a global batch, over the first
            size of the loader's plan: in each step those of the optimizer are
            multiplied, and then put back. "linear" or "sqrt" of the ratio; "adascale"
            with the gain (`Noise.gain`), for which noise is measured; a function from
            the gain; or "auto", AdaScale for `SGD` and the square root for all others.
            With the gain, a scheduler that is stepped in the loop without arguments
            steps as often as the step is worth; see `progress`.
        ddp_kwargs: Options for `DistributedDataParallel`.

    Raises:
        TypeError: An option is none of `DistributedDataParallel`'s; an optimizer or
            scheduler has no state, or stands in the other's place; or the module is
            wrapped already, or sharded and there are `ddp_kwargs`.
        ValueError: The module has no parameter to train, an optimizer has none of its
            parameters, `static_graph` is set, there is no such `scaling`, or noise is
            to be measured or rates scaled without an optimizer of torch's.
        StateNameError: A name is taken, or is not a plain file name.
        CheckpointError: A saved state does not fit.
        ElasticRunError: An optimizer is LBFGS, and there are several replicas; or
            parameters are sharded, but not by a `fully_shard` of the module.
    """

    module: nn.Module
    _replica: Callable[..., Any]

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        lr_scheduler: Any = None,
        *,
        name: str = "model",
        measure_noise: bool = False,
        scaling: Scaling | None = None,
        **ddp_kwargs: Any,
    ) -> None:
        super().__init__()
        job = current_job()
        prefix = "" if name == "model" else f"{name}."
        optimizers = name_states(f"{prefix}optimizer", optimizer)
        schedulers = name_states(f"{prefix}lr_scheduler", lr_scheduler)
        is_sharded = has_shards(module)
        follows_gain = needs_gain(scaling, list(optimizers.values()))
        measures = measure_noise or follows_gain

        # Refuse what cannot work, before anything is wrapped, registered or sent.
        check_options(ddp_kwargs)
        check_module(module, AdaptiveDataParallel)
        check_belong(module, optimizers.values(), schedulers.values())
        check_closures(optimizers.values(), world_size=job.num_shares)
        check_optimizers(optimizers, scales=scaling is not None, measures=measures)
        if is_sharded:
            check_sharded(_bare(module), ddp_kwargs)
        if job.virtual is not None:
            check_virtual(module, is_sharded=is_sharded, measures=measures)

        # Choose what forward passes go through: FSDP, DDP, or the module itself, whose
        # gradients are added up here where there are virtual replicas.
        self.module = module
        self.training = module.training
        self._reduction: Reduction | None = None
        self._virtual: VirtualReduction | None = None
        replica: Callable[..., Any] = module
        if job.virtual is not None:
            self._virtual = VirtualReduction(module, ddp_kwargs, job)
        elif job.world_size > 1 and not is_sharded:
            self._reduction = Reduction(module, ddp_kwargs, job)
            replica = self._reduction.run

        # Weigh, accumulate and measure gradients on their way to `.grad`.
        self._weighing = job.get_or_make(
            Weighing,
            job.world_size,
            job.in_step,
            job.settings.timeout,
            None if job.virtual is None else job.virtual.number,
        )
        self._noise: NoiseRecord | None = None
        if measures:
            self._noise = NoiseRecord(f"{prefix}noise", has_shards=is_sharded)
        meter = self._meter(job, is_sharded=is_sharded)
        self._read_ahead = ReadAhead()
        self._rates: Rates | None = None
        if scaling is not None:
            self._rates = Rates(scaling, self._noise if follows_gain else None)
        self._gradient_hooks: GradientHooks | ShardedGradients
        if is_sharded:
            from elasticrun.parallel.sharded import ShardedGradients  # FSDP is slow.

            hooks = ShardedGradients(module, weighing=self._weighing, meter=meter)
            self._gradient_hooks, replica = hooks, hooks.run
        else:
            self._gradient_hooks = GradientHooks(
                module,
                self._reduction,
                weighing=self._weighing,
                meter=meter,
                virtual=self._virtual,
            )
        # Past nn.Module's own __setattr__, whose modules take longer to be found.
        object.__setattr__(self, "_replica", replica)
        job.boundary.defer_while(lambda: self._gradient_hooks.awaits_step)

        # Register what checkpoints have, and load it, in one order on all replicas. The
        # module comes before the optimizers, whose states are moved to its parameters.
        if is_sharded:
            job.register(state_of(name, _bare(module)))
        else:
            has_common = bool(ddp_kwargs.get("broadcast_buffers", True))
            job.register(_ModelState(name, self, _bare(module), has_common=has_common))
        for state_name, target in (optimizers | schedulers).items():
            job.register(state_of(state_name, target))
            self._wait_for_batch(target, follows_gain=follows_gain)

    def _wait_for_batch(self, target: Any, *, follows_gain: bool) -> None:
        """Let an optimizer or a scheduler act once in a global batch."""
        if isinstance(target, Optimizer):
            self._gradient_hooks.add_optimizer(target, rates=self._rates)
            return
        act_once_per_global_batch(target)
        if self._rates is not None and follows_gain:
            replace_method(target, "step", self._rates.step_scheduler)

    def _meter(self, job: Job, *, is_sharded: bool) -> NoiseMeter | None:
        """Return what measures the noise of gradients, if that is to be known."""
        if self._noise is None:
            return None
        job.register(self._noise)
        has_batch_norm = any(isinstance(m, _BATCH_NORMS) for m in self.module.modules())
        if (job.world_size == 1 or is_sharded) and not has_batch_norm:
            job.cuts_for_noise = lambda: self.training and torch.is_grad_enabled()
        return NoiseMeter(
            list(self.module.parameters()),
            self._noise,
            num_summed=1 if is_sharded else job.world_size,
            scalers=lambda: (
                state.target
                for state in job.states
                if isinstance(state.target, torch.amp.GradScaler)
            ),
            warns_of_one_chunk=has_batch_norm,
        )

    @property
    def noise(self) -> Noise:
        """The noise of gradients, measured in the newer half of 512 steps or fewer.

            print(model.noise)  # critical batch size 812 +- 95 (measured in 64 steps)

        Unbiased for any shares and micro-batches, by the analysis of variance of their
        mean gradients (McCandlish et al. 2018, arXiv 1812.06162). Steps add nothing to
        what replicas communicate: each keeps its part, and they are added up here and
        in each save.

        With a registered `GradScaler` gradients count as unscaled. What is clipped
        counts as it was before. Of several optimizers the first to step ends the
        measurement, and all parameters count. Not measured: loops that count steps, and
        batches whose gradients are added to those of batches before.

        Collective: ask for it on every replica.

        Raises:
            AttributeError: Nothing is measured, and the module has no such attribute.
        """
        if self._noise is None:
            raise AttributeError  # Python asks __getattr__ then.
        self._noise.sum_parts()
        return self._noise.noise

    @property
    def progress(self) -> float:
        """The steps with batches of the first size that the training is worth.

        Each step counts as its gain, between 1 and the ratio of the sizes; of AdaScale
        (Johnson et al. 2020, arXiv 2007.05105). Kept in checkpoints.

        Raises:
            AttributeError: No rate follows the gain, and the module has no such
                attribute.
        """
        if self._rates is None or self._rates.record is None:
            raise AttributeError  # Python asks __getattr__ then.
        return self._rates.record.progress

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns."""
        if self._virtual is not None:
            assert isinstance(self._gradient_hooks, GradientHooks)
            self._gradient_hooks.check_not_stepped()
            if self.training or any(each.training for each in self.module.modules()):
                self._virtual.begin_forward()
        if not torch.is_grad_enabled():
            return self._replica(*args, **kwargs)
        reduction = self._reduction
        if reduction is not None and reduction.is_outdated:
            if reduction.is_idle:  # Frozen, as in the step of another module.
                return self.module(*args, **kwargs)
            self._gradient_hooks.unhook()  # The new DDP's hooks come before them.
            reduction.renew()
        if self.training and not is_compiling():
            self._read_ahead.on_forward(loop_if_any())
        is_step = self._gradient_hooks.prepare(is_training=self.training)
        if reduction is None:
            return self._replica(*args, **kwargs)
        return reduction.forward(args, kwargs, is_step=is_step)

    def weigh(
        self,
        loss: Tensor,
        count: Tensor | float | None = None,
        *,
        reduction: Literal["mean", "sum"] = "mean",
        member: LoaderInLoop | None = None,
    ) -> Tensor:
        """Return a loss whose gradients are weighed by what it is a mean over.

        A mean over the samples of the batch needs this only if it reads outputs of
        other replicas (through a gather that has gradients, or `SyncBatchNorm`). For a
        mean over something else give its count:

            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-1)
            model.weigh(loss, count=(y != -1).sum()).backward()

        The step then equals that of the mean over all that the global batch has of it.
        The value stays that of this replica's micro-batch. Where a backward pass goes
        through a weighed loss, nothing else weighs it: let all parts of such a loss go
        through `weigh`, each with its own count; what is added beside them is averaged
        over the replicas as DDP does.

        Collective: with a count, call it in each micro-batch on every replica; the sum
        over the replicas is one number, which the backward pass waits for.

        Args:
            loss: A mean or a sum over this micro-batch.
            count: How many things (tokens, positive boxes) it is a mean over, or the
                sum of their weights; 0 if it has none. None: the samples.
            reduction: "sum" if the loss is divided by nothing.
            member: In a loop over a `CombinedLoader`, the loader whose samples the loss
                is over. Needed where the members' batches do not divide alike.

        Raises:
            TypeError: A count is given for a sum.
            ValueError: There is no such reduction.
            ElasticRunError: The member has no batch in this step; or none is given, and
                members' batches do not divide alike.
        """
        weighed: Tensor = self._weighing.weigh(loss, count, reduction, member)
        return weighed

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let one of DDP's communication hooks average the gradients, as a DDP does.

        With one replica there is nothing to communicate; FSDP has other hooks.
        Compressed gradients depend on the number of replicas. What a hook remembers
        from step to step, for example PowerSGD's error, is in no checkpoint.

        Collective: call it on every replica, once, before training.
        Replay: registers again in each generation.

        Raises:
            ElasticRunError: Parameters are sharded.
        """
        if not isinstance(self._gradient_hooks, GradientHooks):
            raise ElasticRunError(
                "register_comm_hook is DDP's, and these parameters are sharded. FSDP "
                "has set_custom_reduce_scatter and others: call them for the module."
            )
        if self._virtual is not None:
            raise ElasticRunError(
                "register_comm_hook is DDP's, which is not used in a job with "
                "virtual_replicas. Leave one of the two out."
            )
        if self._reduction is not None:
            self._reduction.register_comm_hook(state, hook)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context for forward passes whose gradients are not reduced yet.

        For accumulating over several global batches; as with DDP, the first pass
        outside reduces all that has been accumulated.
        """
        if self._reduction is not None:
            context: AbstractContextManager[None] = self._reduction.ddp.no_sync()
            return context
        if isinstance(self._gradient_hooks, GradientHooks):
            return nullcontext()
        return self._gradient_hooks.no_sync()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the bare module's state."""
        return _bare(self.module).state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Give the module a state, saved from a bare, DDP's or compiled module."""
        bare = _bare(self.module)
        own = bare.state_dict().keys()
        for prefix in (_COMPILED, _PREFIX, _COMPILED):  # Either may be around the other
            if all(key.startswith(prefix) and key not in own for key in state_dict):
                state_dict = _without_prefix(state_dict, prefix)
        return bare.load_state_dict(state_dict, strict, assign)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the bare module's parameters under the names that they have there."""
        return _bare(self.module).named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the bare module's buffers under the names that they have there."""
        return _bare(self.module).named_buffers(prefix, recurse, remove_duplicate)

    def train(self, mode: bool = True) -> AdaptiveDataParallel:
        """Set the mode of the module, and of the DDP around it."""
        super().train(mode)
        if self._reduction is not None:
            self._reduction.ddp.training = mode
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients that the next step would see."""
        self._gradient_hooks.zero_grad()
        super().zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
        if name in _MEASURED and not hasattr(module, name):
            raise AttributeError(
                f"model.{name} was asked for, but that is not measured. Make the model "
                f"with AdaptiveDataParallel(..., {_MEASURED[name]})."
            )
        return getattr(module, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return copy.deepcopy(self.module, memo)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "an AdaptiveDataParallel cannot be pickled, as by torch.save(model): it "
            "belongs to this process and its job. Save model.state_dict(), which is "
            "that of model.module, or model.module itself; the job's checkpoints have "
            "its state anyway."
        )

    def _apply(self, fn: Any, recurse: bool = True) -> AdaptiveDataParallel:
        self._gradient_hooks.unhook()  # Moved parameters get new nodes in the graph.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._reduction is not None:
            self._reduction.watch()
        return self


class _ModelState(MetricState):
    """The state of a module that all replicas train alike.

    Args:
        has_common: Whether its buffers are made the same on all replicas.
    """

    target: AdaptiveDataParallel

    def __init__(
        self,
        name: str,
        target: AdaptiveDataParallel,
        module: nn.Module,
        *,
        has_common: bool,
    ) -> None:
        super().__init__(name, target, module)
        self._has_common = has_common
        assert self._memory is not None
        self._memory.looks_at_gradients = False  # Their hooks know.

    def has_common_statistics(self) -> bool:
        reduction = self.target._reduction
        are_same = reduction is None or reduction.has_common_buffers
        return (self._has_common and are_same) or super().has_common_statistics()


def _bare(module: nn.Module) -> nn.Module:
    """Return the module, or what `torch.compile` has wrapped in it."""
    compiled = module._modules.get(_COMPILED.rstrip("."))
    return module if compiled is None else compiled


def _without_prefix(state_dict: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    stripped = OrderedDict(state_dict)
    versions = getattr(state_dict, "_metadata", None)  # Of each submodule.
    if versions is not None:
        stripped._metadata = dict(versions)  # type: ignore[attr-defined]
    consume_prefix_in_state_dict_if_present(stripped, prefix)
    return stripped
