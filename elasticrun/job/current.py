"""The current job, the package's one global variable, and what reads it."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch.utils.data import get_worker_info

from elasticrun.checkpoint.states.state import BaseState
from elasticrun.checkpoint.storage.place import Place
from elasticrun.errors import ElasticRunError, JobStopped
from elasticrun.job.job import Job
from elasticrun.job.loop import LoaderInLoop
from elasticrun.replicas.process_end import exit_at_once
from elasticrun.saving.settings import Settings

_job: Job | None = None
_make_job: Callable[..., Job] = Job


def current_job() -> Job:
    """Return this process's job; the first use makes it from the environment.

    Raises:
        ElasticRunError: This process is not a replica: a DataLoader worker, or a fork,
            or one that has been spawned and imports the program.
    """
    global _job
    if get_worker_info() is not None:
        raise ElasticRunError(
            "this is a DataLoader worker, which has no job, since it reads batches "
            "ahead of the loop. Use elasticrun in the main process only, not in the "
            "data set or the collate function."
        )
    if _job is None or _job.is_closed:
        _check_runs_program()
        _job = _make_job()
        atexit.register(_close_at_exit, _job)
    if _job.deferred_error.error is not None:
        _job.deferred_error.raise_once()
    if _job.pid != os.getpid():
        raise ElasticRunError(
            f"process {os.getpid()} was forked from the replica {_job.pid} and has no "
            "job of its own. Use elasticrun in the replica only."
        )
    return _job


def job_if_any() -> Job | None:
    """Return this process's job, open or closed, or None; makes none."""
    return _job


def init(
    checkpoint_dir: str | os.PathLike[str] | None = None,
    *,
    save_interval: float | str | None = None,
    save_every: int | str | None = None,
    keep: int | None = None,
    async_save: bool | None = None,
    rescue: bool | str | None = None,
    trust_pickle: Iterable[str] = (),
    backend: str = "auto",
    timeout: float | timedelta | None = None,
    virtual_replicas: int | None = None,
) -> None:
    """Start the job with these settings; optional, since its first use starts it.

    Collective: call it on every replica, before anything else of elasticrun.
    Replay: runs again in each generation.

    Args:
        checkpoint_dir: Where checkpoints are kept, on a file system that all replicas
            see; or the URL of an object store, such as s3://bucket/job. Default:
            ELASTICRUN_CHECKPOINT_DIR; without either, nothing is saved.
        save_interval: Seconds between checkpoints, of which the first ones come earlier
            (docs/howto/save-interval.md); 0 saves at every boundary, "auto" by what
            saves cost, "off" only on a stop, at the end and on request. Default:
            ELASTICRUN_SAVE_INTERVAL, or 300.
        save_every: Also after so many global batches since the last checkpoint, at the
            end of each "epoch", or both: "500,epoch". Default:
            ELASTICRUN_SAVE_EVERY.
        keep: How many checkpoints are kept. Default: ELASTICRUN_KEEP, or 3.
        async_save: Whether training goes on while a checkpoint is written, which takes
            memory for a copy of all states; False lets it wait. Default:
            ELASTICRUN_ASYNC_SAVE, or True.
        rescue: Whether a survivor saves the last boundary when another replica dies,
            for which each one remembers its states, and on GPUs waits for its
            gradients. If a GPU then has no work in more than 1 % of a step, it is left
            out, and a line in the log says so; "always" does it all the same.
            Default: ELASTICRUN_RESCUE ("on", "off", "always"), or True.
        trust_pickle: Names of states (of `register` and `Variables`) that may hold any
            object. Loading them executes whatever is in their files, so trust all who
            can write to the checkpoint directory.
        backend: Of the process group that is started when WORLD_SIZE is above 1 and
            none exists: "nccl", "gloo", or "auto" (NCCL where each replica has a GPU).
        timeout: Seconds after which that gives up a collective, as a number or a
            timedelta. Default: ELASTICRUN_TIMEOUT, or what torch takes for the backend
            (600 for NCCL, 1800 for gloo).
        virtual_replicas: In how many shares each global batch is cut, whatever the
            number of replicas, of which there may be as many or fewer: the job then
            ends with the same bits at any number (docs/explanation/same-bits.md).
            Default: ELASTICRUN_VIRTUAL_REPLICAS, or one share a replica.

    Raises:
        ElasticRunError: The job has already started; or this process imports the
            program, which runs in another one; or there are more replicas than virtual
            ones.
        CheckpointError: The directory is in use, unfit, or differs between replicas.
        ValueError: A setting is not what it should be.
    """
    given = locals()  # The arguments, by name: before there is anything else.
    global _job
    _check_runs_program()
    if _job is not None and not _job.is_closed:
        raise ElasticRunError(
            "init() was called after the job had started, too late for its settings. "
            "Call it first, before loaders, models and epoch loops."
        )
    _job = _make_job(settings=Settings.read(**given))
    atexit.register(_close_at_exit, _job)


def _check_runs_program() -> None:
    """Refuse a process that multiprocessing has started and that is not ready yet.

    A worker that became a replica would take the checkpoint directory, or wait for the
    other replicas for ever.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ElasticRunError(
            f"process {os.getpid()} was spawned by multiprocessing (a DataLoader "
            "worker, for instance) and imports the main module of the program. Code at "
            "the top level runs again there, and would make it a replica. Put this "
            "under `if __name__ == '__main__':`."
        )


@contextmanager
def use_job(job: Job) -> Iterator[Job]:
    """Make `job` the current one for a while, then close it; for tests, notebooks."""
    global _job
    previous, _job = _job, job
    try:
        yield job
    finally:
        _job = previous
        job.close()
    job.deferred_error.raise_once()


def make_jobs_with(make: Callable[..., Job]) -> None:
    """Let `make` stand for `Job` in this process; before the program runs."""
    global _make_job
    _make_job = make


def close_current_job() -> None:
    """Close the current job if there is one; at the end of a process without atexit."""
    if _job is not None and _job.pid == os.getpid():
        _job.close()
        _job.deferred_error.raise_once()


def _close_at_exit(job: Job) -> None:
    """Close the job; end with exit code 1 if an error could not be raised before."""
    job.close()
    if job.pid == os.getpid() and job.deferred_error:
        code = 1
        try:
            job.deferred_error.raise_once()
        except JobStopped as stop:
            code = int(stop.code or 0)
        except BaseException:
            traceback.print_exc()
        exit_at_once(code)


def rank() -> int:
    """Return this replica's number in the job, in [0, world_size)."""
    return current_job().rank


def local_rank() -> int:
    """Return this replica's number on its machine."""
    return current_job().environment.local_rank


def world_size() -> int:
    """Return the number of replicas in this generation."""
    return current_job().world_size


def generation() -> int:
    """Return the number of this start of the job, from 0 in its directory."""
    return current_job().generation


def device() -> torch.device:
    """Return this replica's device: its own GPU, or the CPU."""
    return current_job().device


def loader_if_any() -> LoaderInLoop | None:
    """Return the loader whose loop is running; makes no job where there is none."""
    return None if _job is None else _job.loader


def note_step() -> None:
    """Note that a registered optimizer steps; makes no job where there is none."""
    if _job is not None:
        if _job.rescue is not None:
            _job.rescue.prepare_step()
        _job.num_steps += 1
        if _job.loader is None:
            _job.boundary.count_step_outside()


def forget_boundaries() -> None:
    """Offer no boundary before this moment: what changes in a step is about to."""
    if _job is not None and _job.rescue is not None:
        _job.rescue.num_steps += 1


def load_state(state: BaseState) -> bool:
    """Load a registered state again from the newest checkpoint.

    Returns:
        Whether the checkpoint had it.

    Raises:
        CheckpointError: Its file is damaged or does not fit.
    """
    return current_job().load(state)


def save_all_states() -> Place | None:
    """Write a checkpoint now.

    Collective: call it on every replica, at the same place. Inside a loop's body the
    current batch will be delivered again; there `request_checkpoint` is better.
    Replay: writes nothing and changes nothing. Before the first loop it saves again.

    Returns:
        The checkpoint's directory or URL, in replayed code the newest one's; None
        without a checkpoint directory, or when it could not be written (a
        CheckpointWarning says why).
    """
    return current_job().save()


def request_checkpoint() -> None:
    """Ask for a checkpoint at the next boundary; one replica's request is enough."""
    current_job().boundary.request_checkpoint()


def request_stop() -> None:
    """Ask the job to save and exit with code 75 at the next boundary of all replicas.

    One replica's request is enough. 75 (EX_TEMPFAIL) means neither success nor failure:
    the same command goes on from there.
    """
    current_job().boundary.request_stop()
