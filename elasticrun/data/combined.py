"""`CombinedLoader`: several loaders in one loop, which has one place."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

from elasticrun.checkpoint.seeding import derive_seed
from elasticrun.data.arguments import check_place, check_progress_bar
from elasticrun.data.loader import AdaptiveDataLoader
from elasticrun.data.loop import NO_BATCH, RunningLoop, trace_batch
from elasticrun.data.looped import Looped
from elasticrun.data.order.batches import MAX_LISTS, Batches, EqualBatches
from elasticrun.data.order.plan import NOTHING, Order
from elasticrun.data.order.together import Participant, Together
from elasticrun.errors import ElasticRunError, LoopOrderError
from elasticrun.job.current import current_job
from elasticrun.job.job import Job
from elasticrun.job.loop import MicroBatch, Part
from elasticrun.job.trace import Trace

Mode = Literal["min_size", "max_size", "max_size_cycle", "sequential"]
_MODES = get_args(Mode)


class CombinedLoader(Looped):
    """Several loaders in one loop: each turn delivers a batch of each of them.

        both = CombinedLoader({"labeled": labeled, "unlabeled": unlabeled})
        for batch in both:
            x, y = batch["labeled"]
            ...

    A turn delivers the batches in the form in which the members were given: a
    dictionary, or a list. Global batch k of each member in the loop depends on (seed,
    epoch, loop, k) alone, as in a loop over one. Where `max_local_batch_size` cuts the
    batch of one member, the others' are cut into as many micro-batches. A member is at
    its own place in the loop: `labeled.num_valid`, `labeled.batch_index` and the like
    mean its part.

    Losses over different members need weights of their own where the members' batches
    do not divide alike among the replicas and micro-batches, as 8 and 16 samples among
    3 replicas: `model.weigh(loss, member=labeled)`, or with a DDP or FSDP of the
    program's own a factor of `labeled.loss_weight`. Otherwise the first backward pass
    raises an error, before anything is trained.

    With `batches(n)` each member delivers the next batches of endless passes, which are
    others than those of `batches` of the member itself.

    Collective: make and iterate it on every replica, in the same order.
    Replay: as a loop over one loader; all members continue at the same step.

    Args:
        loaders: The members, by keys or in a row.
        mode: When a loop ends, in the words of Lightning: "min_size" with the shortest
            member; "max_size" with the longest, where members that have come to their
            end deliver None; "max_size_cycle" with the longest, while the others begin
            again, in a new order; "sequential" delivers one member after another, the
            batch alone, and `member` says whose it is.
        name: What it is called in checkpoints and messages, as with a loader.
        progress: Show a tqdm bar on rank 0.

    Raises:
        ImportError: `progress` needs tqdm.
        TypeError: A member is no AdaptiveDataLoader, or they are no collection.
        ValueError: There are no members, or one is given twice, or has
            `even_batches=False` beside others, or there is no such mode.
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
        check_place(job, name)
        self._is_list = not isinstance(loaders, Mapping)
        self._members: dict[str | int, AdaptiveDataLoader] = members
        self._mode: Mode = mode
        self._together: Together | None = None
        names = [[key, member.name] for key, member in members.items()]
        Looped.__init__(
            self,
            job,
            name=name,
            batches=_Steps(list(members.values()), mode),
            seed=0,
            fingerprint={"mode": mode, "members": names},
            made={},
            progress=progress,
        )

    # What the loop body may ask, beside what `Looped` says.

    @property
    def member(self) -> str | int | None:
        """With "sequential", the key or number of the member that delivers; or None."""
        if self._mode == "sequential":
            for key, member in self._members.items():
                if _delivers(member):
                    return key
        return None

    @property
    def loss_weight(self) -> float:
        """What to multiply a mean loss with under a DDP or FSDP of the program's own.

        Raises:
            ElasticRunError: Losses over different members have different ones.
        """
        if not self.has_one_weight:
            raise ElasticRunError(self._why_weights_differ())
        delivering = filter(_delivers, self._members.values())
        return next((member.loss_weight for member in delivering), 1.0)

    @property
    def has_one_weight(self) -> bool:
        """Whether all losses have one weight, here and in steps that are in sight."""
        if self._together is None:  # Outside of a loop, or with one at a time.
            return True
        return self._together.unlike_step(self.running_loop.current[0]) is None

    @property
    def even_batches(self) -> bool:
        """Whether every replica takes part in every step."""
        return all(member.even_batches for member in self._members.values())

    def _why_weights_differ(self) -> str:
        assert self._together is not None
        step = self._together.unlike_step(self.running_loop.current[0])
        assert step is not None
        sizes = ", ".join(map(str, self._together.sizes(step)))
        num_micro = self._together.num_micro(step)
        pieces = f"{current_job().world_size} replicas"
        if num_micro > 1:
            pieces += f" and {num_micro} micro-batches"
        key, member = next(iter(self._members.items()))
        return (
            f"the batches of `{self.name}` ({self.where}) in its step "
            f"{step - self.running_loop.first} have {sizes} samples, which do not "
            f"divide alike among {pieces}: one weight for all losses would be wrong. "
            "Weigh each loss by the member whose samples it is a mean over, as "
            f"model.weigh(loss, member={key if isinstance(key, str) else member.name}),"
            " or under a DDP or FSDP of your own by that member's loss_weight; or give "
            "the members batch sizes that divide, and drop_last=True."
        )

    # How loops are read.

    def _start(self, loop: RunningLoop) -> tuple[deque[MicroBatch], Iterator[Any]]:
        in_flight: deque[MicroBatch] = deque()
        if self._mode == "sequential":
            return in_flight, self._one_after_another(loop, in_flight)
        return in_flight, self._side_by_side(loop, in_flight)

    def _side_by_side(
        self, loop: RunningLoop, in_flight: deque[MicroBatch]
    ) -> Iterator[Any]:
        """Start to read all members; return what delivers a batch of each of them."""
        members = list(self._members.values())
        loops = [self._of_member(*each, loop) for each in enumerate(members)]
        self._together = together = Together(
            [
                Participant(own.batches, member._shares, own.end)
                for member, (own, _) in zip(members, loops, strict=True)
            ],
            begin=loop.begin,
        )
        is_cut = any(member._shares.max_local_batch_size for member in members)
        reads = [
            member._read(own, order, together if is_cut else None)
            for member, (own, order) in zip(members, loops, strict=True)
        ]
        return self._zipped(loop, in_flight, reads)

    def _of_member(
        self,
        number: int,
        member: AdaptiveDataLoader,
        loop: RunningLoop,
        *,
        before: int = 0,
    ) -> tuple[RunningLoop, Order]:
        """Put a member into its part of a loop; return that, and its samples' order.

        Args:
            before: The step in which its first batch is delivered.
        """
        assert loop.start is not None
        epoch = loop.start.epoch
        key = derive_seed(member.seed, loop.key, number)
        own = member._order
        batches: Batches
        begin, end = loop.begin, loop.end
        if loop.is_endless:
            batches, order = own.endless_batches(key), own.endless_order(key)
        elif self._mode == "sequential":
            batches, order = own.batches(epoch, key), own.order(key)
            begin, end = max(begin - before, 0), len(batches)
        else:
            batches, order = own.cycled(epoch, key)
            if self._mode == "max_size":
                end = len(own.batches(epoch))
        member.running_loop = RunningLoop(
            loop.where,
            loop.start,
            batches,
            first=loop.first,
            begin=begin,
            num_batches=end - loop.first,
            key=key,
            part_of=self.name,
        )
        return member.running_loop, order

    def _zipped(
        self,
        loop: RunningLoop,
        in_flight: deque[MicroBatch],
        reads: list[tuple[deque[MicroBatch], Iterator[Any]]],
    ) -> Iterator[Any]:
        """Yield a batch of each member; None of those that have come to their end."""
        members = list(self._members.items())
        for step in range(loop.begin, loop.end):
            is_step = False
            while not is_step:
                turn: dict[str | int, Any] = {}
                for (key, member), (own, batches) in zip(members, reads, strict=True):
                    running = member.running_loop
                    turn[key], running.current = None, NO_BATCH
                    if step < running.end:
                        turn[key] = next(batches)
                        running.current = own.popleft()
                part = _joined(
                    tuple(
                        member.running_loop.part
                        for _, member in members
                        if _delivers(member)
                    )
                )
                is_step = part.is_step
                in_flight.append((step, None, part))
                yield list(turn.values()) if self._is_list else turn

    def _one_after_another(
        self, loop: RunningLoop, in_flight: deque[MicroBatch]
    ) -> Iterator[Any]:
        """Yield the batches of one member after those of another."""
        assert loop.start is not None
        before = 0
        for number, member in enumerate(self._members.values()):
            num_batches = len(member._order.batches(loop.start.epoch))
            if loop.begin < before + num_batches:
                running, order = self._of_member(number, member, loop, before=before)
                own, batches = member._read(running, order)
                for batch in batches:
                    while True:
                        batch_index, indices, part = running.current = own.popleft()
                        step = before + batch_index
                        in_flight.append((step, indices, _as_step(part)))
                        if indices is not NOTHING:
                            break
                    yield batch
                in_flight.extend(
                    (before + batch_index, NOTHING, _as_step(part))
                    for batch_index, _, part in own
                )
                del batches
                _let_go(member)
            before += num_batches

    def _stop(self) -> None:
        for member in self._members.values():
            if member.running_loop.part_of == self.name:
                _let_go(member)
        self._together = None

    def _trace(self, trace: Trace) -> None:
        for member in self._members.values():
            if _delivers(member):
                trace_batch(
                    trace,
                    member.running_loop,
                    batch=self.batch_index,
                    member=member.name,
                )

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
        if self._mode == "sequential":
            raise ValueError(
                "batches() of a CombinedLoader with mode='sequential': the first "
                "member's passes have no end, so no other one would come. Loop over "
                "the members one after another, or take another mode."
            )
        for member in self._members.values():
            member._check_endless()


@dataclass(eq=False)
class _Steps:
    """The steps of a combined loader's loops; each is one of the index."""

    members: Sequence[AdaptiveDataLoader]
    mode: Mode

    def batches(self, epoch: int, key: int = 0) -> EqualBatches:
        del key
        lengths = [len(member._order.batches(epoch)) for member in self.members]
        if self.mode == "sequential":
            return EqualBatches(sum(lengths), 1)
        if self.mode == "min_size":
            return EqualBatches(min(lengths), 1)
        if self.mode == "max_size_cycle" and 0 in lengths and any(lengths):
            member = self.members[lengths.index(0)]
            raise ValueError(
                f"`{member.name}` is to begin again until the longest member ends "
                "(mode='max_size_cycle'), but has no batch: its samples do not make "
                "one, and it has drop_last=True. Leave drop_last out, or take smaller "
                "batches."
            )
        return EqualBatches(max(lengths), 1)

    def endless_batches(self, key: int = 0) -> EqualBatches:
        del key
        return EqualBatches(MAX_LISTS, 1)


def _delivers(member: AdaptiveDataLoader) -> bool:
    """Return whether a member has a batch in this turn."""
    return member.running_loop.part.global_batch_size > 0


def _let_go(member: AdaptiveDataLoader) -> None:
    """Stop reading a member, which is in no loop then."""
    try:
        member._stop()
    finally:
        member.running_loop = RunningLoop()


@lru_cache(maxsize=256)
def _joined(parts: tuple[Part, ...]) -> Part:
    """Return the part that the members' micro-batches are together.

    For equal ones it is the same object, by which a model sees that nothing has changed
    since the last one.
    """
    first = parts[0]
    return Part(
        micro=first.micro,
        num_valid=sum(part.num_valid for part in parts),
        local_batch_size=sum(part.local_batch_size for part in parts),
        global_batch_size=sum(part.global_batch_size for part in parts),
        is_step=first.is_step,
        num_read=sum(part.num_read for part in parts),
        advance=1,
    )


@lru_cache(maxsize=256)
def _as_step(part: Part) -> Part:
    return part._replace(advance=1)


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
        if mode != "sequential" and not member.even_batches:
            raise ValueError(
                f"member {key!r} (`{member.name}`) has even_batches=False, so it may "
                "have no batch on a replica where another member has one. Leave "
                "even_batches=False out, or take mode='sequential'."
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
