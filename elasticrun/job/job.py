"""The job as one replica sees it: the object that makes and holds all parts."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, TypeVar

from elasticrun.checkpoint.draft import Checkpoint
from elasticrun.checkpoint.position import Position, unit_of
from elasticrun.checkpoint.registry import Registry
from elasticrun.checkpoint.states.generators import Generators
from elasticrun.checkpoint.states.state import BaseState
from elasticrun.checkpoint.storage.place import Place
from elasticrun.errors import LoopOrderError
from elasticrun.job.boundary import Boundary, DeferredError
from elasticrun.job.event_writer import EventWriter
from elasticrun.job.gpu_work import GpuWork
from elasticrun.job.in_step import InStep
from elasticrun.job.loop import LoaderInLoop
from elasticrun.job.progress import LoopStack, Progress
from elasticrun.job.replay import ReplayedStates
from elasticrun.job.rescue import Rescue
from elasticrun.job.trace import Trace
from elasticrun.job.virtual import virtual_replicas
from elasticrun.logger import Logger
from elasticrun.replicas.agreement import Gate
from elasticrun.replicas.environment import Environment, read_environment
from elasticrun.replicas.exchange import Exchange
from elasticrun.replicas.membership import join
from elasticrun.replicas.records import Records
from elasticrun.replicas.watcher import Watcher
from elasticrun.saving.opening import (
    Start,
    check_all_have_directory,
    log_start,
    make_store,
    open_checkpoints,
)
from elasticrun.saving.saver import Saver
from elasticrun.saving.schedule import Schedule
from elasticrun.saving.settings import Settings

logger = Logger(__name__)

# How long a replica may wait in a loop for one that is gone, by the kind of device:
# collectives of gloo fail when a peer is gone; those on GPUs wait for minutes.
_STUCK_SECONDS = {"cuda": 10.0}

T = TypeVar("T")


class Job:
    """One replica's view of the job: environment, states, checkpoints, position.

    Making one joins the other replicas (a collective), takes the checkpoint directory,
    and starts to watch for signals; `close` gives all of it back.

    Args:
        environment: Read from the process's variables if None.
        settings: From those variables if None.

    Attributes:
        pid: The process that made the job; a fork of it is not a replica.
        generation: The number of this start of the job.
        has_resumed: Whether it began with a checkpoint.
        start: The position at which it began, that of the checkpoint if it had one.
        loader: The loader whose loop's body is running, or None; also read by the
            watcher's and the reporter's threads.
        loops: All loops that are open.
        is_in_epoch: Whether an epoch loop's body is running.
        rescue: Remembers boundaries for a rescue; None if there is nobody to rescue.
        virtual: What there is around the shares of virtual replicas; None without.
        num_loaders: Loaders made so far without a name.
        num_forward_passes: For training, through a DDP, of those that have ended.
        num_steps: How often a registered optimizer has begun a step.
        deferred_error: What could not be raised where it happened.
        ends_of_batch: What follows each global batch of the outermost loop, before its
            boundary, where there are several replicas or virtual ones.
        in_step: Counts what all replicas do, and finds one that leaves some of it out.
        cuts_for_noise: Returns, when a loop begins, whether batches of which the noise
            of gradients is measured have to be cut in two.

    Raises:
        CheckpointError: The directory cannot be used, or replicas see it differently.
        ValueError: A setting or a variable is not what it should be.
    """

    def __init__(
        self,
        environment: Environment | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.settings = settings or Settings.read()
        environment = environment or read_environment()
        self._membership = join(
            environment,
            backend=self.settings.backend,
            timeout=self.settings.timeout,
        )
        self.environment = self._membership.environment
        self.device = self._membership.device
        self.pid = os.getpid()
        self.loader: LoaderInLoop | None = None
        self.loops = LoopStack()
        self.is_in_epoch = False
        self.is_closed = False
        self.num_loaders = 0
        self.num_forward_passes = self.num_steps = 0
        self.ends_of_batch: list[Callable[[LoaderInLoop], None]] = []
        self.cuts_for_noise: Callable[[], bool] = lambda: False
        self.deferred_error = DeferredError()
        self._restores_at_loop = False  # Whether states come back when it goes on.
        self.states = Registry(self.rank)
        self._replayed = ReplayedStates(self.states)
        self._has_anchors = False  # Whether they are registered.
        self._made: dict[type[Any], Any] = {}  # By `get_or_make`.
        self._checkpoints = make_store(self.settings)
        try:
            self._open()
        except BaseException:
            self._let_go()
            raise

    def _open(self) -> None:
        """Take the directory, read where to resume, and start to watch."""
        start = self._find_start()
        self.generation = start.generation
        self.has_resumed = start.newest is not None
        self.start = start.position or Position()
        self.progress = Progress(start.position)
        self.virtual = virtual_replicas(
            self.settings.virtual_replicas,
            world_size=self.world_size,
            device=self.device,
            newest=start.newest,
        )
        self._generators = Generators(self.device, are_alike=self.virtual is not None)
        self.register(self._generators)
        if self.virtual is not None:
            self.register(self.virtual)
            self.ends_of_batch.append(self.virtual.end_batch)
        if self.has_resumed:
            self._has_anchors = True
            self.register(self._replayed.anchors)
        self._schedule = Schedule(self.settings, is_saving=self._saver is not None)
        self.trace = self._open_trace()
        self._gate = Gate()
        self.in_step = InStep(self._gate)
        if self.world_size > 1:
            self.ends_of_batch.append(self.in_step.finish_batch)
        self._watcher = self.in_step.watcher = self._make_watcher()
        self.boundary = self.make_boundary(
            gate=self._gate,
            watcher=self._watcher,
            saver=self._saver,
            schedule=self._schedule,
            progress=self.progress,
            rank=self.rank,
            grace=self.settings.grace,
            is_launched=self.environment.is_launched,
        )
        self._no_rescue = ""
        self.rescue = self._make_rescue()
        if self.rescue is not None:
            self.boundary.remember = self.rescue.remember
        self._history = self._begin_history(start)
        self._watcher.start()
        log_start(start, self.environment, is_saving=self._saver is not None)

    def _find_start(self) -> Start:
        """Return what all replicas begin with. Collective."""
        self._saver: Saver | None = None
        check_all_have_directory(
            self._membership, has_one=self._checkpoints is not None
        )
        if self._checkpoints is None:
            return Start()
        start = open_checkpoints(self._checkpoints, self._membership)
        self._saver = Saver(
            self._checkpoints,
            self.states,
            self._membership,
            start,
            is_async=self.settings.async_save,
        )
        return start

    def _begin_history(self, start: Start) -> EventWriter | None:
        if self._checkpoints is None or self._saver is None:
            return None
        history = EventWriter(
            self._checkpoints.place,
            progress=self.progress,
            states=self.states,
            generation=self.generation,
            rank=self.rank,
        )
        self._saver.on_captured = history.keep_captured
        self._saver.on_committed = history.write_checkpoint
        newest = start.newest
        history.begin(
            job=self.settings.job,
            world_size=self.world_size,
            checkpoint=None if newest is None else newest.number,
        )
        return history

    def _make_rescue(self) -> Rescue | None:
        """Return what saves the last boundary when another replica dies. Collective."""
        store = self._membership.store
        if self._saver is None or store is None:
            return None
        environment = self.environment
        first = environment.rank - environment.local_rank
        neighbours = range(max(0, first), first + environment.local_world_size)
        try:
            records = Records(self.rank, neighbours, store)
        except OSError as error:
            self._no_rescue = f"{error}: raise the limit of a file's size (ulimit -f)"
            return None
        if not self.settings.rescue:
            records.close()
            return None
        gpu = None
        if self._membership.waits_on_gpu:
            gpu = GpuWork(self._gate.check, self._membership.abort)
        return Rescue(
            self.states,
            self._saver,
            records,
            self._generators,
            world_size=self.world_size,
            grace=self.settings.grace,
            may_cost=self.settings.rescue == "always",
            has_lost=lambda: self._watcher.has_lost,
            gpu=gpu,
        )

    @property
    def why_no_rescue(self) -> str:
        """Why a death costs what was trained since the last checkpoint; any thread."""
        return self._no_rescue if self.rescue is None else self.rescue.why_not

    def wait_for_gpu(self) -> None:
        """Wait for what all replicas do together, before a value of it is read."""
        if self.rescue is not None:
            self.rescue.wait_for_gpu()

    def _make_watcher(self) -> Watcher:
        return Watcher(
            self._gate,
            rank=self.rank,
            world_size=self.world_size,
            links=self._membership.links,
            grace=self.settings.grace,
            save_interval=self._schedule.interval,
            stop_signals=self.settings.stop_signals,
            stuck_seconds=_STUCK_SECONDS.get(self.device.type, math.inf),
            gone={} if self._saver is None else self._saver.gone,
            # These four are called in the watcher's thread.
            describe=self._describe,
            is_saving=lambda: self._saver is not None and self._saver.is_busy,
            is_in_loop=lambda: self.loader is not None and not self.is_closed,
            counts=self.in_step.counts,
        )

    @property
    def why_no_boundary(self) -> str | None:
        """Why no boundary may come, as far as that is known; from any thread."""
        if self.loader is None:
            return self.boundary.why_no_boundary
        return self.loops.why_no_boundary

    def _describe(self) -> str:
        """Say where the program is, for a stop that came to no boundary."""
        why = self.why_no_boundary
        return f"at {self.progress.position}" + (f"; {why}" if why else "")

    def make_boundary(self, **parts: Any) -> Boundary:
        """Return what counts boundaries; `elasticrun check` has one of its own."""
        return Boundary(**parts)

    def _let_go(self, *, is_whole: bool = True) -> None:
        """Give back what others may need: the directory, and the other replicas."""
        if self._checkpoints is not None:
            self._checkpoints.release()
        self._membership.leave(is_whole=is_whole)

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
    def num_shares(self) -> int:
        """In how many shares a global batch is trained."""
        return self.world_size if self.virtual is None else self.virtual.number

    @property
    def exchange(self) -> Exchange:
        """This replica's end of the conversations with rank 0."""
        return self._membership.exchange

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
        """Keep a state in every checkpoint; load it and return whether it was there."""
        self.states.add(state)
        state.trusts_pickle = state.name in self.settings.trust_pickle
        is_loaded = self.load(state)
        self._replayed.remember(state)
        return is_loaded

    def get_or_make(self, kind: type[T], *args: Any) -> T:
        """Return the job's one object of a class; make it the first time.

        A state is registered, too.

        Args:
            args: What it is made with.
        """
        made: T | None = self._made.get(kind)
        if made is None:
            made = self._made[kind] = kind(*args)
            if isinstance(made, BaseState):
                self.register(made)
        return made

    def load(self, state: BaseState) -> bool:
        """Load a state from the newest checkpoint; return whether that had it.

        Waits for the save in flight, which may replace that.
        """
        if self._saver is not None:
            self._saver.finish()
        return self.states.load(state, self.newest_checkpoint)

    def save(self) -> Place | None:
        """Write a checkpoint now, and wait until it is committed. Collective.

        Returns:
            The path of the newest checkpoint, or None: see `save_all_states`.
        """
        if self._replayed.is_under_way:  # The first run has written it.
            self._replayed.num_saves += 1
            self._arrive()
            newest = self.newest_checkpoint
            return None if newest is None else newest.path
        if not self.progress.is_done_already:
            self._replayed.anchors.num_saves += 1
        return self.boundary.save()

    # Loops and epochs.

    def epochs_until(self, num_epochs: int) -> int:
        """Return where an epoch loop is to end; `elasticrun check` ends it sooner."""
        return num_epochs

    def samples_of(self, num_samples: int, batch_size: int) -> int:
        """Return how much of an order a loop delivers; in a check only its start."""
        del batch_size
        return num_samples

    def limit_steps(self, num_steps: int | None) -> int | None:
        """Return how many steps a loop that counts them has; in a check only some."""
        return num_steps

    def begin_loop(
        self, loader: LoaderInLoop, where: str, *, start: int = 0
    ) -> Position | None:
        """Begin a loop outside of others.

        Args:
            start: Its index if it does not continue.

        Returns:
            Where it starts, or None if it is to be skipped.
        """
        if self.boundary.exit_code is not None:
            self.boundary.check_not_stopped()
        if not self._generators.begun:
            self._generators.begin()
        was_replaying = self.progress.is_replaying
        position = self.progress.begin_loop(loader.place_name, start=start)
        if position is None:
            self._begin_replay()
            self._reach_anchor()
        else:
            self.loops.begin(loader, where)
            self.loader = loader
            self._restores_at_loop = was_replaying
        return position

    def begin_inside(self, loader: LoaderInLoop, where: str) -> tuple[int, ...]:
        """Begin a loop in the body of another one, whose batch it belongs to.

        Returns:
            What its order and draws depend on, beside what those of the outer one do.
        """
        self.boundary.check_not_stopped()
        if self.virtual is not None:
            raise LoopOrderError(
                f"the loop over `{loader.name}` ({where}) began in the body of another "
                "one, and the job has virtual_replicas. That body runs once for each "
                "share, so how often the inner loop runs, and what it draws, would "
                "depend on the number of replicas. Put it behind the outer loop, or "
                "leave virtual_replicas out."
            )
        key = self.loops.begin(loader, where)
        self.loader = loader
        return key

    def reopen_loop(self, loader: LoaderInLoop, where: str, index: int) -> bool:
        """Enter the loop again that was skipped, if nothing has come after it."""
        if not self.progress.reopen_loop(loader.place_name, index):
            return False
        self.loops.begin(loader, where)
        self.loader = loader
        self._restores_at_loop = True
        return True

    def continue_loop(self) -> None:
        """Put what was saved back if this loop is where the program resumes."""
        if self._restores_at_loop:
            self._restores_at_loop = False
            self._end_replay()

    def end_loop(self, *, is_finished: bool) -> None:
        """Leave the loop that is outside of others."""
        self.loops.clear()
        self.loader = None
        self.progress.end_loop(is_finished=is_finished)
        if is_finished:
            self._reach_anchor()

    def end_inside(self, loader: LoaderInLoop) -> None:
        """Leave a loop in the body of another one, which goes on."""
        self.loops.end(loader)
        self.loader = self.loops.innermost

    def skip_epochs(self, limit: int) -> int:
        """Walk past epochs that were finished before the restart; see `Progress`."""
        if not self._generators.begun:
            self._generators.begin()
        place = self.progress.place
        epoch = self.progress.skip_epochs(limit)
        if self.progress.is_done_already:
            self._begin_replay()
            if self.progress.place != place:
                self._reach_anchor()
        return epoch

    def end_epoch_loop(self, *, is_left: bool = False) -> None:
        """Leave the epoch loop after an epoch, by `break` or because none remains."""
        self.progress.end_epoch_loop(is_left=is_left)
        self._reach_anchor()

    def begin_epoch(self) -> None:
        """Enter the next epoch."""
        self.boundary.check_not_stopped()
        self._check_loop_is_over("began")
        self._moving_on(self.progress.begin_epoch)
        self.is_in_epoch = True
        self._reach_anchor(is_first=True)

    def end_epoch(self) -> None:
        """Finish the epoch, which the program has left by its end or by `break`."""
        self.is_in_epoch = False
        self.boundary.check_not_stopped()
        self._check_loop_is_over("ended")
        self._moving_on(self.progress.end_epoch)
        self._replayed.anchors.num_saves = 0
        self.states.end_epochs(self.progress.finished_epochs)

    def leave_epoch(self) -> None:
        """Leave the epoch unfinished: an exception went through it."""
        self.is_in_epoch = False
        self.progress.leave_epoch()

    def _check_loop_is_over(self, what: str) -> None:
        if what == "ended" and self.virtual is None:  # Draws would be a share's.
            self.loops.leave_held()
        if self.loader is not None:
            unit, index = unit_of(self.loader.place_name), self.progress.position.index
            raise LoopOrderError(
                f"an epoch {what} while the loop over `{self.loader.name}` "
                f"({self.loader.where}) was at {unit} {index} of "
                f"{self.loader.num_samples}. A loop belongs to one epoch, so it "
                "could not resume. A variable still holds its iterator, such as `bar` "
                "in `bar = tqdm(enumerate(train))` when `break` has left the loop. "
                "Write `for ... in tqdm(enumerate(train))`, or `del bar` behind the "
                "loop, and do not keep an iterator over epochs."
            )

    def _moving_on(self, move: Callable[[], None]) -> None:
        """Move; put what was saved back if that ends the replay."""
        was_replaying = self.progress.is_replaying
        move()
        if was_replaying and not self.progress.is_replaying:
            self._end_replay()

    def _reach_anchor(self, *, is_first: bool = False) -> None:
        """Note what the program sees from here on; if it is replayed, show it that."""
        if self._saver is None:
            return
        place = self.progress.place
        if not self._has_anchors:  # A program without loops has none.
            self._has_anchors = True
            self.states.add(self._replayed.anchors)
        # Between the loops of an epoch checkpoints are written where the program asks.
        self._replayed.num_saves = 0
        if not self.progress.is_replaying or (not place[2] and self._arrive()):
            if is_first:  # Of its epoch.
                self._replayed.anchors.noted[True].clear()
                self._generators.noted[True].clear()
            self._replayed.anchors.add(place)
            self._generators.note(place)
        elif self._replayed.is_guided:
            self._replayed.pass_anchor(place)
            self._generators.put_back_at(place)

    def _arrive(self) -> bool:
        """End the replay if the checkpoint was written here, between two loops."""
        is_here = self._replayed.num_saves == self._replayed.anchors.num_saves
        if not (is_here and self._replayed.is_guided and self.progress.is_at_place):
            return False
        self._end_replay()
        self.progress.has_arrived = True
        return True

    def _begin_replay(self) -> None:
        """Remember what replayed code may change."""
        # Where a loader's own state, or an exception, has led the program elsewhere,
        # the checkpoint has other values.
        is_at_start = self.has_resumed and self.progress.position == self.start
        self._replayed.begin(self._load_again if is_at_start else None)

    def _load_again(self, state: BaseState) -> None:
        self.states.load_alone(state, self.newest_checkpoint)

    def _end_replay(self) -> None:
        """Put states and generators back; not sooner: replayed code changes them, too.

        Generators come last, since loading a state might draw.
        """
        self._replayed.put_back()
        self._replayed.end()
        self._generators.restore()

    # Start and end.

    def close(self) -> None:
        """Stop watching, leave the other replicas, and let the directory go."""
        if self.is_closed or os.getpid() != self.pid:
            return
        self.is_closed = True
        if self.rescue is not None:
            if self.boundary.exit_code is None:
                position = self.progress.position
                is_in_loop = position.in_epoch or position.loader != ""
                self.rescue.attempt(is_in_loop=is_in_loop)
            self.rescue.close()
        with self.deferred_error.keeping():
            self.boundary.close()
        self._watcher.close()
        if self._history is not None:
            self._history.close(code=self.boundary.exit_code)
        if self.trace is not None:
            self.trace.close()
        self._let_go(is_whole=not self._watcher.has_lost)
        self.loops.end_all()

    def _open_trace(self) -> Trace | None:
        if self.settings.trace_dir is None:
            return None
        return Trace(
            self.settings.trace_dir,
            generation=self.generation,
            rank=self.rank,
            world_size=self.world_size,
        )
