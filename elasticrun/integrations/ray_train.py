"""Ray Train: the workers of a `TorchTrainer`, which save before Ray ends them.

Ray kills all workers to resize their group, to leave a node, and after one of them has
died. `Elastic` hears of it before, in the process of Ray's controller, and makes the
workers save and stop. `replica` wraps their function, which runs in a thread of each.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ray
import ray.train.v2
from ray.train.v2._internal.execution.callback import WorkerGroupCallback

from elasticrun.errors import ElasticRunError, JobStopped
from elasticrun.integrations.checks import check_internals
from elasticrun.job.current import close_current_job, job_if_any
from elasticrun.launcher.environment import apply_changes, variables
from elasticrun.logger import Logger
from elasticrun.replicas import signals
from elasticrun.saving.settings import Settings

logger = Logger(__name__)

# What is needed here of Ray Train, and is not public.
INTERNALS = """
    _internal.execution.callback.WorkerGroupCallback.after_worker_group_start
    _internal.execution.callback.WorkerGroupCallback.after_worker_group_poll_status
    _internal.execution.callback.WorkerGroupCallback.before_worker_group_abort
    _internal.execution.callback.WorkerGroupCallback.on_worker_group_shutdown
    _internal.execution.worker_group.ExecutionGroup.get_workers
    _internal.execution.worker_group.RayTrainWorker.clear_result_queue
    _internal.execution.worker_group.Worker.execute_async
    _internal.execution.worker_group.WorkerGroup.get_latest_poll_status
    _internal.execution.worker_group.WorkerGroup.get_worker_group_state
    _internal.execution.worker_group.WorkerGroup.poll_status
    _internal.execution.worker_group.WorkerGroupPollStatus.errors
    _internal.execution.worker_group.WorkerStatus.preemption_info
    _internal.execution.worker_group.WorkerStatus.return_value
"""
_TESTED = "Ray 2.58 and 2.60"
_ANSWER_SECONDS, _LOOK_SECONDS = 10.0, 0.2


def replica(train: Callable[..., Any]) -> Callable[..., Any]:
    """Return `train` as a function for `train_loop_per_worker`.

        trainer = TorchTrainer(
            replica(train),
            scaling_config=ScalingConfig(num_workers=(1, 8), use_gpu=True),
            run_config=RunConfig(callbacks=[Elastic(grace=60)]),
        )

    Args:
        train: What each worker runs: a program of elasticrun, with Ray's `config` or
            without.
    """
    wrapped = functools.partial(_run, train)
    functools.update_wrapper(wrapped, train)  # Ray looks whether it takes `config`.
    return wrapped


class Elastic(WorkerGroupCallback):  # type: ignore[misc]
    """Has all workers save and stop at one boundary before Ray ends them.

    For `RunConfig(callbacks=[...])`; the function of the workers is a `replica`.

    Args:
        grace: Seconds that this may take. What takes longer is ended without a
            checkpoint, so it must be less than what a drain leaves.

    Raises:
        ElasticRunError: This version of Ray lacks something that is needed.
    """

    def __init__(self, *, grace: float = 60.0) -> None:
        check_internals(
            f"Ray {ray.__version__}", ray.train.v2, INTERNALS, tested=_TESTED
        )
        self._grace = grace
        # The program is the driver's; workers of all programs run the same script.
        settings = {"ELASTICRUN_JOB": Settings.read().job, "ELASTICRUN_GRACE": grace}
        self._variables = {name: str(value) for name, value in settings.items()}
        self._group: Any = None
        self._deadline: float | None = None
        self._is_stopping = False

    # Ray calls these.

    def after_worker_group_start(self, worker_group: Any) -> None:
        """Prepare the workers, which run nothing yet."""
        self._group, self._deadline = worker_group, None
        ray.get(self._call(_prepare, self._variables))

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Stop the workers if a node is drained.

        Raises:
            ElasticRunError: The program has stopped the job; else Ray would take it for
                finished.
        """
        if self._is_stopping:
            return
        each = worker_group_status.worker_statuses.values()
        if all(isinstance(one.return_value, _Stopped) for one in each):
            raise ElasticRunError(
                "the job was stopped by the program; another fit() goes on"
            )
        info = next(filter(None, (one.preemption_info for one in each)), None)
        if info is not None and not self._stop("a node is drained"):
            # Ray would wait for the deadline before it starts others. When that is over
            # the restart is a drain's, and no failure.
            for one in each:
                one.preemption_info = replace(info, deadline_ms=0)

    @contextmanager
    def on_worker_group_shutdown(self) -> Iterator[None]:
        """Stop the workers before their process group is destroyed."""
        self._end("Ray Train ends its workers")
        yield

    def before_worker_group_abort(self, worker_group_context: Any) -> None:
        """Stop the workers."""
        del worker_group_context
        self._end("Ray Train is aborted")

    # Of the workers.

    def _end(self, cause: str) -> None:
        late = self._stop(cause)
        if late:
            logger.warning(
                "%s, and rank %s came to no boundary within the %g s of Elastic(grace="
                "...): it ends without a checkpoint",
                cause,
                ", ".join(map(str, late)),
                self._grace,
            )

    def _stop(self, cause: str) -> list[int]:
        """Wait until all workers have stopped; return who has not in time."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._grace
        if not any(self._ask(_request_stop, cause, default=True)):
            return []  # They have ended, or have not begun.
        while True:
            ended = self._ask(_wait, _LOOK_SECONDS, default=False)
            late = [rank for rank, has_ended in enumerate(ended) if has_ended is False]
            if not late or time.monotonic() >= self._deadline:
                return late
            self._take_reports()

    def _take_reports(self) -> None:
        """Let no worker wait where it reports: for Ray to take that, or for others."""
        latest = self._group.get_latest_poll_status()
        if latest is not None and latest.errors:
            # A report waits for that of the dead worker, too. No poll here: Ray would
            # tell the user's callbacks of the failure each time.
            ray.kill(self._group.get_worker_group_state().sync_actor)
            for worker in self._group.get_workers():
                worker.actor.clear_result_queue.remote()
            return
        self._is_stopping = True
        try:
            self._group.poll_status(_LOOK_SECONDS)
        finally:
            self._is_stopping = False

    def _ask(
        self, function: Callable[[Any], bool], argument: Any, *, default: bool
    ) -> list[bool | None]:
        """Return what each worker answers; None if it is gone."""
        refs = self._call(function, argument)
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=_ANSWER_SECONDS)
        answers: list[bool | None] = [None] * len(refs)
        for rank, ref in enumerate(refs):
            with contextlib.suppress(ray.exceptions.RayError):
                answers[rank] = ray.get(ref) if ref in ready else default
        return answers

    def _call(self, function: Callable[[Any], object], argument: Any) -> list[Any]:
        workers = self._group.get_workers()
        return [worker.execute_async(function, argument) for worker in workers]


# In a worker: in the thread of its function, or in the one in which Ray calls it.


class _Stopped:
    """What the function of a worker returns when the program has stopped the job."""


class _Worker:
    """How far this worker is."""

    def __init__(self) -> None:
        self.is_prepared = False
        self.is_asked = False
        self.has_ended = threading.Event()


_worker = _Worker()


def _run(train: Callable[..., Any], *config: Any) -> Any:
    """Run the program of a worker, and end its job: the process lives on."""
    if not _worker.is_prepared:
        raise ElasticRunError(
            "a replica(...) runs without an Elastic, so Ray would kill it where it is "
            "to save first. Add it: RunConfig(callbacks=[Elastic()])"
        )
    try:
        try:
            return train(*config)
        finally:
            close_current_job()
    except JobStopped:
        pass
    finally:
        _worker.has_ended.set()
    if _worker.is_asked:
        # Until Ray kills this process. It would take a return for the end of the run,
        # and an exception for one of its max_failures.
        threading.Event().wait()
    return _Stopped()


def _prepare(own: dict[str, str]) -> None:
    apply_changes(own, but=variables())
    # It warns that stop signals end this job, which is started in a thread: here they
    # are for Ray.
    signals.logger.setLevel(logging.ERROR)
    _worker.is_prepared = True


def _request_stop(cause: str) -> bool:
    """Ask for a stop; return whether there is anything to wait for."""
    _worker.is_asked = True
    job = job_if_any()
    if job is None or _worker.has_ended.is_set():
        return False
    if not job.is_closed:  # Else it may be about to be rescued.
        job.boundary.request_stop(cause=cause)
    return True


def _wait(seconds: float) -> bool:
    return _worker.has_ended.wait(seconds)
