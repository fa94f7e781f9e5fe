"""Decides when the running generation stops, so that its successors take over."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from elasticrun.errors import counted
from elasticrun.launcher.event_loop import EventLoop
from elasticrun.launcher.forks.starter import Starter
from elasticrun.launcher.options import (
    OptionError,
    Options,
    check_batch,
    check_processors,
    check_shares,
)
from elasticrun.launcher.supervisor.generation import Generation
from elasticrun.launcher.supervisor.orders import orders_ahead
from elasticrun.launcher.supervisor.replica_reports import ReplicaReports
from elasticrun.launcher.supervisor.successors import Successors
from elasticrun.launcher.terminal.console import Console

_CALM_SECONDS = 5.0  # A generation that crashes before has other needs than spares.


class Takeover:
    """Decides when the running generation stops for its successors.

    The generation does not know of them. Either they are ready, and the supervisor asks
    it to save and exit; or nobody needs them any more, or one of them fails, and it
    trains on. Among nodes it stops at once. While no other generation is asked for, the
    successors are spares.

    Args:
        on_ready: Called when all successors are there.
        on_prepared: Called with the reason when the running generation is to save and
            exit.

    Attributes:
        size: How many replicas the next generation gets on this node.
        successors: The replicas that wait for it.
        is_preparing: Whether the running generation is to stop once its successors are
            ready.
    """

    def __init__(
        self,
        options: Options,
        loop: EventLoop,
        *,
        starter: Starter,
        console: Console,
        reports: ReplicaReports,
        on_ready: Callable[[], None],
        on_prepared: Callable[[str], None],
    ) -> None:
        self.size = options.replicas.initial
        self.is_preparing = False
        self._options = options
        self._loop = loop
        self._starter = starter
        self._console = console
        self._reports = reports
        self._on_prepared = on_prepared
        self._generation: Generation | None = None  # Unless it was asked to stop.
        self.successors = Successors(
            starter,
            loop,
            orders=partial(orders_ahead, options),
            say=reports.tell,
            on_ready=on_ready,
            on_may_stop=self._on_may_stop,
            on_too_slow=self._on_too_slow,
            on_failed=self._on_failed,
        )
        reports.on_ready.append(self._note_start)
        reports.on_trained.append(self._on_trained)

    def begin(self, generation: Generation) -> None:
        """Note which generation runs from now on."""
        self._generation = generation

    def end(self) -> None:
        """Forget the generation that ran: it has ended, or is asked to."""
        self._generation = None
        self.is_preparing = False

    @property
    def is_rescaling(self) -> bool:
        """Whether the next generation is to have another number of replicas."""
        generation = self._generation if self.is_preparing else None
        return generation is not None and self.size != generation.size

    def prepare(self) -> None:
        """Have successors forked; once they are ready, the running generation stops."""
        generation = self._generation
        if generation is None:
            self.successors.prepare(self.size)
            return
        self.is_preparing = True
        if self._options.nodes is not None:
            self._stop_generation()
        self.successors.prepare(self.size, beside=generation)

    def _stop_generation(self) -> None:
        assert self._generation is not None
        self._on_prepared(_describe(self._generation.size, self.size))

    def scale(
        self,
        size: int,
        generation: Generation | None,
        *,
        elsewhere: int = 0,
        is_forced: bool = False,
    ) -> str:
        """Go on with so many replicas; return what will happen.

        Those that run go on until all of the others need the job. If not all come so
        far, the job goes on with as many as before.

        Args:
            generation: The one that runs; it may have been asked to stop.
            elsewhere: How many there are on other nodes.
            is_forced: Even if there are too few samples, GPUs or cores for them.
        """
        if size == self.size:
            return f"the job has {counted(size, 'replica')} already"
        num_running = generation.size if generation is not None else 0
        if self.is_preparing and size == num_running:
            return self._stay()
        # What the program itself gives, only its replicas know.
        told = None if generation is None else generation.num_shares
        num_shares = told or self._options.settings.virtual_replicas
        check_shares(size, elsewhere, num_shares)
        if size > self.size and not is_forced:
            self._check_use(size, generation, elsewhere)
        before, self.size = self.size, size
        text = _describe(before, size)
        self._console.event(text)
        if not self.successors.offered:  # Else it is done once these have begun.
            self.prepare()
            if self.size != size:
                raise OptionError(
                    "no replica can be started; the launcher's output says why"
                )
        return text

    def _check_use(
        self, size: int, generation: Generation | None, elsewhere: int
    ) -> None:
        """Refuse more replicas than have something to do."""
        uses_gpus = generation is not None and generation.uses_gpus
        check_processors(size, uses_gpus=uses_gpus)
        if generation is not None:
            check_batch(size, elsewhere, generation.batch_size)

    def _stay(self) -> str:
        """Cancel a rescaling of which the running generation knows nothing yet."""
        assert self._generation is not None
        before = self.size
        self._call_off()
        text = f"staying at {counted(self.size, 'replica')}, not {before}"
        self._console.event(text)
        return text

    def give_up(self) -> None:
        """Discard the successors, since not all of them can be started."""
        self.successors.discard()
        self.is_preparing = False

    def _call_off(self) -> None:
        assert self._generation is not None
        self.is_preparing = False
        self._discard_successors()
        self.size = self._generation.size
        self._keep_spares()

    def _discard_successors(self) -> None:
        self.successors.discard()
        if self._generation is not None:
            self._starter.note_running([each.pid for each in self._generation.running])

    def _keep_spares(self) -> None:
        """Keep spares, if the job is to have any."""
        generation, spares = self._generation, self._options.spares
        if (
            spares
            and not self.is_preparing
            and generation is not None
            and generation.has_trained
        ):
            self.successors.prepare_spares(generation, runs_ahead=spares == "prepared")

    # What is heard from the generation that runs.

    def _note_start(self, generation: Generation) -> None:
        self.successors.note_start(time.monotonic() - generation.started_at)

    def _on_trained(self, generation: Generation) -> None:
        def keep_spares() -> None:
            if generation is self._generation and not self.successors.spares:
                self._keep_spares()

        self._loop.call_later(_CALM_SECONDS, keep_spares)

    # What is heard from the successors.

    def _on_may_stop(self) -> None:
        """Stop the generation for them: they wait, or cannot run beside it."""
        if self.is_preparing:
            self._stop_generation()

    def _on_too_slow(self, why: str) -> None:
        """Stop the running generation: they may never be ready beside it."""
        if self.is_preparing:
            self._reports.tell(f"{why}; the running replicas stop for them now")
            self._stop_generation()

    def _on_failed(self, why: str) -> None:
        """Let the running generation go on, unless it was asked to stop."""
        may_rehearse = self.successors.may_rehearse
        if self.is_preparing:
            self._call_off()
            first = "" if may_rehearse else "; the next rescaling stops them first"
            why = (
                f"a new replica failed, so the running ones go on{first}. It was {why}"
            )
            self._reports.tell(why, is_over=True)
        elif self.successors.is_requested:
            self._console.event(
                f"a new replica failed, so others are started. It was {why}"
            )
            self.successors.prepare(self.size)
        elif self._options.spares != "prepared":  # Nobody has asked for them.
            self._discard_successors()
        else:
            more = "others take their place" if may_rehearse else "there are no more"
            self._console.event(f"a spare failed; {more}. It was {why}")
            self._discard_successors()
            self._keep_spares()


def _describe(before: int, size: int) -> str:
    return f"rescaling from {before} to {counted(size, 'replica')}"
