"""The epoch loop, `remaining_epochs_until`, and the number of the epoch."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator

from elasticrun.errors import LoopOrderError, counted
from elasticrun.job.current import current_job
from elasticrun.job.job import Job
from elasticrun.job.open_loop import is_left_by_break
from elasticrun.logger import Logger

logger = Logger(__name__)


def remaining_epochs_until(num_epochs: int, start: int = 0) -> Iterator[int]:
    """Yield the numbers of the epochs that remain until `num_epochs` are finished.

    `num_epochs` is a total for the job: several epoch loops one after another continue
    the numbering. The end of an epoch is a boundary, and the end of the last one writes
    a checkpoint. `break` finishes the epoch, an exception does not.

    Collective: every replica must walk the same epochs.
    Replay: finished epochs are not yielded; the interrupted one is, and its finished
    loops are skipped.

    Args:
        num_epochs: How many epochs the job has.
        start: The number that the first one is given: 1 for programs that count
            `range(1, num_epochs + 1)`. Messages and checkpoints number epochs from 0
            all the same.

    Raises:
        LoopOrderError: Epoch loops are nested, or loops are not those of the
            checkpoint.
        JobStopped: The job stops at the end of an epoch.
        ValueError: `num_epochs` is not a whole number from 0 up.
    """
    num_epochs = whole_number(num_epochs, "remaining_epochs_until", "epochs")
    return _remaining_epochs(num_epochs, operator.index(start))


def whole_number(number: int, function: str, what: str) -> int:
    """Return a number of epochs, steps or batches as a plain integer."""
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise TypeError(
            f"{function} takes the number of {what} as a whole number, not {number!r}."
        )
    number = operator.index(number)
    if number < 0:
        raise ValueError(f"{function}({number}): {what} count from 0.")
    return number


def _remaining_epochs(num_epochs: int, start: int) -> Iterator[int]:
    job = current_job()
    check_not_nested(job)
    num_epochs = job.progress.num_epochs = job.epochs_until(num_epochs)
    epoch = job.skip_epochs(num_epochs)
    if epoch >= num_epochs:
        _say_finished(job)
        job.progress.end_epoch_loop()
        return
    while epoch < num_epochs:
        job.begin_epoch()
        try:
            yield epoch + start
        except GeneratorExit:
            if is_left_by_break(sys._getframe().f_back):
                with job.deferred_error.keeping():
                    job.end_epoch()
                    job.end_epoch_loop(is_left=True)
                    job.boundary.finish_epochs()
            else:
                job.leave_epoch()
            raise
        job.end_epoch()
        job.boundary.reach(ends_epoch=True)
        epoch = job.progress.finished_epochs
    job.end_epoch_loop()
    job.boundary.finish_epochs()


def current_epoch() -> int | None:
    """Return the number of the running epoch, or None outside epoch loops."""
    job = current_job()
    return job.progress.finished_epochs if job.is_in_epoch else None


def finished_epochs() -> int:
    """Return how many epochs are finished, after a restart those of the checkpoint."""
    return current_job().progress.position.finished_epochs


def check_not_nested(job: Job) -> None:
    """Refuse an epoch loop in the body of another loop."""
    if job.is_in_epoch:
        raise LoopOrderError(
            f"an epoch loop began inside epoch {job.progress.finished_epochs} of "
            "another one. Epochs of a job are numbered one after another, so they "
            "cannot be nested. Leave the outer loop first, or use a plain range() for "
            "one of them."
        )
    if job.loader is not None:
        raise LoopOrderError(
            f"an epoch loop began inside the loop over `{job.loader.name}` "
            f"({job.loader.where}). Leave that loop first."
        )


def _say_finished(job: Job) -> None:
    """Say why nothing happens, if the job stands where this epoch loop had ended."""
    finished = job.progress.finished_epochs
    is_there = job.progress.position.place == (finished, 0, False)
    if job.has_resumed and job.rank == 0 and job.progress.is_replaying and is_there:
        logger.warning(
            "%s finished before this start, so none remains. To train longer, raise "
            "the number; to start anew, use another directory.",
            counted(finished, "epoch"),
        )
