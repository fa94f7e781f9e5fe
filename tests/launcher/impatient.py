"""`elasticrun`, whose hang clock goes off when a test says so, however slow all is.

    impatient.py STAGE run ...

The test leaves the mark `hung`, which is taken away when the clock has gone off, and
the mark `dumped` when it has seen the stacks, before which no replica is ended. Where
`--hang-timeout` is "off" nothing is seen, but what another node sees is heard.
"""

from __future__ import annotations

import sys
from pathlib import Path

from elasticrun.__main__ import main
from elasticrun.launcher.supervisor import supervisor, watchdog
from elasticrun.launcher.supervisor.generation import Generation
from elasticrun.launcher.supervisor.watchdog import HangClock, Watchdog
from tests.support.stage import DEADLINE

MARKS = Path(sys.argv.pop(1), "marks")
HUNG, DUMPED = MARKS / "hung", MARKS / "dumped"
LOOK_SECONDS = 0.02


class MarkedClock(HangClock):
    """Goes off for whoever has been silent for any time, once there is the mark."""

    @property
    def timeout(self) -> float | None:
        return 0.0 if self.setting is not None and HUNG.exists() else None

    def learn_hang(self) -> None:
        HUNG.unlink()


class PatientWatchdog(Watchdog):
    """Ends nothing in trouble before its stacks are known."""

    def on_trouble(self) -> None:
        if DUMPED.exists():
            super().on_trouble()
        else:
            self._loop.call_later(LOOK_SECONDS, self.on_trouble)


if __name__ == "__main__":
    supervisor.HangClock = MarkedClock  # type: ignore[misc]
    supervisor.Watchdog = PatientWatchdog  # type: ignore[misc]
    Generation.has_dumped = property(lambda _: DUMPED.exists())  # type: ignore[assignment,method-assign]
    watchdog._MOST_STACKS_SECONDS = DEADLINE
    sys.exit(main())
