"""Every exception and warning that elasticrun raises on purpose, and the exit codes.

And how their texts, and those of logs, are made.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from types import FrameType

# A process that has saved and exited ends with one of these: because somebody asked for
# it (EX_TEMPFAIL, neither success nor failure), or with what a shell says of a signal.
# These are the signals with which terminals, people and schedulers end processes.
STOPPED = 75
BY_SIGNAL = {
    signal.SIGHUP: 129,
    signal.SIGINT: 130,
    signal.SIGQUIT: 131,
    signal.SIGUSR1: 128 + signal.SIGUSR1,  # Numbers that differ between systems.
    signal.SIGUSR2: 128 + signal.SIGUSR2,
    signal.SIGALRM: 142,
    signal.SIGTERM: 143,
    signal.SIGXCPU: 152,
}
STOP_CODES = frozenset({STOPPED, *BY_SIGNAL.values()})

# How the commands end that start and ask a job. A check has a table of its own
# (check/report.py).
FAILED = 1
USAGE = 2
NO_JOB = 3
REFUSED = 4  # By the job, or it did not answer.

_OWN = f"{os.path.dirname(os.path.abspath(__file__))}{os.sep}"


class ElasticRunError(RuntimeError):
    """The job cannot go on; the text gives the values, the reason and the way out."""


class CheckpointError(ElasticRunError):
    """A checkpoint cannot be used: another job's or format, damaged, or unfit."""


class StateNameError(ElasticRunError):
    """A state's name is taken, or cannot be a file name."""


class LoopOrderError(ElasticRunError):
    """Loops or epoch loops overlap, so that the job would have two positions."""


class AgreementError(ElasticRunError):
    """The replicas could not agree, or one of them cannot be reached."""


class CheckpointWarning(UserWarning):
    """Something about checkpoints went wrong that training survives."""


def counted(number: int, what: str) -> str:
    """Return "1 replica", "2 replicas"."""
    return f"{number} {what}{'s' * (number != 1)}"


def text_of(error: BaseException) -> str:
    """Return what went wrong in words, never none: many errors have only a type.

    Those of elasticrun speak for themselves; of others the type is named.
    """
    name, text = type(error).__name__, str(error)
    if not text:
        return name
    return text if isinstance(error, ElasticRunError) else f"{name}: {text}"


class JobStopped(SystemExit):
    """Raised at the boundary where a stopped job exits; `code` is the exit code.

    A `SystemExit`, so that `except Exception` does not swallow it.
    """


def warn_at_program(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the program's line that has led here, past elasticrun and torch.

    In a thread of autograd's, where none has, at the line where the main thread is.
    """
    here = frame_of_program(sys._getframe(1))
    if here is None:
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        here = frame_of_program(main)
    if here is None:
        warnings.warn(text, category, stacklevel=2)
        return
    warnings.warn_explicit(
        text,
        category,
        here.f_code.co_filename,
        here.f_lineno,
        module=here.f_globals.get("__name__"),
        registry=here.f_globals.setdefault("__warningregistry__", {}),
    )


def is_of_program(file: str) -> bool:
    """Return whether a source file is neither elasticrun's nor torch's."""
    torchs = f"{os.sep}site-packages{os.sep}torch{os.sep}"
    return not file.startswith((_OWN, "<")) and torchs not in file


def is_of_package(file: str) -> bool:
    """Return whether a source file is one of a package that was installed."""
    return "site-packages" in file or "dist-packages" in file


def frame_of_program(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame from there that is not elasticrun's, nor torch's."""
    while frame is not None:
        if is_of_program(frame.f_code.co_filename):
            return frame
        frame = frame.f_back
    return None
