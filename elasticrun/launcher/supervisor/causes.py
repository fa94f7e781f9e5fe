"""Why a generation ended: finds the first failure, which caused the others."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from elasticrun.errors import BY_SIGNAL, STOP_CODES

_OTHERS_FAULT = re.compile(
    r"AgreementError|DistNetworkError|DistBackendError|DistStoreError|ConnectionError"
    r"|ConnectionResetError|BrokenPipeError|[Cc]onnection (was )?(closed|reset|refused)"
    r"|Socket Timeout|Broken pipe|ncclRemoteError|process of rank \d+ died"
)

_ABORT_HINT = (
    ": a check in C++ failed, or a collective timed out and NCCL's watchdog ended the "
    "process; its log says which"
)

# What torch says where a program asks for a GPU that is not there.
_NO_CUDA = re.compile(
    r"Torch not compiled with CUDA enabled|No CUDA GPUs are available"
    r"|Found no NVIDIA driver|on a CUDA device but torch\.cuda\.is_available"
)
_NO_CUDA_HINT = (
    "\nelasticrun.device() is this replica's device: a GPU of its own, or the CPU "
    'where there is none; use it in place of "cuda"'
)


@dataclass(frozen=True)
class Failure:
    """An exception that a replica's program did not catch.

    Attributes:
        summary: Its last line: the type and the text.
        trace: What a person is shown of the traceback; the log has all of it.
    """

    summary: str
    trace: str


@dataclass(frozen=True)
class Ending:
    """How one replica ended.

    Attributes:
        code: The exit code, or minus the number of the signal that killed it.
        time: When, or when its exception was raised.
        failure: The exception, if it had one.
        is_by_launcher: Whether the launcher killed it.
        has_left: Whether it ended without a failure while the others trained, which
            they could not without it.
    """

    rank: int
    code: int
    time: float
    failure: Failure | None = None
    is_by_launcher: bool = False
    has_left: bool = False

    @property
    def is_failure(self) -> bool:
        """Whether it is neither the end of the program nor a stop."""
        return (
            self.has_left
            or self.failure is not None
            or self.code not in (0, *STOP_CODES)
        )

    @property
    def is_from_outside(self) -> bool:
        """Whether it was ended by a signal that comes from outside of its program.

        Stop signals end it only before its program has made its job.
        """
        is_sent = -self.code in (signal.SIGKILL, *BY_SIGNAL)
        return is_sent and self.failure is None and not self.is_by_launcher

    @property
    def is_abort(self) -> bool:
        """Whether it ended itself from C++, as NCCL's watchdog does for others."""
        return self.code == -signal.SIGABRT and self.failure is None

    @property
    def is_own_fault(self) -> bool:
        """Whether it fell by itself, not because another replica was gone."""
        if not self.is_failure or (self.is_by_launcher and self.failure is None):
            return False
        return self.failure is None or not _OTHERS_FAULT.search(self.failure.summary)


def first_cause(endings: Sequence[Ending]) -> Ending | None:
    """Return the failure that the others followed from, or None if nothing failed."""
    failures = [ending for ending in endings if ending.is_failure]
    if not failures:
        return None
    first = min(
        failures,
        key=lambda ending: (
            not ending.is_own_fault,
            ending.is_by_launcher and ending.failure is None,
            ending.is_abort,
            ending.time,
        ),
    )
    left = [ending for ending in endings if not ending.is_failure]
    if first.is_own_fault or not left:
        return first
    return replace(min(left, key=lambda ending: ending.time), has_left=True)


def describe(ending: Ending, *, hint: str = "") -> str:
    """Return a failure as a sentence for people."""
    if ending.failure is not None:
        summary = ending.failure.summary
        hint = _NO_CUDA_HINT if _NO_CUDA.search(summary) else ""
        return f"rank {ending.rank} raised {summary}{hint}"
    if ending.code < 0:
        return (
            f"rank {ending.rank} was killed by signal {-ending.code}"
            f"{_signal_name(-ending.code)}"
            + (hint and f": {hint}")
            + (_ABORT_HINT if ending.is_abort else "")
        )
    if ending.has_left:
        return (
            f"rank {ending.rank} ended with exit code {ending.code} while the others "
            "were still training"
        )
    return f"rank {ending.rank} exited with code {ending.code}"


def explain_kill(kills_before: int | None, kills_now: int | None) -> str:
    """Return what to think of a SIGKILL that the launcher did not send."""
    if kills_before is None or kills_now is None or kills_now <= kills_before:
        return ""
    return (
        "probably by the out-of-memory killer, since the kernel killed a process at "
        "that time because memory was full; use smaller batches or fewer replicas"
    )


def _signal_name(number: int) -> str:
    try:
        return f" ({signal.Signals(number).name})"
    except ValueError:
        return ""
