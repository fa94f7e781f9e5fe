"""How replicas end, and how a generation does: on one node, and on all together."""

from __future__ import annotations

import enum
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from elasticrun.errors import BY_SIGNAL, STOP_CODES

_OTHERS_FAULT = re.compile(
    r"AgreementError|DistNetworkError|DistBackendError|DistStoreError|ConnectionError"
    r"|ConnectionResetError|BrokenPipeError|[Cc]onnection (was )?(closed|reset|refused)"
    r"|Socket Timeout|Broken pipe|ncclRemoteError|process of rank \d+ died"
)

_ABORT_HINT = (
    ": a check in C++ failed, as gloo's does where replicas differ in their backward "
    "passes or collectives, or NCCL's watchdog ended the process after a timeout; its "
    "log says which"
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


class EndKind(str, enum.Enum):
    """The ways in which a generation can end."""

    FINISHED = "finished"  # The programs came to their end.
    STOPPED = "stopped"  # They saved and exited, or had nothing to save.
    CRASHED = "crashed"
    LEFT = "left"  # A node is gone, which is nobody's fault.


@dataclass(frozen=True)
class Outcome:
    """How the replicas of a generation ended.

    Attributes:
        text: What happened, for a crash and for a node that is gone.
        code: The exit code of a program that stopped by itself; of a crash that of the
            replica it began with, or minus the number of the signal that killed it.
        rank: That replica's; below 0 without a crash.
        num_passed: Samples and steps in this generation, as far as is known.
        rescued: What a survivor has saved alone, if one has.
        no_rescue: Why none has, and what to do.
        is_unsaved: Whether the last save of what finished or stopped has failed.
        is_own_fault: Whether the crash did not follow from another one.
        is_by_launcher: Whether the launcher had killed the replica that it names.
        is_from_outside: Whether a signal from outside ended that replica, which is no
            mistake of its program.
        is_out_of_memory: Whether that was the kernel's, since memory was full.
        time: When it crashed, by this machine's clock.
        is_here: Whether it happened on this node.
    """

    kind: EndKind
    text: str = ""
    trace: str = ""
    where: str = ""
    code: int = 0
    rank: int = -1
    num_passed: int = 0
    newest: int = 0
    rescued: str = ""
    no_rescue: str = ""
    has_trained: bool = False
    is_unsaved: bool = False
    is_own_fault: bool = False
    is_by_launcher: bool = False
    is_from_outside: bool = False
    is_out_of_memory: bool = False
    time: float = 0.0
    is_here: bool = True

    def encode(self) -> dict[str, Any]:
        """Return what `decode` takes, as plain values; other nodes need few traces."""
        return asdict(self if self.is_own_fault else replace(self, trace=""))

    @classmethod
    def decode(cls, values: Mapping[str, Any], *, node: str) -> Outcome:
        outcome = cls(**{**values, "kind": EndKind(values["kind"])})
        text = f"on {node}: {outcome.text}" if outcome.text else ""
        return replace(outcome, is_here=False, text=text)


def merged(outcomes: Sequence[Outcome], gone: str) -> Outcome:
    """Merge the outcomes on all nodes into one.

    Args:
        outcomes: This node's first, then those that the others have told.
        gone: What became of the nodes that have told none; nothing if all have.
    """
    newest = max(outcome.newest for outcome in outcomes)
    crashes = [outcome for outcome in outcomes if outcome.kind == EndKind.CRASHED]
    own_faults = [outcome for outcome in crashes if outcome.is_own_fault]
    left = [outcome for outcome in outcomes if outcome.kind == EndKind.LEFT]
    if gone:  # What it left behind may have failed in any way.
        chosen = replace(
            outcomes[0], kind=EndKind.LEFT, text=gone, trace="", is_here=False
        )
    elif own_faults:
        chosen = min(own_faults, key=lambda outcome: outcome.time)
    elif left:
        chosen = left[0]
    elif crashes:
        chosen = min(crashes, key=lambda each: (each.is_by_launcher, each.time))
    else:
        stopped = [outcome for outcome in outcomes if outcome.kind == EndKind.STOPPED]
        chosen = max(stopped or outcomes, key=lambda outcome: outcome.code)
    has_trained = any(outcome.has_trained for outcome in outcomes)
    is_unsaved = any(outcome.is_unsaved for outcome in outcomes)
    rescued = next((each.rescued for each in outcomes if each.rescued), "")
    return replace(
        chosen,
        newest=newest,
        rescued=rescued,
        no_rescue=next((each.no_rescue for each in outcomes if each.no_rescue), ""),
        has_trained=has_trained,
        is_unsaved=is_unsaved,
    )
