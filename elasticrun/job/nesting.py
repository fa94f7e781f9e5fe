"""The loops that are open: the outermost one, and those inside its body."""

from __future__ import annotations

from dataclasses import dataclass

from elasticrun.errors import LoopOrderError
from elasticrun.job.loop import LoopedLoader


@dataclass
class _Open:
    """An open loop over a loader.

    Attributes:
        key: What tells a loop inside another one from all others there: for each loop
            around it, the batch it began in and how many had begun there before.
        batch: The batch in which a loop inside this one began last.
        num_inside: How many have begun in that batch.
    """

    loader: LoopedLoader
    key: tuple[int, ...]
    batch: int = -1
    num_inside: int = 0


class OpenLoops:
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
    def outermost(self) -> LoopedLoader | None:
        """The loader of the loop that the position is in; from any thread."""
        return next((each.loader for each in self._open), None)

    @property
    def innermost(self) -> LoopedLoader | None:
        """The loader of the loop whose body runs."""
        return self._open[-1].loader if self._open else None

    def has(self, loader: LoopedLoader) -> bool:
        """Return whether a loop over a loader is open."""
        return any(each.loader is loader for each in self._open)

    def begin(self, loader: LoopedLoader, where: str) -> tuple[int, ...]:
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

    def end(self, loader: LoopedLoader) -> None:
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

    def overlap_error(self, loader: LoopedLoader) -> LoopOrderError:
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
