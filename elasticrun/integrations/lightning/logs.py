"""Makes Lightning's loggers continue after a restart."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger


def kept_logs(loggers: Iterable[Logger]) -> list[dict[str, Any]]:
    """Return of each logger its version, and the rows that a `CSVLogger` has written.

    Lightning removes the file of a `CSVLogger` that gets the version it had, and that
    before a callback is asked for anything.
    """
    return [
        {"version": logger._version, "rows": _rows(logger)}
        if isinstance(logger, (CSVLogger, TensorBoardLogger))
        else {}
        for logger in loggers
    ]


def _rows(logger: Any) -> str:
    experiment = logger._experiment
    if not isinstance(logger, CSVLogger) or experiment is None:
        return ""
    logger.save()
    if not experiment._fs.isfile(experiment.metrics_file_path):
        return ""
    with experiment._fs.open(experiment.metrics_file_path, "r", newline="") as file:
        return str(file.read())


def restore_logs(
    loggers: Iterable[Logger], kept: list[dict[str, Any]], *, is_writer: bool
) -> None:
    """Let loggers write where they wrote before.

    From the file of a `CSVLogger` goes what a killed generation has written since.
    """
    for logger, of_logger in zip(loggers, kept, strict=False):
        if not of_logger or not isinstance(logger, (CSVLogger, TensorBoardLogger)):
            continue
        taken = logger.log_dir  # The next number, if Lightning was to find one.
        if is_writer and isinstance(logger, TensorBoardLogger):
            logger.experiment.close()
        logger._version = of_logger["version"]
        logger._experiment = None
        if not is_writer:
            continue
        if taken != logger.log_dir:
            _remove_unused(taken)
        if isinstance(logger, CSVLogger) and of_logger["rows"]:
            _write(logger.experiment, of_logger["rows"])


def _remove_unused(directory: str) -> None:
    """Remove the directory that this process made for nothing."""
    with suppress(OSError):  # There is something else in it, or it is a remote one.
        for name in os.listdir(directory):
            if name.startswith("events.") and f".{os.getpid()}." in name:
                os.remove(os.path.join(directory, name))
        os.rmdir(directory)


def _write(experiment: Any, rows: str) -> None:
    with experiment._fs.open(experiment.metrics_file_path, "w", newline="") as file:
        file.write(rows)
    experiment.metrics_keys = next(csv.reader(io.StringIO(rows)))
