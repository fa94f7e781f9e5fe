"""A replica's thread that tells the launcher where the job is, and takes stops."""

from __future__ import annotations

import faulthandler
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from elasticrun.job.loop import StepLoop
from elasticrun.logger import Logger
from elasticrun.replicas.wire import Channel, Message

if TYPE_CHECKING:
    from elasticrun.checkpoint.position import Position
    from elasticrun.job.job import Job

logger = Logger(__name__)

DUMP_SIGNAL = 50  # A real-time signal, which programs do not use by chance.
_UNTIL_JOB = 0.05
_UNTIL_FIRST_BATCH = 0.02
_IN_TRAINING = 0.5

_Counts = tuple[int, int, int]


class Reporter:
    """Reports where the job is, twice a second, without any cost for training.

    Args:
        imports: Returns what this replica has imported.
        on_begun: Called with the order when the generation begins for which the program
            waits.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        imports: Callable[[], Message],
        on_begun: Callable[[Message], None],
    ) -> None:
        self._imports = imports
        self._on_begun = on_begun
        self._channel = channel
        self._stop: Message | None = None
        self._has_trained = False
        self._has_failed = False
        self._largest_batch = 0
        self._last: Message = {}
        self._looking = threading.Lock()
        self._has_ended = False

    def start(self) -> None:
        """Start the thread, and let the dump signal print all stacks."""
        faulthandler.register(DUMP_SIGNAL, file=2, all_threads=True)
        # A DataLoader worker that outlives its replica must not hold the channel.
        os.register_at_fork(after_in_child=self._channel.connection.close)
        threading.Thread(
            target=self._run, name="elasticrun-reporter", daemon=True
        ).start()

    def _run(self) -> None:
        for message in self._channel.ahead():
            self._handle(message)
        interval = _UNTIL_JOB
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        while self._channel.is_open:
            if poll.poll(interval * 1000):
                for message in self._channel.receive():
                    self._handle(message)
            interval = self.look()

    def look(self) -> float:
        """Report where the job is now; return after how many seconds to look again.

        In this thread; at the program's end also in the main thread.
        """
        with self._looking:
            job = None if self._has_ended else open_job()
            if job is None:
                return self._look_before_job()
            self._ask_to_stop(job)
            try:
                self._report(job)
            except Exception:  # The next request to stop must still get through.
                self._warn_once()
        return _IN_TRAINING if self._has_trained else _UNTIL_FIRST_BATCH

    def _look_before_job(self) -> float:
        opening: Any = sys.modules.get("elasticrun.saving.opening")
        waiting = getattr(opening, "is_waiting", None)  # It may be half imported.
        if self._has_ended or waiting is None or not waiting.is_set():
            return _UNTIL_JOB
        # The program waits for room on a full disk, which is no hang.
        self._channel.send({"type": "no room", "time": time.monotonic()})
        return _IN_TRAINING

    def end(self) -> None:
        """Stop reporting: the program is being torn down."""
        with self._looking:
            self._has_ended = True

    def _warn_once(self) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.warning(
                "this replica cannot report its position, so `elasticrun status` may "
                "show an old one; training goes on",
                exc_info=True,
            )

    def _handle(self, message: Message) -> None:
        if message["type"] == "stop":
            self._stop = message
        elif message["type"] == "begin":
            self._on_begun(message)

    def _ask_to_stop(self, job: Job) -> None:
        """Pass the launcher's request on, once there is a job that can be asked."""
        if self._stop is not None:
            job.boundary.is_followed = self._stop["is_followed"]
            job.boundary.request_stop(cause=self._stop["cause"])
            self._stop = None

    def _report(self, job: Job) -> None:
        position = job.progress.position
        counts = _counts_of(position)
        if not self._has_trained and counts > _counts_of(job.start):
            self._has_trained = True  # So what is imported for a step is there, too.
            self._channel.send(self._imports())
        loader, newest = job.loops.outermost, job.newest_checkpoint
        if loader is not None and not isinstance(loader, StepLoop):
            size = loader.running_loop.current.part.global_batch_size
            self._largest_batch = max(self._largest_batch, size)
        gpu_memory, gpu_utilization = gpu_use(job)
        report = {
            "type": "report",
            "generation": job.generation,
            "counts": counts,
            "inside": job.loops.inside,
            "has_trained": self._has_trained,
            "position": str(position),
            "no_boundary": job.why_no_boundary,
            "resumed_at": str(job.start) if job.has_resumed else None,
            "epoch": position.finished_epochs,
            "index": position.index,
            "is_in_loop": loader is not None,
            "loader": position.loader,
            "num_samples": None if loader is None else loader.num_samples,
            "batch": None if loader is None else loader.batch_index,
            "batch_size": self._largest_batch,
            "virtual_replicas": job.settings.virtual_replicas,
            "num_batches": None if loader is None else loader.running_loop.num_batches,
            "in_epoch": position.in_epoch,
            "num_epochs": job.progress.num_epochs,
            "num_passed": job.progress.num_passed,
            "checkpoint_dir": None if newest is None else str(newest.path.parent),
            "checkpoint": None if newest is None else newest.number,
            "gpu_memory": gpu_memory,
            "gpu_utilization": gpu_utilization,
            "num_forward_passes": job.num_forward_passes,
            "can_rescue": job.rescue is not None and job.rescue.is_on,
            "may_rescue": _may_rescue(job),
            "no_rescue": job.why_no_rescue,
            "failed_saves": job.num_failed_saves,
            "saved_at": None if newest is None else newest.time,
        }
        if report != self._last:
            self._last = report
            self._channel.send({**report, "time": time.monotonic()})


def _may_rescue(job: Job) -> bool:
    """Return whether it may have something to save, of which no boundary tells yet."""
    if job.rescue is None or job.rescue.is_off:
        return False
    return job.rescue.is_on or job.num_forward_passes > 0


def _counts_of(position: Position) -> _Counts:
    """Return how far it is: epochs, loops, and samples of the loop after these."""
    return position.finished_epochs, position.finished_loops, position.index


def gpu_use(job: Job) -> tuple[int | None, int | None]:
    """Return what torch holds of this replica's GPU in bytes, and how busy that is.

    Busy in percent, over all processes on it; None without a GPU, and also where
    nothing tells: torch asks nvidia-ml-py (or amdsmi), which may not be installed.
    """
    if job.device.type != "cuda":
        return None, None
    torch: Any = sys.modules["torch"]
    memory = int(torch.cuda.memory_reserved(job.device))
    try:
        return memory, int(torch.cuda.utilization(job.device))
    except Exception:  # A library is not there, or it is a slice (MIG).
        return memory, None


def open_job() -> Job | None:
    """Return the job of this process if its program has made one."""
    job = _find_job()
    return None if job is None or job.is_closed else job


def last_words() -> Message:
    """Return what the launcher is told of this process's job at its end."""
    job = _find_job()
    return {
        "type": "end",
        "has_failed_save": job is not None and job.has_failed_save,
        "rescued": job.rescue.outcome if job is not None and job.rescue else "",
        "no_rescue": "" if job is None else job.why_no_rescue,
    }


def _find_job() -> Job | None:
    """Return the program's job without importing anything that it has not."""
    current: Any = sys.modules.get("elasticrun.job.current")
    find: Callable[[], Job | None] | None = getattr(current, "job_if_any", None)
    return None if find is None else find()


def code_of_stop() -> int:
    """Return the code with which the job has stopped, 0 if it has not.

    A program that swallows its stop, and then comes to its end, has not finished.
    """
    job = open_job()
    return 0 if job is None else job.boundary.exit_code or 0
