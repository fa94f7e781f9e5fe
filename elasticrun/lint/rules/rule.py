"""What Python knows of a rule; all else stands in its page, in lint/pages/."""

from __future__ import annotations

from typing import NamedTuple


class Rule(NamedTuple):
    """What one rule says beside a finding.

    Attributes:
        head: Its code, its severity, and its title. The severity is `E`, `W`, or `H`
            for a hint, which only `--pedantic` shows. A finding about something known
            only by its name is one level lower.
        help: What to do, in one line.
    """

    head: str
    help: str

    @property
    def code(self) -> str:
        return self.head[:5]

    @property
    def severity(self) -> str:
        return self.head[6]

    @property
    def title(self) -> str:
        return self.head[8:]
