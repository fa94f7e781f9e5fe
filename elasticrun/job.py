"""The job: one replica's view of everything, and what happens at a boundary."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from elasticrun.checkpoint.draft import Checkpoint
from elasticrun.checkpoint.generators import Generators
from elasticrun.checkpoint.place import Place
from elasticrun.checkpoint.state import BaseState
from elasticrun.control.agreement import CHECKPOINT, STOP
from elasticrun.control.gate import Decision, Gate
from elasticrun.control.store import JobStore
from elasticrun.control.watcher import Watcher
from elasticrun.env import Environment, read_environment, with_settings
from elasticrun.errors import LoopOrderError
from elasticrun.joining import join
from elasticrun.late_error import LateError
from elasticrun.opening import (
    Start,
    check_all_have_directory,
    log_start,
    make_store,
    open_directory,
)
from elasticrun.pace import Pace
from elasticrun.position import Position, Progress
from elasticrun.postponing import Postponement
from elasticrun.registry import Registry
from elasticrun.saves import PATIENCE, Saves
from elasticrun.saving import Saver
from elasticrun.schedule import Schedule
from elasticrun.settings import check_checkpoint_dir, parse_trust_pickle
from elasticrun.stops import Stops
from elasticrun.trace import Trace

if TYPE_CHECKING:
    from elasticrun.data.loader import AdaptiveDataLoader

EXIT_CODE_ASKED = 75


class Job:
    """One replica's view of the job: environment, states, checkpoints, position.

    Making one joins the other replicas (a collective), takes the checkpoint directory,
    and starts to watch for signals; `close` gives all of it back.

    Args:
        environment: Read from the process's variables if None.
        checkpoint_dir: Where checkpoints are kept; None for the environment's, and
            without one nothing is saved.
        save_interval: Seconds between checkpoints, 0 for every boundary, "auto", "off"
            for none by time; None for the environment's or 300.
        save_every: Also after so many global batches, or at the end of each "epoch".
        keep: How many checkpoints are kept; None for the environment's or 3.
        keep_every: Checkpoints whose numbers divide by it stay for ever.
        keep_best: A value in `Variables` and "max" or "min": the best one stays.
        async_save: Whether training goes on while a checkpoint is written; None for the
            environment's or True.
        trust_pickle: States that may hold any object; loading them executes code.
        backend: "gloo", "nccl", or "auto": NCCL where each replica has a GPU.

    Attributes:
        pid: The process that made the job; a fork of it is not a replica.
        generation: The number of this start of the job.
        has_resumed: Whether it began with a checkpoint.
        start: The position at which it began, that of the checkpoint if it had one.
        loader: The loader whose loop is running, or None.
        is_in_epoch: Whether an epoch loop's body is running.
        trust_pickle: The names of states that are unpickled when they load.
        num_loaders: Loaders made so far without a name.
        pace: How long this replica works by itself in a step.
        postponement: What saves and stops wait for.
        late_error: What could not be raised where it happened.

    Raises:
        CheckpointError: The directory cannot be used, or replicas see it differently.
        ValueError: An argument or a variable is not what it should be.
    """

    def __init__(
        self,
        environment: Environment | None = None,
        *,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        save_interval: float | str | None = None,
        save_every: int | str | None = None,
        keep: int | None = None,
        keep_every: int | None = None,
        keep_best: tuple[str, str] | str | None = None,
        async_save: bool | None = None,
        trust_pickle: Iterable[str] = (),
        backend: str = "auto",
    ) -> None:
        check_checkpoint_dir(checkpoint_dir)
        environment = environment or read_environment()
        environment = with_settings(
            environment,
            save_interval=save_interval,
            save_every=save_every,
            keep=keep,
            keep_every=keep_every,
            keep_best=keep_best,
            async_save=async_save,
        )
        self.trust_pickle = parse_trust_pickle(trust_pickle)
        self._membership = join(environment, backend=backend)
        self.environment = self._membership.environment
        self.device = self._membership.device
        self.pid = os.getpid()
        self.loader: AdaptiveDataLoader | None = None
        self.is_in_epoch = False
        self.is_closed = False
        self.num_loaders = 0
        self.pace = Pace()
        self.postponement = Postponement()
        self.late_error = LateError()
        self._restores_at_loop = False
        self._registry = Registry(self.rank)
        self._directory = make_store(checkpoint_dir, environment)
        try:
            self._open()
        except BaseException:
            self._let_go()
            raise

    def _open(self) -> None:
        """Take the directory, read where to resume, and start to watch."""
        check_all_have_directory(self._membership, has_one=self._directory is not None)
        start = Start.afresh()
        self._saver: Saver | None = None
        if self._directory is not None:
            start = open_directory(self._directory, self._membership)
            self._saver = Saver(
                self._directory,
                self._registry,
                self._membership,
                start,
                is_async=self.environment.async_save,
            )
        self.generation = start.generation
        self.has_resumed = start.newest is not None
        self.start = start.position or Position()
        self.progress = Progress(start.position)
        self._generators = Generators(self.device)
        self._register_generators(start.newest)
        self._schedule = Schedule(
            self.environment,
            generation=self.generation,
            is_saving=self._saver is not None,
        )
        if self._schedule.auto is not None:
            self.register(self._schedule.auto)
        self.trace = self._open_trace()
        self._gate = Gate()
        self._watcher = Watcher(
            self._gate,
            rank=self.rank,
            world_size=self.world_size,
            links=self._membership.links,
            grace=self.environment.grace,
            save_interval=self._schedule.interval,
            describe=lambda: f"at {self.progress.position}",
            on_gone=self._on_gone,
            is_saving=lambda: self._saver is not None and self._saver.is_busy,
        )
        self._saves = Saves(
            self._saver, self._schedule, self.progress, self._gate, self._watcher
        )
        self._stops = Stops(
            self._saves,
            self._watcher,
            self.progress,
            rank=self.rank,
            grace=self.environment.grace,
        )
        self._watcher.start()
        log_start(start, self.environment)

    def _let_go(self) -> None:
        """Give back what others may need: the directory, and the other replicas."""
        if self._directory is not None:
            self._directory.release()
        self._membership.leave()

    # Where this replica stands.

    @property
    def rank(self) -> int:
        """This replica's rank."""
        return self.environment.rank

    @property
    def world_size(self) -> int:
        """The number of replicas."""
        return self.environment.world_size

    @property
    def stopped_with(self) -> int | None:
        """The exit code with which the job has stopped, or None."""
        return self._stops.code

    @property
    def store(self) -> JobStore | None:
        """The job's key-value store; None for a replica that is alone."""
        return self._membership.store

    # States.

    @property
    def newest_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint of the job that is committed, or None."""
        return None if self._saver is None else self._saver.newest

    @property
    def num_failed_saves(self) -> int:
        """How many saves of this generation came to nothing."""
        return 0 if self._saver is None else self._saver.num_failed

    @property
    def has_failed_save(self) -> bool:
        """Whether the last save, as that of a stop, came to nothing."""
        return self._saver is not None and self._saver.has_failed

    def register(self, state: BaseState) -> bool:
        """Keep a state in every checkpoint; load it and return whether it was there.

        Raises:
            StateNameError: Its name is taken.
            CheckpointError: Its file is damaged or does not fit.
        """
        self._registry.add(state)
        state.trusts_pickle = state.name in self.trust_pickle
        return self.load(state)

    def load(self, state: BaseState) -> bool:
        """Load a state from the newest checkpoint; return whether that had it.

        Waits for the save in flight, which may replace that.
        """
        if self._saver is not None:
            self._saver.finish(timeout=2 * PATIENCE)
        return self._registry.load(state, self.newest_checkpoint)

    def save(self) -> Place | None:
        """Write a checkpoint now, and wait until it is committed. Collective.

        Returns:
            Its directory or URL, or None if it could not be written or there is no
            checkpoint directory.
        """
        return self._saves.save()

    # Requests.

    def request_checkpoint(self) -> None:
        """Ask for a checkpoint at the next boundary that all replicas can meet at."""
        self._request(CHECKPOINT, "request_checkpoint()", 0)

    def request_stop(self, *, cause: str = "request_stop()") -> None:
        """Ask all replicas to save and exit with code 75 at a common boundary."""
        self._request(STOP, cause, EXIT_CODE_ASKED)

    def _request(self, kind: str, cause: str, exit_code: int) -> None:
        if self.world_size == 1:
            self._gate.schedule(kind, cause, exit_code)
        else:
            self._watcher.request(kind, cause=cause, exit_code=exit_code)

    # Loops and epochs.

    def epochs_until(self, num_epochs: int) -> int:
        """Return where an epoch loop is to end; `elasticrun check` ends it sooner."""
        return num_epochs

    def samples_of(self, num_samples: int, batch_size: int) -> int:
        """Return how much of an order a loop delivers; in a check only its start."""
        del batch_size
        return num_samples

    def begin_loop(self, loader: AdaptiveDataLoader, where: str) -> Position | None:
        """Begin a loop; return where it starts, or None if it is to be skipped."""
        self._stops.check_not_stopped()
        if self.loader is not None:
            raise LoopOrderError(
                f"the loop over `{loader.name}` ({where}) began while the loop over "
                f"`{self.loader.name}` ({self.loader.where}) was at sample "
                f"{self.progress.position.index} of {self.loader.num_samples}. A job "
                "has one position, so it cannot resume two loops at once. Leave the "
                "first loop before you start the second, and do not keep its iterator."
            )
        was_replaying = self.progress.is_replaying
        position = self.progress.begin_loop(loader.name)
        if position is not None:
            self.loader = loader
            self._restores_at_loop = was_replaying
        return position

    def continue_loop(self) -> None:
        """Put the saved generators back if this loop is where the program resumes."""
        if self._restores_at_loop:
            self._restores_at_loop = False
            self._generators.restore()

    def end_loop(self, *, is_finished: bool) -> None:
        """Leave the running loop."""
        self.loader = None
        self.progress.end_loop(is_finished=is_finished)

    def begin_epoch(self) -> None:
        """Enter the next epoch."""
        self._stops.check_not_stopped()
        self._check_loop_is_over("began")
        self._moving_on(self.progress.begin_epoch)
        self.is_in_epoch = True

    def end_epoch(self) -> None:
        """Finish the epoch, which the program has left by its end or by `break`."""
        self.is_in_epoch = False
        self._stops.check_not_stopped()
        self._check_loop_is_over("ended")
        self._moving_on(self.progress.end_epoch)

    def leave_epoch(self) -> None:
        """Leave the epoch unfinished: an exception went through it."""
        self.is_in_epoch = False
        self.progress.leave_epoch()

    def _check_loop_is_over(self, what: str) -> None:
        if self.loader is not None:
            raise LoopOrderError(
                f"an epoch {what} while the loop over `{self.loader.name}` "
                f"({self.loader.where}) was at sample {self.progress.position.index} "
                f"of {self.loader.num_samples}. A loop belongs to one epoch, so it "
                "could not resume. Do not keep an iterator over epochs: let each have "
                "a loop of its own."
            )

    def _moving_on(self, move: Callable[[], None]) -> None:
        was_replaying = self.progress.is_replaying
        move()
        if was_replaying and not self.progress.is_replaying:
            self._generators.restore()

    # Boundaries.

    def pass_boundary(self, *, ends_epoch: bool = False, may_end: bool = False) -> None:
        """Pass a boundary, and save or stop if that is due here.

        Args:
            ends_epoch: Whether it is that of an epoch, not of a batch.
            may_end: Whether the job may end for good here.

        Raises:
            JobStopped: The job stops here; the checkpoint is written.
            AgreementError: The replicas can no longer agree.
            CheckpointError: The last save failed, for a reason that stays.
        """
        if self._stops.code is not None:
            self._stops.check_not_stopped()
        decision = self._gate.arrive()
        if self._saves.has_ended:
            self._saves.settle()
        if ends_epoch:
            self._schedule.note_epoch(self._gate.number)
        is_due = self._gate.number >= self._schedule.due_at
        if decision is not None or is_due or self.postponement.decision:
            self._act(decision, may_end=may_end)

    def finish_epochs(self) -> None:
        """Save the end of an epoch loop, unless its last boundary has just done so."""
        self._saves.save_end()

    def _act(self, decision: Decision | None, *, may_end: bool) -> None:
        is_now, decision = self.postponement.take(decision)
        if not is_now:
            return
        if decision is None or decision.kind == CHECKPOINT:
            self._saves.save(is_awaited=False, may_end=may_end)
            return
        self._stops.stop(decision)

    # Start and end.

    def close(self) -> None:
        """Stop watching, leave the other replicas, and let the directory go."""
        if self.is_closed or os.getpid() != self.pid:
            return
        self.is_closed = True
        with self.late_error.keeping():
            self._saves.close(timeout=self.environment.grace)
        self._watcher.close()
        if self.trace is not None:
            self.trace.close()
        self._let_go()

    def _on_gone(self, rank: int, fate: str) -> None:
        if self._saver is not None:
            self._saver.note_gone(rank, fate)

    def _register_generators(self, newest: Checkpoint | None) -> None:
        if self.register(self._generators) or newest is None:
            return
        another = f"{self._generators.name}.rank-0"
        if newest.has(another):
            with newest.open(another) as file:
                self._generators.derive(file, self.rank)

    def _open_trace(self) -> Trace | None:
        if self.environment.trace_dir is None:
            return None
        return Trace(
            self.environment.trace_dir,
            generation=self.generation,
            rank=self.rank,
            world_size=self.world_size,
        )
