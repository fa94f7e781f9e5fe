"""What takes DDP's place where virtual replicas share out global batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.distributed.utils import _verify_param_shape_across_processes

from elasticrun.checkpoint.states.module_watch import versions_of
from elasticrun.errors import ElasticRunError
from elasticrun.job.current import loader_if_any
from elasticrun.job.job import Job
from elasticrun.job.loop import LoaderInLoop, Loop, StepLoop
from elasticrun.job.virtual import VirtualReplicas
from elasticrun.parallel.collectives import collective_in_backward
from elasticrun.parallel.reduction import broadcast, check_even
from elasticrun.parallel.tree import SumOf, TreeReduction

# Of DDP, which say only how it does what is not done here; but for "bucket_cap_mb".
_OPTIONS = (
    *("device_ids", "output_device", "bucket_cap_mb", "gradient_as_bucket_view"),
    "find_unused_parameters",
)


class VirtualReduction:
    """Reduces a module's gradients, and keeps its buffers, by shares.

    Args:
        module: With parameters to train.
        options: For a DDP, which there is none of.

    Attributes:
        tree: Adds up the gradients.
        replicas: The job's virtual ones.

    Raises:
        ElasticRunError: The module or an option would make the result depend on the
            number of processes.
    """

    def __init__(self, module: nn.Module, options: Mapping[str, Any], job: Job) -> None:
        assert job.virtual is not None
        _check_module(module, options)
        import torch._dynamo  # The first optimizer of a process has.

        # Else how a share is compiled would depend on sizes that came before.
        torch._dynamo.config.automatic_dynamic_shapes = False
        self._module = module
        self._job = job
        self._is_alone = job.world_size == 1
        self._checked_loop: Loop | None = None
        self.replicas: VirtualReplicas = job.virtual
        parameters: list[Tensor] = list(module.parameters())
        self.tree = TreeReduction(
            parameters,
            num_shares=job.virtual.number,
            rank=job.rank,
            size=job.world_size,
            bucket_mib=options.get("bucket_cap_mb") or 25,
        )
        self._buffers = _ShareBuffers(
            module, is_first=job.rank == 0, send=self._broadcast
        )
        job.virtual.at_end_of_batch(self._end_batch, self._buffers.first_ones)
        if not self._is_alone:
            group: Any = dist.group.WORLD
            _verify_param_shape_across_processes(group, parameters)
            self._broadcast([*parameters, *module.buffers()])

    def _broadcast(self, tensors: list[Tensor]) -> None:
        if not self._is_alone:
            broadcast(tensors)

    def _end_batch(self) -> None:
        self.tree.check_complete()
        self._buffers.end_batch()

    def begin_forward(self) -> None:
        """Prepare a forward pass in training mode, with gradients or without."""
        if is_compiling():
            raise ElasticRunError(
                "torch.compile was given an AdaptiveDataParallel in a job with "
                "virtual_replicas, whose shares it would not see. Compile the module "
                "inside of it: AdaptiveDataParallel(torch.compile(net), optimizer)."
            )
        loader = loader_if_any()
        if loader is None or isinstance(loader, StepLoop):
            return  # A gradient there is refused.
        check_even(loader)
        self._buffers.begin_forward(loader.running_loop)
        if loader.is_step and torch.is_grad_enabled() and not self._is_alone:
            self._job.num_forward_passes += 1
            self._job.in_step.num_passes += 1

    def begin_backward(self, loader: LoaderInLoop | None) -> None:
        """Refuse gradients that are no share's, or come from others' outputs."""
        name = type(self._module).__name__
        if loader is None or isinstance(loader, StepLoop):
            where = "outside of any loop" if loader is None else "in a loop of steps"
            raise ElasticRunError(
                f"gradients came to {name} {where}, in a job with virtual_replicas. "
                "They would be each process's own, and not those of a share of a "
                "global batch, so the end would depend on the number of processes. "
                "Train in a loop over an AdaptiveDataLoader, or leave virtual_replicas "
                "out."
            )
        if loader.is_step:
            self.tree.begin_pass()
        if loader.running_loop is self._checked_loop or self._is_alone:
            return
        self._checked_loop = loader.running_loop
        if (node := collective_in_backward()) is not None:
            raise ElasticRunError(
                f"the backward pass goes through {node}, which communicates, in a job "
                "with virtual_replicas. The loss of one share then uses values of "
                "whatever shares other processes train, so it depends on their number. "
                "Take the loss over the share alone, or leave virtual_replicas out."
            )

    def end_backward(self) -> None:
        """Keep the buffers as they are now, behind the backward pass of a share."""
        self._buffers.leave()

    def sends_early(self) -> bool:
        """Return whether gradients are sent while the backward pass goes on.

        Not those of several models: gradients of these may come in one pass, and in
        another order in each process, where shares leave parameters out.
        """
        if self._is_alone or self.replicas.num_models > 1:
            return False
        return self.tree.has_several_buckets()

    def send_ready(self, number: int, sum_of: SumOf) -> None:
        """Send gradients on their way once they have come for a parameter."""
        if self.replicas.num_models == 1:  # Another one may have been made since.
            self.tree.send_ready(number, sum_of)

    def have_any(self, has_gradient: list[bool], group: Any) -> list[bool]:
        """Return for which models the pass has a gradient in any process. Collective.

        Where there is but one, each process has some. In a group of its own, since
        passes that one process alone has must not meet gradients.
        """
        if self._is_alone or len(has_gradient) == 1:
            return has_gradient
        # Now, as one that had no pass at all looks here for those of others.
        self._job.in_step.num_reductions += 1
        self.replicas.num_passes += 1
        loader = loader_if_any()
        assert loader is not None  # Else the gradients were refused.
        at = torch.tensor([loader.batch_index, self.replicas.num_passes])
        found = torch.cat([torch.tensor(has_gradient, dtype=at.dtype), at, -at])
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
        *have_any, batch, number, least_batch, least_number = found.tolist()
        if (batch, number) != (-least_batch, -least_number):
            raise ElasticRunError(
                f"processes have called backward() differently often in a batch of the "
                f"loop over `{loader.name}` ({loader.where}): here pass "
                f"{self.replicas.num_passes} of global batch {loader.batch_index} has "
                "ended, elsewhere another one. In a job with virtual_replicas each "
                "adds what all processes have, so their order would be lost. Call "
                "backward() equally often in each share: add up the losses of all "
                "models that it trains, and call it once."
            )
        return [bool(each) for each in have_any]

    def means(self, sum_of: SumOf) -> dict[int, Tensor]:
        """Return the mean gradients over the shares of all processes. Collective."""
        if not self._is_alone:
            self._job.in_step.num_reductions += 1
        means = self.tree.means(sum_of)
        self._buffers.send()  # Behind the last bucket: each has sent as many by now.
        if not self._is_alone and self._job.rescue is not None:
            self._job.rescue.count_reduction()
        return means


class _ShareBuffers:
    """Gives each share the buffers of before its global batch, and keeps the first's.

    As DDP keeps those of rank 0. They are sent with the gradients, so that a process
    needs no other one behind these; and at the batch's end once more if there was
    another forward pass with gradients. Until then each share goes on with its own.
    What a pass without gradients does to them behind the last backward pass is not
    kept: it may be one process's alone, and needs no other one either.

    Args:
        is_first: Whether this process has the first share.
        send: Gives all processes what the first one has of some tensors.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        is_first: bool,
        send: Callable[[list[Tensor]], None],
    ) -> None:
        self._module = module
        self._is_first = is_first
        self._send = send
        self._batch: tuple[Loop, int] | None = None
        self._share = 0
        self._places: list[dict[str, Tensor | None]] = []  # In the module and below.
        self._frozen: list[Tensor] = []  # Parameters,
        self._frozen_at: list[int] = []  # and as they were before the share.
        self._before: list[Tensor] = []
        self._kept: list[Tensor] = []  # Of the first share; behind the end, of then.
        self._is_behind = False  # What is to be kept of the share is left,
        self._left_at: list[int] | None = None  # and nothing may change it since.
        self._is_over = False  # The batch.

    def begin_forward(self, loop: Loop) -> None:
        """Prepare a forward pass that may change them."""
        batch, share = (loop, loop.current.number), loop.current.part.share
        if batch != self._batch:
            self._batch, self._is_over = batch, False
            modules = [*self._module.modules()]
            self._places = [each._buffers for each in modules]
            self._frozen = [
                parameter
                for each in modules
                for parameter in each._parameters.values()
                if parameter is not None and not parameter.requires_grad
            ]
            self._before = self._kept = self._copied()
            self._begin_share(share)
        elif self._is_over:  # It has no gradients, or was refused.
            self._kept = self._kept or self._copied()
        elif share != self._share:
            self.leave()
            self._set(self._before)
            self._begin_share(share)
        else:
            self._left_at = None
            if torch.is_grad_enabled():
                self._is_behind = False

    def _begin_share(self, share: int) -> None:
        self._share, self._is_behind, self._left_at = share, False, None
        self._frozen_at = versions_of(self._frozen)

    def leave(self) -> None:
        """Keep the first share's, behind a backward pass or at the share's end."""
        if self._batch is None or self._is_behind:
            return
        self._is_behind = True
        name = type(self._module).__name__
        shapes = [each.shape for each in self._buffers()]
        if shapes != [each.shape for each in self._before]:
            raise ElasticRunError(
                f"a forward pass of {name} changed the shape or the number of its "
                "buffers, in a job with virtual_replicas, where each share begins with "
                "those from before its global batch. Give them their shape at the "
                "start."
            )
        if versions_of(self._frozen) != self._frozen_at:
            raise ElasticRunError(
                f"parameters of {name} that require no gradient changed between a "
                "forward pass and the end of its backward pass, in a job with "
                "virtual_replicas. They would change once for each share that a "
                "process trains. Change them behind optimizer.step(), where "
                "train.is_step is True, or keep them in buffers, with which each share "
                "begins anew."
            )
        self._left_at = versions_of(self._buffers())
        if self._is_first and self._share == 0:
            self._kept = self._copied()

    def send(self) -> None:
        """Tell all processes what the first share has. Collective."""
        if self._batch is not None:
            self.leave()
            if not self._is_first:
                self._kept = self._copied()  # Memory to receive them in.
            self._send(self._kept)

    def end_batch(self) -> None:
        """Set the first share's; called again, what was there then.

        Collective the first time, if there was a forward pass since they were sent.
        """
        if self._batch is None:
            return
        if not self._is_over and not self._is_behind:
            self.send()
        elif not self._is_over and self._left_at not in (
            None,
            versions_of(self._buffers()),
        ):
            raise ElasticRunError(
                f"buffers of {type(self._module).__name__} were changed between a "
                "backward pass and the optimizer's step, in a job with "
                "virtual_replicas, where those of the first share stay as they are "
                "behind its backward pass. Change them in the forward pass, or behind "
                "optimizer.step(), where train.is_step is True."
            )
        if self._kept:
            self._set(self._kept)
        self._kept, self._is_over = [], True

    @contextmanager
    def first_ones(self) -> Iterator[None]:
        """Have the first share's meanwhile, behind the last backward pass."""
        if not self._kept:
            yield
            return
        own = self._copied()
        self._set(self._kept)
        yield
        self._set(own)

    def _buffers(self) -> list[Tensor]:
        return [each for at in self._places for each in at.values() if each is not None]

    def _copied(self) -> list[Tensor]:
        return [each.detach().clone() for each in self._buffers()]

    def _set(self, values: list[Tensor]) -> None:
        for buffer, value in zip(self._buffers(), values, strict=True):
            # Unknown to autograd, as in DDP: BatchNorm's backward pass would complain
            # of averages that it does not read.
            buffer.data.copy_(value)


def _check_module(module: nn.Module, options: Mapping[str, Any]) -> None:
    """Refuse what a share has together with others, and unknown options."""
    name = type(module).__name__
    if any(isinstance(each, nn.SyncBatchNorm) for each in module.modules()):
        raise ElasticRunError(
            f"{name} has a SyncBatchNorm, which normalizes by the samples of all "
            "processes, in a job with virtual_replicas, of which each share is to be "
            "trained alone. Use BatchNorm or GroupNorm."
        )
    if any(0 in b.stride() and b.numel() > 1 for b in module.buffers()):
        raise ElasticRunError(
            f"{name} has an expanded buffer, whose elements share memory, in a job "
            "with virtual_replicas, where each share is given the buffers of before. "
            "Register buffer.contiguous()."
        )
    if any(each.is_complex() for each in module.parameters()):
        raise ElasticRunError(
            f"{name} has complex parameters, whose gradients are not added up in a job "
            "with virtual_replicas. Keep their real and imaginary parts as parameters "
            "(torch.view_as_real)."
        )
    unknown = [each for each in options if each not in _OPTIONS]
    if unknown:
        raise ElasticRunError(
            f"AdaptiveDataParallel({unknown[0]}=...) is for DDP, which is not used in "
            "a job with virtual_replicas: gradients are added in an order of its own, "
            "and buffers are those of the first share. Leave it out."
        )
