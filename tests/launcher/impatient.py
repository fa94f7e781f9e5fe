"""`elasticrun`, whose hang clock goes off when a test says so, however slow all is.

    impatient.py STAGE run ...

The test leaves the mark `hung`, which is taken away when the clock has gone off. Stacks
are waited for as long as the test likes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from elasticrun.__main__ import main
from elasticrun.launcher.supervisor import supervisor, watchdog
from elasticrun.launcher.supervisor.hangs import HangClock
from tests.support.stage import DEADLINE

MARK = Path(sys.argv.pop(1), "marks", "hung")


class MarkedClock(HangClock):
    """Goes off for whoever has been silent for any time, once there is the mark."""

    @property
    def timeout(self) -> float | None:
        return 0.0 if MARK.exists() else None

    def note_hang(self) -> None:
        MARK.unlink()


if __name__ == "__main__":
    supervisor.HangClock = MarkedClock  # type: ignore[misc]
    watchdog._MOST_STACKS_SECONDS = DEADLINE
    sys.exit(main())
