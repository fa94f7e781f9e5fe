"""How a generation ended on one node, and on all nodes together."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


class EndKind(str, enum.Enum):
    """The ways in which a generation can end."""

    FINISHED = "finished"  # The programs came to their end.
    STOPPED = "stopped"  # They saved and exited, or had nothing to save.
    CRASHED = "crashed"
    LEFT = "left"  # A node is gone, which is nobody's fault.


@dataclass(frozen=True)
class Verdict:
    """How the replicas of a generation ended.

    Attributes:
        text: What happened, for a crash and for a node that is gone.
        code: The exit code of a program that stopped by itself; of a crash that of the
            replica it began with, or minus the number of the signal that killed it.
        rank: Of that replica; below 0 without a crash.
        num_passed: Samples and steps in this generation, as far as is known.
        rescued: What a survivor has saved alone, if one has.
        no_rescue: Why none has, and what to do.
        is_unsaved: Whether the last save of what finished or stopped has failed.
        is_own_fault: Whether the crash did not follow from another one.
        is_by_launcher: Whether the launcher had killed the replica that it names.
        is_from_outside: Whether a signal from outside ended that replica, which is no
            mistake of its program.
        is_out_of_memory: Whether that was the kernel's, since memory was full.
        time: Of the crash, by this machine's clock.
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
    def decode(cls, values: Mapping[str, Any], *, node: str) -> Verdict:
        verdict = cls(**{**values, "kind": EndKind(values["kind"])})
        text = f"on {node}: {verdict.text}" if verdict.text else ""
        return replace(verdict, is_here=False, text=text)


def merged(verdicts: Sequence[Verdict], gone: str) -> Verdict:
    """Merge the verdicts on all nodes into one.

    Args:
        verdicts: This node's first, then those that the others have told.
        gone: What became of the nodes that have told none; nothing if all have.
    """
    newest = max(verdict.newest for verdict in verdicts)
    crashes = [verdict for verdict in verdicts if verdict.kind == EndKind.CRASHED]
    own_faults = [verdict for verdict in crashes if verdict.is_own_fault]
    left = [verdict for verdict in verdicts if verdict.kind == EndKind.LEFT]
    if gone:  # What it left behind may have failed in any way.
        chosen = replace(
            verdicts[0], kind=EndKind.LEFT, text=gone, trace="", is_here=False
        )
    elif own_faults:
        chosen = min(own_faults, key=lambda verdict: verdict.time)
    elif left:
        chosen = left[0]
    elif crashes:
        chosen = min(crashes, key=lambda each: (each.is_by_launcher, each.time))
    else:
        stopped = [verdict for verdict in verdicts if verdict.kind == EndKind.STOPPED]
        chosen = max(stopped or verdicts, key=lambda verdict: verdict.code)
    has_trained = any(verdict.has_trained for verdict in verdicts)
    is_unsaved = any(verdict.is_unsaved for verdict in verdicts)
    rescued = next((each.rescued for each in verdicts if each.rescued), "")
    return replace(
        chosen,
        newest=newest,
        rescued=rescued,
        no_rescue=next((each.no_rescue for each in verdicts if each.no_rescue), ""),
        has_trained=has_trained,
        is_unsaved=is_unsaved,
    )
