"""Where the program is: in which epoch, in which loops, and what it has finished."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from elasticrun.checkpoint.position import STEPS_OF, Position
from elasticrun.errors import LoopOrderError
from elasticrun.job.loop import LoaderInLoop, LoopEnd


class Progress:
    """Where the program is: replayed up to the position to resume at, then on.

    Pure bookkeeping. `begin_loop` says whether a loop is skipped (finished before the
    restart), continued, or new; `position` is what a checkpoint has to hold.

    Attributes:
        index: That of the running loop, which moves it on after each global batch or
            step.
        has_arrived: Whether a replay has come, between two loops, to where the
            checkpoint was written, though not to what the program does next.
        num_epochs: Where the last epoch loop is to end, or None.
        num_begun_epochs: How often this process has entered an epoch.
        num_begun_loops: How often it has entered a loop.
    """

    def __init__(self, resume: Position | None = None) -> None:
        self._resume = resume
        # Where the program is; during replay that is before `_resume`. Its index is in
        # `index`, which changes with each batch.
        self._here = Position()
        self.index = 0
        self._num_before = 0  # See `num_passed`.
        self._before_epoch = Position()  # Where the running epoch began.
        self._num_epoch_loops = 0
        self._is_asked = False  # Whether a loader's own state said where to resume.
        self._is_in_loop = False  # Whether one has begun, and neither ended nor left.
        self._has_left_epoch = False  # By an exception, which may have been caught.
        self.has_arrived = False
        self.num_epochs: int | None = None
        self.num_begun_epochs = 0
        self.num_begun_loops = 0

    @property
    def position(self) -> Position:
        """The position to save; during replay still the one to resume at."""
        resume = self._resume  # Read once: other threads ask, too.
        if resume is not None:
            return resume
        here = object.__new__(Position)  # At each boundary: `replace` takes 1 us.
        vars(here).update(vars(self._here), index=self.index)
        return here

    @property
    def is_replaying(self) -> bool:
        """Whether the program has yet to move on from the position to resume at."""
        return self._resume is not None

    @property
    def is_at_place(self) -> bool:
        """Whether a replay has come to the place, between loops, to resume at."""
        resume = self._resume
        if resume is None or resume.loader:
            return False
        return resume.place == self._here.place

    @property
    def is_done_already(self) -> bool:
        """Whether what the program does now was done before the checkpoint was written.

        So it is while it is replayed, unless it has come to where that was, between
        two loops.
        """
        return self.is_replaying and not self.has_arrived

    @property
    def num_passed(self) -> int:
        """Samples and steps since the start of this process, of all loops together."""
        return self._num_before + self.index

    def _set_index(self, index: int) -> None:
        self._num_before, self.index = self._num_before + self.index - index, index

    @property
    def body(self) -> tuple[int, ...]:
        """What tells the body that runs, or runs first after a restart, from others."""
        position = self.position
        return (*position.place, position.index)

    def next_index(self, loader: str) -> int:
        """Return the index at which a loop over a loader would begin now."""
        resume = self._resume
        if resume is None or resume.place != self._here.place:
            return 0
        return resume.index if _is_same(resume.loader, loader) else 0

    @property
    def finished_epochs(self) -> int:
        """Epochs that the program has finished or skipped."""
        return self._here.finished_epochs

    @property
    def place(self) -> tuple[int, int, bool]:
        """Where the program is, which during replay is before `position`."""
        return self._here.place

    def resume_at(self, position: Position) -> None:
        """Let the program go on at `position`, as a loader's own state asks.

        Loops outside epochs are not replayed: the next one is the one to continue.
        """
        pending = self._resume
        if self._is_in_loop:
            raise LoopOrderError(
                f"a loop is running ({self.position}), so the job cannot go to "
                f"{position}. Load the states of loaders before the first loop."
            )
        if pending is not None and pending.loader != position.loader:
            self._check_is_one_place(pending, position)
            if pending.place == position.place and pending.loader:
                return
        if position.in_epoch and position.place < self._here.place:
            raise LoopOrderError(
                f"the program is at {self._here} and cannot go back to {position}. "
                "Load the states of loaders before the first epoch loop."
            )
        self._has_left_epoch = self.has_arrived = False
        self._resume = position
        self._is_asked = True
        if not position.in_epoch:
            self._here = replace(position, index=0, loader="")

    def _check_is_one_place(self, pending: Position, position: Position) -> None:
        """Refuse the states of two loaders that were not taken at the same moment."""
        if pending.loader and position.loader:
            raise LoopOrderError(
                f"`{position.loader}` is to continue at {position}, but "
                f"`{pending.loader}` at {pending}. A job has one position, so it "
                "cannot continue two loops at once. Load states that were taken at "
                "the same moment."
            )
        if self._is_asked and pending.place != position.place:
            raise LoopOrderError(
                f"one loader's state resumes at {position}, another one's at "
                f"{pending}. A job has one position. Load states that were taken at "
                "the same moment."
            )

    def skip_epochs(self, limit: int) -> int:
        """Walk past the epochs below `limit` that were finished before the restart.

        Returns:
            The number of the next epoch, which is at least `limit` if none remains.
        """
        if self._has_left_epoch:  # It is entered once more, as after a restart.
            self._has_left_epoch = self.has_arrived = False
            self._resume = self.position
            self._here = self._before_epoch
        resume = self._resume
        if resume is None:
            return self._here.finished_epochs
        # Of an epoch loop that `break` has left nothing remains, below `limit` or not.
        left_after = dict(resume.breaks).get(self._num_epoch_loops)
        finished = min(resume.finished_epochs, left_after or limit)
        if finished > self._here.finished_epochs:
            self._here = replace(self._here, breaks=resume.breaks).after_epochs(
                finished
            )
        return self._here.finished_epochs if left_after is None else limit

    def begin_epoch(self) -> None:
        """Enter the next epoch."""
        self.num_begun_epochs += 1
        self._pass_left_loop()
        self._before_epoch = self._here
        self._move(replace(self._here, in_epoch=True))

    def end_epoch(self) -> None:
        """Finish the epoch."""
        self._move(self._here.after_epochs(self._here.finished_epochs + 1))

    def end_epoch_loop(self, *, is_left: bool = False) -> None:
        """Leave the epoch loop after an epoch, by `break` or because none remains."""
        if is_left:
            pair = (self._num_epoch_loops, self._here.finished_epochs)
            self._here = replace(self._here, breaks=(*self._here.breaks, pair))
        self._num_epoch_loops += 1

    def leave_epoch(self) -> None:
        """Leave the epoch unfinished: an exception went through it.

        The next epoch loop continues it as after a restart; a loop outside gives it up.
        """
        self._has_left_epoch = True

    def begin_loop(self, loader: str, *, start: int = 0) -> Position | None:
        """Begin the next loop.

        Args:
            start: The index at which it starts if it does not continue.

        Returns:
            The position the loop starts at (its index is above `start` when it
            continues), or None when it was finished before the restart and has to be
            skipped.
        """
        if self._has_left_epoch:  # A loop outside of epochs gives that one up.
            self._has_left_epoch = False
            self._move(self._here.after_epochs(self._here.finished_epochs + 1))
        self._pass_left_loop()
        resume = self._resume
        if resume is not None and self._here.place < resume.place:
            self._pass_loop()
            return None
        self._check_reached(self._here)
        index = start
        if resume is not None and resume.loader:
            if not _is_same(resume.loader, loader):
                raise LoopOrderError(
                    f"the checkpoint stopped in {resume}, but now that loop is over "
                    f"`{loader}`. Samples would be skipped or seen twice. Keep loaders "
                    "and loops in their order (a name= keeps a loader's identity), or "
                    "start anew with another checkpoint directory."
                )
            index = resume.index
        self._enter(loader, index)
        return self.position

    def pass_loops(self, finished_loops: int) -> None:
        """Walk past the loops before number `finished_loops` that a replay repeats."""
        self._stand_behind(finished_loops)

    def reopen_loop(self, loader: str, index: int) -> bool:
        """Enter the loop again that has just been skipped, which goes on at `index`.

        Returns:
            Whether the program stands right behind it; if not, more has come after it.
        """
        resume = self._resume
        if resume is None or resume.loader or resume.place != self._here.place:
            return False
        self._stand_behind(self._here.finished_loops - 1)
        self._enter(loader, index)
        return True

    def _enter(self, loader: str, index: int) -> None:
        self.num_begun_loops += 1
        self._here = replace(self._here, loader=loader)
        self._set_index(index)
        self._is_in_loop = True
        self._resume = None

    def end_loop(self, *, is_finished: bool) -> None:
        """Leave the loop; unfinished when an exception went through it."""
        self._is_in_loop = False
        # An iterator that a variable holds is closed after the exception was caught.
        if is_finished and not self._has_left_epoch:
            self._pass_loop()

    def _pass_left_loop(self) -> None:
        """Count a loop as finished that an exception has left: the program moves on."""
        if self._here.loader:
            self._pass_loop()

    def _pass_loop(self) -> None:
        self._set_index(0)
        self._stand_behind(self._here.finished_loops + 1)

    def _stand_behind(self, finished_loops: int) -> None:
        here = self._here
        self._here = replace(here, finished_loops=finished_loops, index=0, loader="")

    def _move(self, cursor: Position) -> None:
        self._check_reached(cursor)
        self._here = replace(cursor, loader="")
        self._set_index(0)
        if self._resume is not None and cursor.place > self._resume.place:
            self._resume = None

    def _check_reached(self, cursor: Position) -> None:
        resume = self._resume
        if resume is not None and resume.loader and cursor.place > resume.place:
            raise LoopOrderError(
                f"the checkpoint stopped in {resume}, but the program went on to "
                f"{cursor} without that loop. Samples would be lost. Keep the loops of "
                "the program as they were, or start anew with another checkpoint "
                "directory."
            )


def _is_same(saved: str, loader: str) -> bool:
    """Compare loaders of positions; in older ones a combined one has no `STEPS_OF`."""
    return saved.removeprefix(STEPS_OF) == loader.removeprefix(STEPS_OF)


@dataclass
class _Open:
    """An open loop over a loader.

    Attributes:
        key: What tells a loop inside another one from all others there: for each loop
            around it, the batch it began in and how many had begun there before.
        batch: The batch in which a loop inside this one began last.
        num_inside: How many have begun in that batch.
        end: Ends it, where Python does not since a variable holds its iterator; None of
            a loop that elasticrun does not own.
        is_for: Whether a `for` runs it, and no call of `next`.
    """

    loader: LoaderInLoop
    key: tuple[int, ...]
    batch: int = -1
    num_inside: int = 0
    end: Callable[[LoopEnd], None] | None = None
    is_for: bool = False


class LoopStack:
    """The loops that have begun and not ended, each in the body of the one before."""

    def __init__(self) -> None:
        self._open: list[_Open] = []

    @property
    def why_no_boundary(self) -> str | None:
        """What a boundary waits for, if it is the end of an inner loop."""
        outermost = self._open[:2]  # Looked at once: other threads ask, too.
        if len(outermost) < 2:
            return None
        outer, inner = (each.loader for each in outermost)
        return (
            f"the loop over `{inner.name}` ({inner.where}) runs in the body of that "
            f"over `{outer.name}` ({outer.where}), and a stop waits for its end"
        )

    @property
    def inside(self) -> list[int]:
        """The number of the current batch of each inner loop."""
        return [each.loader.batch_index for each in self._open[1:]]

    @property
    def outermost(self) -> LoaderInLoop | None:
        """The loader of the loop that the position is in; from any thread."""
        return next((each.loader for each in self._open), None)

    @property
    def innermost(self) -> LoaderInLoop | None:
        """The loader of the loop whose body runs."""
        return self._open[-1].loader if self._open else None

    def has(self, loader: LoaderInLoop) -> bool:
        """Return whether a loop over a loader is open."""
        return any(each.loader is loader for each in self._open)

    def begin(self, loader: LoaderInLoop, where: str) -> tuple[int, ...]:
        """Open a loop in the body of the innermost one; return its key."""
        if self.has(loader):
            raise LoopOrderError(
                f"the loop over `{loader.name}` ({where}) began while another one over "
                f"it ({loader.where}) was at batch {loader.batch_index}. A loader is "
                "at one place at a time. Leave the first loop before you start the "
                "second, and do not keep its iterator; or make another loader."
            )
        key: tuple[int, ...] = ()
        if self._open:
            outer = self._open[-1]
            batch = outer.loader.batch_index
            if batch != outer.batch:
                outer.batch, outer.num_inside = batch, 0
            key = (*outer.key, batch, outer.num_inside)
            outer.num_inside += 1
        self._open.append(_Open(loader, key))
        return key

    def end(self, loader: LoaderInLoop) -> None:
        """Close a loop and what is open inside it; one that is not open stays so.

        Whoever has kept an iterator may close it after the loop around it has ended.
        """
        for number, each in enumerate(self._open):
            if each.loader is loader:
                del self._open[number:]
                return

    def clear(self) -> None:
        """Close all."""
        self._open.clear()

    def hold(self, end: Callable[[LoopEnd], None], *, is_for: bool) -> None:
        """Keep what ends the innermost loop."""
        self._open[-1].end, self._open[-1].is_for = end, is_for

    def leave_held(self) -> None:
        """End a `for` that `break` has left while a variable holds its iterator.

        At the end of an epoch nothing else is possible. Where another loop has begun
        since, that one was taken for a part of its last batch, and would have had no
        place in the position.
        """
        if len(self._open) != 1:
            return
        held = self._open[0]
        has_inner = held.num_inside and held.batch == held.loader.batch_index
        if held.end is not None and held.is_for and not has_inner:
            held.end("break")

    def end_all(self) -> None:
        """End what variables still hold, the innermost loop first."""
        for each in reversed(self._open[:]):
            if each.end is not None:
                each.end("exception")

    def overlap_error(self, loader: LoaderInLoop) -> LoopOrderError:
        """Return the error of a loop that goes on though it is not the innermost."""
        inner = self.innermost
        if inner is None or not self.has(loader):
            return LoopOrderError(
                f"the loop over `{loader.name}` ({loader.where}) went on after the "
                "loop around it had ended. It belongs to one batch of that loop, so it "
                "could not resume. Do not keep its iterator."
            )
        return LoopOrderError(
            f"the loop over `{loader.name}` ({loader.where}) went on while the loop "
            f"over `{inner.name}` ({inner.where}) was at batch {inner.batch_index}, "
            "which had begun in its body. A job has one position, so it cannot resume "
            "two loops at once. Let the inner loop end, or leave it, before the outer "
            "one goes on, and do not keep its iterator. To draw from two loaders in "
            "one step, iterate both together with a CombinedLoader."
        )
