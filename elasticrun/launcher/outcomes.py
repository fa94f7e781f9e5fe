"""How a generation ended: on one node, and what that means for all of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from elasticrun.checkpoint.place import Place
from elasticrun.launcher.causes import STOP_CODES, first_cause
from elasticrun.launcher.generation import Generation

FINISHED = "finished"
STOPPED = "stopped"
CRASHED = "crashed"
LEFT = "left"
_MAX_TRACE = 20_000


@dataclass(frozen=True)
class Outcome:
    """How the replicas of a generation ended.

    Attributes:
        kind: FINISHED (their programs came to their end), STOPPED (they saved and
            exited), CRASHED, or LEFT: a node is gone, which is nobody's fault.
        text: What happened, for a crash and for a node that is gone.
        trace: The traceback of the first cause, or nothing.
        where: The position.
        code: The exit code of a program that stopped by itself.
        newest: The number of the newest checkpoint.
        has_trained: Whether a batch was trained.
        is_unsaved: Whether the last save of what finished or stopped has failed.
        is_own_fault: Whether the crash did not follow from another one.
        is_by_launcher: Whether the launcher had killed the replica that it names.
        time: Of the crash, by this machine's clock.
        is_here: Whether it happened on this node.
    """

    kind: str
    text: str = ""
    trace: str = ""
    where: str = ""
    code: int = 0
    newest: int = 0
    has_trained: bool = False
    is_unsaved: bool = False
    is_own_fault: bool = False
    is_by_launcher: bool = False
    time: float = 0.0
    is_here: bool = True

    def encode(self) -> dict[str, Any]:
        """Return what `decode` takes, as plain values; other nodes need few traces."""
        return asdict(self if self.is_own_fault else replace(self, trace=""))

    @classmethod
    def decode(cls, values: Mapping[str, Any], *, node: str) -> Outcome:
        """Return the outcome on another node."""
        outcome = cls(**values)
        text = f"on {node}: {outcome.text}" if outcome.text else ""
        return replace(outcome, is_here=False, text=text)


def outcome_of(generation: Generation, *, reason: str, directory: Place) -> Outcome:
    """Return how the replicas of this node ended.

    Args:
        reason: Why the launcher killed them, if it did.
        directory: Where checkpoints are unless a replica said otherwise.
    """
    cause = None if generation.is_discarded else first_cause(generation.endings)
    first = generation.members[0].report
    newest = generation.newest_checkpoint(directory)
    where = str(first.get("position", "the start of the script"))
    if cause is None:
        codes = [ending.code for ending in generation.endings]
        stops = [code for code in codes if code in STOP_CODES]
        kind = STOPPED if stops or generation.is_discarded else FINISHED
        code = max(stops, default=0)
        is_unsaved = any(member.has_failed_save for member in generation.members)
        return Outcome(
            kind, where=where, code=code, newest=newest, is_unsaved=is_unsaved
        )
    return Outcome(
        CRASHED,
        text=reason or generation.explain(cause),
        trace=cause.failure.trace[-_MAX_TRACE:] if cause.failure else "",
        where=where,
        newest=newest,
        is_own_fault=bool(reason) or cause.is_own_fault,
        is_by_launcher=cause.is_by_launcher and not reason,
        time=time.time() - (time.monotonic() - cause.time),
    )


def merged(outcomes: Sequence[Outcome], gone: str) -> Outcome:
    """Return what the outcomes on all nodes are together.

    Args:
        outcomes: This node's first, then those that the others have told.
        gone: What became of the nodes that have told none; nothing if all have.
    """
    newest = max(outcome.newest for outcome in outcomes)
    crashes = [outcome for outcome in outcomes if outcome.kind == CRASHED]
    own_faults = [outcome for outcome in crashes if outcome.is_own_fault]
    left = [outcome for outcome in outcomes if outcome.kind == LEFT]
    if gone:  # What it left behind may have failed in any way.
        chosen = replace(outcomes[0], kind=LEFT, text=gone, trace="", is_here=False)
    elif own_faults:
        chosen = min(own_faults, key=lambda outcome: outcome.time)
    elif left:
        chosen = left[0]
    elif crashes:
        chosen = min(crashes, key=lambda each: (each.is_by_launcher, each.time))
    else:
        stopped = [outcome for outcome in outcomes if outcome.kind == STOPPED]
        chosen = max(stopped or outcomes, key=lambda outcome: outcome.code)
    has_trained = any(outcome.has_trained for outcome in outcomes)
    is_unsaved = any(outcome.is_unsaved for outcome in outcomes)
    return replace(
        chosen, newest=newest, has_trained=has_trained, is_unsaved=is_unsaved
    )
