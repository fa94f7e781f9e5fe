"""Finds the cause of a difference: the zone, the field, the line and the rule."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from elasticrun.check.checked_run import (
    CheckedRun,
    LineChange,
    Replay,
    Snapshot,
    replays_of,
)
from elasticrun.check.comparing import MISSING, IgnoredDifferences, Mismatch, show
from elasticrun.check.replica.fields import VARIABLE_PREFIX
from elasticrun.check.replica.file_watch import FILE_PREFIX
from elasticrun.check.source import (
    ProgramSource,
    end_of_block,
    original_path,
    source_line,
)
from elasticrun.lint.finding import Finding

_LOST_RULES = ("ER301", "ER306", "ER302", "ER304", "ER307")
_LOST_RULE = "ER301"  # Where the linter has nothing.


class Cause(NamedTuple):
    """The cause of a difference, as far as it is known.

    Attributes:
        how: "replayed", "lost" (a plain variable), "drawn" (a random number), or
            "unknown".
        name: The field, file or variable that shows it.
        before: What it was when the job stopped.
        after: What it was when the program went on.
        path: The file of the line, in the user's directory; empty if unknown.
        rule: The linter's rule that describes such a line; empty if none does.
    """

    how: str
    name: str = ""
    zone: str = ""
    before: Any = None
    after: Any = None
    path: str = ""
    line: int = 0
    rule: str = ""
    message: str = ""
    source: str = ""

    @property
    def place(self) -> tuple[str, ...]:
        """The key by which two causes are the same, whatever the values are."""
        known = (self.path, str(self.line)) if self.path else (self.name, self.zone)
        return (self.how, *known)

    def describe(self) -> str:
        change = f"{self.name} {show(self.before)} -> {show(self.after)}"
        if self.how == "replayed":
            return f"replayed code in zone {self.zone} changed {change}"
        if self.how == "lost":
            return f"the plain variable {change} was not kept over the restart"
        if self.how == "drawn":
            return f"zone {self.zone} draws from a generator without a seed"
        return (
            "no registered state and no variable explains it; what workers of loaders "
            "and objects of other packages keep was not looked at"
        )


def replayed_changes(run: CheckedRun, ignored: IgnoredDifferences) -> list[Cause]:
    """Return what the replays of a run changed, with the zone that did it."""
    changes: list[Cause] = []
    for replay in replays_of(run.snapshots):
        before, after = _visible(replay.stopped), _visible(replay.resumed)
        for name, now in {**before, **after}.items():
            # A state that is registered later in the program cannot have changed yet.
            is_late = name not in before and not name.startswith(FILE_PREFIX)
            if is_late or ignored.hides(name) or before.get(name, MISSING) == now:
                continue
            zone = _zone_of(name, replay)
            if zone != "P" and not name.startswith(FILE_PREFIX):
                continue  # A state's change that is undone where the replay ends.
            changes.append(Cause("replayed", name, zone, before.get(name), now))
    return changes


def _visible(snapshot: Snapshot) -> dict[str, Any]:
    files = {FILE_PREFIX + path: entry for path, entry in snapshot.files.items()}
    return {**snapshot.fields, **files}


def _zone_of(name: str, replay: Replay) -> str:
    last = _visible(replay.stopped).get(name)
    for zone, snapshot in replay.steps:
        value = _visible(snapshot).get(name, last)
        if value != last:
            return zone
    return replay.steps[-1][0]


def lost_variables(run: CheckedRun, noise: Iterable[str]) -> list[Cause]:
    """Return the plain variables that were something else when the program went on."""
    changes: dict[str, Cause] = {}
    for replay in replays_of(run.snapshots):
        before, after = replay.stopped.variables, replay.resumed.variables
        for name, value in before.items():
            if name in noise or value == after.get(name, MISSING):
                continue
            if name in after or replay.resumed.key.kind != "exit":
                zone, found = replay.steps[-1][0], after.get(name, MISSING)
                changes.setdefault(name, Cause("lost", name, zone, value, found))
    return list(changes.values())


@dataclass
class CauseFinder:
    """Finds causes from the records of runs and the findings of the linter."""

    source: ProgramSource
    findings: Sequence[Finding]
    ignored: IgnoredDifferences

    def causes(
        self,
        run: CheckedRun,
        differences: Sequence[Mismatch],
        lines: Sequence[LineChange],
    ) -> list[Cause]:
        """Return what explains the differences of a run, the best explanation first.

        Args:
            lines: What a second run of the scenario, looked at line by line, showed.
        """
        changes = replayed_changes(run, self.ignored)
        names = {difference.name for difference in differences}
        # What explains the first difference, and what a replay did besides.
        changes.sort(key=lambda change: (change.name not in names, _rank(change)))
        causes = self._replayed(changes, lines)
        if causes:
            return causes
        return self.lost(run, lines) or [Cause("unknown")]

    def drawn(
        self, lines: Sequence[LineChange], generators: Collection[str]
    ) -> list[Cause]:
        """Return the lines that draw from some generators as causes."""
        own = [line for line in lines if line.field in generators]
        return _unique(self._located(Cause("drawn", line.field), line) for line in own)

    def _located(self, cause: Cause, line: LineChange) -> Cause:
        path = original_path(line.path, self.source)
        source = source_line(path, line.line)
        return cause._replace(zone=line.zone, path=path, line=line.line, source=source)

    def _replayed(
        self, changes: Sequence[Cause], lines: Sequence[LineChange]
    ) -> list[Cause]:
        causes = []
        for change in changes:
            own = [line for line in lines if line.field == change.name]
            cause = self._located(change, own[0]) if own else change
            rule, message = self._rule_at(cause.path, cause.line)
            if not rule:  # What such a change is, where the linter has nothing.
                is_file = change.name.startswith(FILE_PREFIX)
                is_appended = change.before and change.after
                rule = "ER107" if not is_file else "ER104" if is_appended else ""
            causes.append(cause._replace(rule=rule, message=message))
        return _unique(causes)

    def lost(self, run: CheckedRun, lines: Sequence[LineChange] = ()) -> list[Cause]:
        """Return the plain variables that a restart lost, and what is known of them."""
        causes = []
        for change in lost_variables(run, self.ignored.noise):
            finding = self._finding_about(change.name, _LOST_RULES)
            # What has set it last before the restart.
            own = [
                self._located(change, line)
                for line in lines
                if line.field == VARIABLE_PREFIX + change.name
                if line.generation == 0
            ]
            if finding is not None:
                causes.append(_at(change, finding))
            elif own:
                causes.append(own[-1]._replace(rule=_LOST_RULE))
            elif change.after != MISSING:
                causes.append(change)
        causes.sort(key=lambda each: (not each.message, not each.path, each.name))
        return causes

    def _rule_at(self, path: str, line: int) -> tuple[str, str]:
        """Return the rule and the message of a finding at a line, if there is one."""
        # A file is written when its block ends, which Python counts as its first line;
        # a finding about it stands where the block begins.
        last = end_of_block(path, line)
        for finding in self.findings:
            if os.path.realpath(finding.path) != os.path.realpath(path):
                continue
            end = max(finding.end_line, end_of_block(path, finding.line))
            if finding.code.startswith("ER1") and finding.line <= last and line <= end:
                return finding.code, finding.message
        return "", ""

    def _finding_about(self, name: str, rules: Sequence[str]) -> Finding | None:
        """Return the linter's finding about a variable, the most telling rule first."""
        bare = name.rpartition(".")[2].removeprefix("len(").rstrip(")").split("[")[0]
        about = [
            finding
            for finding in self.findings
            if finding.code in rules and _mentions(finding, bare)
        ]
        return min(about, key=lambda each: rules.index(each.code), default=None)


def _unique(causes: Iterable[Cause]) -> list[Cause]:
    """Return the first cause of each place."""
    by_place: dict[tuple[str, ...], Cause] = {}
    for cause in causes:
        by_place.setdefault(cause.place, cause)
    return list(by_place.values())


def _at(cause: Cause, finding: Finding) -> Cause:
    return cause._replace(
        path=os.path.realpath(finding.path),
        line=finding.line,
        rule=finding.code,
        message=finding.message,
        source=finding.source,
    )


def _mentions(finding: Finding, name: str) -> bool:
    """Return whether a finding is about a name: one that it quotes, or assigns."""
    quoted = re.findall(r"`([^`]+)`", finding.message)
    if quoted:
        return any(name == each.rpartition(".")[2] for each in quoted)
    return name in re.findall(r"\w+", finding.source.partition("=")[0])


def _rank(change: Cause) -> tuple[int, bool, str]:
    """Return what puts the most telling field first: counters before tensors."""
    is_count = isinstance(change.after, int) and not isinstance(change.after, bool)
    is_plain = not isinstance(change.after, dict)
    is_hidden = "._" in change.name
    return (2 - is_count - is_plain, is_hidden, change.name)
