"""`CombinedLoader`: several loaders in one loop, with one position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, get_args

from elasticrun.checkpoint.position import STEPS_OF
from elasticrun.checkpoint.seeding import derive_seed
from elasticrun.data.arguments import check_made_again, check_progress_bar
from elasticrun.data.loader import AdaptiveDataLoader
from elasticrun.data.order.batches import MAX_LISTS, SizedBatches
from elasticrun.data.order.plan import RunningLoop
from elasticrun.data.order.shares import EvenShares, LaneShares, partition
from elasticrun.data.resumable import ResumableLoader
from elasticrun.data.streams.uncounted import need_lengths
from elasticrun.errors import ElasticRunError, LoopOrderError, counted
from elasticrun.job.current import current_job
from elasticrun.job.job import Job
from elasticrun.job.loop import MicroBatch, MicroBatchInfo
from elasticrun.job.trace import Trace

Mode = Literal["min_size", "max_size_cycle"]
_MODES = get_args(Mode)

# Lightning's other modes, and what to do instead.
_REFUSED_MODES = {
    "sequential": "Loop over one loader after another: any number of loops may follow "
    "each other.",
    "max_size": "Take mode='max_size_cycle', in which members that have come to their "
    "end begin again; or loop over the shorter ones together with 'min_size', and over "
    "the longest one by itself.",
}


_STEPS = ((0, 1),)  # As sizes of batches: the index counts them.
_RUNS_AHEAD = 100  # Of steps with one division, in which another one is looked for.


class CombinedLoader(ResumableLoader):
    """Several loaders in one loop: each turn delivers a batch of each of them.

        both = CombinedLoader({"labeled": labeled, "unlabeled": unlabeled})
        for batch in both:
            x, y = batch["labeled"]
            ...

    The batches come in the form in which the members were given: a dictionary, or a
    list. Global batch k of each member in the loop depends on (seed, epoch, loop, k)
    alone. Where `max_local_batch_size` cuts the batch of one member, the others' are
    cut into as many micro-batches. A member is at its own place in the loop:
    `labeled.num_valid`, `labeled.batch_index` and the like mean its part.

    Say whose samples a loss is over: `model.weigh(loss, member=labeled)`, or multiply
    it with `labeled.loss_weight` under your own DDP or FSDP. This is needed where the
    members' batches do not divide alike, for example 8 and 16 samples among 3 replicas.
    Otherwise the first backward pass raises an error.

    With `batches(n)` each member delivers the next batches of endless passes, which are
    others than those of `batches` of the member itself.

    Collective: make and iterate it on every replica, in the same order.
    Replay: as a loop over one loader; all members continue at the same step.

    Args:
        loaders: The members, by keys or in a row.
        mode: When a loop ends, in the words of Lightning: "min_size" with the shortest
            member; "max_size_cycle" with the longest, while the others begin again, in
            a new order.
        name: What it is called in checkpoints and messages, as with a loader.
        progress: Show a tqdm bar on rank 0.

    Raises:
        ImportError: `progress` needs tqdm.
        TypeError: A member is no AdaptiveDataLoader, or they are no collection.
        ValueError: There are no members, or one is given twice, or has
            `even_batches=False`, or there is no such mode.
        LoopOrderError: It is made inside a loop, or unnamed inside an epoch.
        StateNameError: The name is taken.
        CheckpointError: The checkpoint's members or mode differ.
    """

    def __init__(
        self,
        loaders: Mapping[str, AdaptiveDataLoader] | Sequence[AdaptiveDataLoader],
        mode: Mode = "min_size",
        *,
        name: str | None = None,
        progress: bool = False,
    ) -> None:
        job = current_job()
        members = _by_key(loaders)
        _check(members, mode)
        if progress:
            check_progress_bar()
        check_made_again(job, name)
        self._is_list = not isinstance(loaders, Mapping)
        self._members: dict[str | int, AdaptiveDataLoader] = members
        self._mode: Mode = mode
        self._joint: JointSteps | None = None
        names = [[key, member.name] for key, member in members.items()]
        super().__init__(
            job,
            name=name,
            seed=0,
            plan=None,
            fingerprint={"mode": mode, "members": names},
            made={},
            progress=progress,
        )

    # What the loop body may ask, beside what `ResumableLoader` says.

    @property
    def loss_weight(self) -> float:
        """What to multiply a mean loss with under a DDP or FSDP of the program's own.

        Raises:
            ElasticRunError: Losses over different members have different ones.
        """
        if not self.has_one_weight:
            raise ElasticRunError(self._why_weights_differ())
        return super().loss_weight

    @property
    def planned_sizes(self) -> tuple[int, int]:
        """(1, 1): learning rates have no one size to follow here.

        Raises:
            ElasticRunError: A member has a plan of batch sizes.
        """
        for member in self._members.values():
            if len(member._state.plan or ()) > 1:
                raise ElasticRunError(
                    f"learning rates cannot follow the batch sizes of `{member.name}`, "
                    f"since the other members of `{self.name}` have other sizes. Leave "
                    "out scaling= of the AdaptiveDataParallel, and set the learning "
                    "rates in the loop."
                )
        return 1, 1

    @property
    def has_one_weight(self) -> bool:
        """Whether all losses have one weight, here and in steps that are in sight."""
        if self._joint is None:  # Outside of a loop.
            return True
        return self._joint.unlike_step(self.running_loop.current.number) is None

    @property
    def even_batches(self) -> bool:
        """Whether every replica takes part in every step."""
        return all(member.even_batches for member in self._members.values())

    def _why_weights_differ(self) -> str:
        assert self._joint is not None
        step = self._joint.unlike_step(self.running_loop.current.number)
        assert step is not None
        sizes = ", ".join(map(str, self._joint.sizes(step)))
        num_micro = self._joint.num_micro(step)
        pieces = counted(current_job().num_shares, "replica")
        if num_micro > 1:
            pieces += f" and {num_micro} micro-batches"
        key, member = next(iter(self._members.items()))
        return (
            f"the batches of `{self.name}` ({self.where}) in its step "
            f"{step - self.running_loop.first} have {sizes} samples, which cannot be "
            f"split alike among {pieces}, so one weight for all losses would be wrong. "
            "Weigh each loss with the member whose samples it averages: "
            "model.weigh(loss, "
            f"member={(key if isinstance(key, str) else member.name)}), or under a DDP "
            "or FSDP of your own by that member's loss_weight; or give the members "
            "batch sizes that divide, and drop_last=True."
        )

    @property
    def place_name(self) -> str:
        """What the position calls it, whose index counts steps."""
        return STEPS_OF + self.name

    # How loops are read.

    def _start(self, loop: RunningLoop) -> Iterator[Any]:
        members = list(self._members.values())
        for member in members:
            member.refuse_autoscale(f"it is a member of `{self.name}`")
        for number, member in enumerate(members):
            self._put_into(loop, number, member)
        self._joint = joint = JointSteps(
            [member._shares_of(member.running_loop) for member in members],
            current_job().num_shares,
            begin=loop.begin,
            end=loop.end,
        )
        is_cut = any(
            member.shares.max_local_batch_size or member.shares.num_virtual
            for member in members
        )
        cuts = joint if is_cut else None
        reads = [member._read(member.running_loop, cuts) for member in members]
        return self._zipped(loop, reads)

    def _put_into(
        self, loop: RunningLoop, number: int, member: AdaptiveDataLoader
    ) -> None:
        """Let a member run its part of a loop."""
        assert loop.start is not None
        key = derive_seed(member.seed, loop.key, number)
        own = member._order
        if loop.is_endless:
            batches, order = own.endless_batches(key), own.endless_order(key)
        else:
            batches, order = own.cycled(loop.start.epoch, key)
        member.running_loop = RunningLoop(
            loop.where,
            loop.start,
            batches,
            order=order,
            first=loop.first,
            begin=loop.begin,
            num_batches=loop.end - loop.first,
            key=key,
            part_of=self.name,
        )

    def _zipped(self, loop: RunningLoop, reads: list[Iterator[Any]]) -> Iterator[Any]:
        """Yield a batch of each member; their batches have the numbers of the steps."""
        members = [member.running_loop for member in self._members.values()]
        for turn in zip(*reads, strict=True):
            part = _joined(tuple(member.current.part for member in members))
            loop.current = MicroBatch(members[0].current.number, None, part)
            if self._is_list:
                yield list(turn)
            else:
                yield dict(zip(self._members, turn, strict=True))

    def _stop(self) -> None:
        for member in self._members.values():
            if member.running_loop.part_of == self.name:
                try:
                    member._stop()
                finally:
                    member.running_loop = RunningLoop()
        self._joint = None

    def _trace(self, trace: Trace) -> None:
        for member in self._members.values():
            member._trace(trace)

    def _compare(self, job: Job) -> None:
        super()._compare(job)
        for member in self._members.values():
            member._compare(job)

    def _check_free(self, where: str) -> None:
        job = current_job()
        if job.loops.has(self):
            return  # Which is refused in the same words as of any loader.
        for member in self._members.values():
            member._check_free(where)
            if job.loops.has(member):
                raise LoopOrderError(
                    f"the loop over `{self.name}` ({where}) began in the body of that "
                    f"over its member `{member.name}` ({member.where}). A loader is at "
                    "one place at a time. Leave that loop first, or make another "
                    "loader."
                )

    def _check_endless(self) -> None:
        for member in self._members.values():
            member._check_endless()

    # Its batches are the steps.

    def _batches_in(self, epoch: int, key: int = 0) -> SizedBatches:
        del key
        members = list(self._members.values())
        lengths = [len(member._order.batches(epoch)) for member in members]
        if self._mode == "min_size":
            return SizedBatches(_STEPS, min(lengths))
        if 0 in lengths and any(lengths):
            member = members[lengths.index(0)]
            raise ValueError(
                f"`{member.name}` is to begin again until the longest member ends "
                "(mode='max_size_cycle'), but has no batch: it has too few samples for "
                "one, and drop_last=True. Leave drop_last out, or take smaller batches."
            )
        return SizedBatches(_STEPS, max(lengths))

    def _batches_of_passes(self, key: int = 0) -> SizedBatches:
        del key
        return SizedBatches(_STEPS, MAX_LISTS)


class JointSteps:
    """How the steps are cut that several loaders deliver in.

    Global batch k of each is delivered in step k. All deliver equally many
    micro-batches in it: as many as the one that needs most of them.
    """

    def __init__(
        self,
        members: Sequence[EvenShares | LaneShares],
        num_shares: int,
        *,
        begin: int,
        end: int,
    ) -> None:
        self._members = members
        self._num_shares = num_shares
        self._known = begin  # Up to here all steps are divided alike.
        self._end = end
        self._unlike: int | None = None

    def num_micro(self, step: int) -> int:
        """Return into how many micro-batches a step is cut."""
        return max(member.num_micro(step) for member in self._members)

    def num_alike(self, step: int) -> int:
        """Return how many steps are cut alike, this one the first."""
        return min(member.num_alike(step) for member in self._members)

    def sizes(self, step: int) -> tuple[int, ...]:
        """Return the samples of each loader in a step."""
        return tuple(member.batches.size(step) for member in self._members)

    def unlike_step(self, step: int) -> int | None:
        """Return a step whose batches do not divide alike, if one is in sight.

        Steps ahead of `step` are looked at, too, so that a program does not learn only
        at the last batch of its first epoch that its losses need weights of their own.
        """
        if self._unlike is None and step >= self._known:
            are_even = all(isinstance(own, EvenShares) for own in self._members)
            for _ in range(_RUNS_AHEAD):
                if self._known >= self._end:
                    break
                sizes, num_micro = self.sizes(self._known), self.num_micro(self._known)
                are_alike = _divide_alike(sizes, num_micro, self._num_shares)
                if not (are_even and are_alike) and len(sizes) > 1:
                    self._unlike = self._known
                    break
                self._known += self.num_alike(self._known)
        return self._unlike


@lru_cache(maxsize=1024)
def _divide_alike(sizes: tuple[int, ...], num_micro: int, num_shares: int) -> bool:
    """Return whether each micro-batch is the same share of all loaders' batches."""
    if 0 in sizes:  # Whose padding weighs nothing anywhere.
        return not any(sizes)
    if all(size % (num_shares * num_micro) == 0 for size in sizes):
        return True
    cut = [_lengths_of_pieces(size, num_micro, num_shares) for size in sizes]
    return all(
        length * sizes[0] == first * size
        for size, lengths in zip(sizes, cut, strict=True)
        for length, first in zip(lengths, cut[0], strict=True)
    )


def _lengths_of_pieces(size: int, num_micro: int, num_shares: int) -> list[int]:
    shares = [
        partition(range(size), share, num_parts=num_shares)
        for share in range(num_shares)
    ]
    return [
        len(partition(share, micro, num_parts=num_micro))
        for share in shares
        for micro in range(num_micro)
    ]


@lru_cache(maxsize=256)
def _joined(parts: tuple[MicroBatchInfo, ...]) -> MicroBatchInfo:
    """Return the part that the members' micro-batches are together.

    For equal ones it is the same object, by which a model sees that nothing has changed
    since the last one.
    """
    first = parts[0]
    return MicroBatchInfo(
        micro=first.micro,
        num_valid=sum(part.num_valid for part in parts),
        local_batch_size=sum(part.local_batch_size for part in parts),
        global_batch_size=sum(part.global_batch_size for part in parts),
        is_step=first.is_step,
        num_read=sum(part.num_read for part in parts),
        advance=1,
        weight=first.weight,
        share=first.share,
    )


def _by_key(loaders: Any) -> dict[Any, AdaptiveDataLoader]:
    if isinstance(loaders, Mapping):
        return dict(loaders)
    if not isinstance(loaders, Sequence):  # To look into a loader would begin a loop.
        raise TypeError(
            "a CombinedLoader takes a list or a dictionary of loaders, not one "
            f"{type(loaders).__name__}. Write CombinedLoader([first, second])."
        )
    return dict(enumerate(loaders))


def _check(members: dict[Any, Any], mode: str) -> None:
    if mode in _REFUSED_MODES:
        raise ValueError(
            f"a CombinedLoader has no mode={mode!r}: in its loop each member has a "
            f"batch in each step. {_REFUSED_MODES[mode]}"
        )
    if mode not in _MODES:
        raise ValueError(f"mode={mode!r} is none of {', '.join(map(repr, _MODES))}.")
    if not members:
        raise ValueError("a CombinedLoader without loaders delivers nothing.")
    for key, member in members.items():
        if not isinstance(member, AdaptiveDataLoader):
            raise TypeError(
                f"member {key!r} of a CombinedLoader is a {type(member).__name__}. A "
                "combined loop resumes each member at its sample, which only an "
                "AdaptiveDataLoader can. Make it one; nested collections are not taken."
            )
        need_lengths(member.dataset, f"a CombinedLoader (its member {key!r})")
        if not member.even_batches:
            raise ValueError(
                f"member {key!r} (`{member.name}`) has even_batches=False, so it may "
                "have no batch on a replica where another member has one. Leave "
                "even_batches=False out, or loop over that member by itself."
            )
    if len({id(member) for member in members.values()}) < len(members):
        raise ValueError(
            "a CombinedLoader was given one loader twice. A loader is at one place at "
            "a time. Make a loader for each member; they may share a data set."
        )


def current_dataloader() -> AdaptiveDataLoader | CombinedLoader | None:
    """Return the loader whose loop is running, or None."""
    loader = current_job().loader
    if isinstance(loader, (AdaptiveDataLoader, CombinedLoader)):
        return loader
    return None
