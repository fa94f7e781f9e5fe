"""What elasticrun says of itself: on stderr, whatever a script does with `logging`."""

from __future__ import annotations

import logging
import sys

# The script's: its level holds, and with a handler it says where messages go.
_OF_SCRIPT = logging.getLogger("elasticrun")


class Logger(logging.Logger):
    """Says what it is told to on stderr, or where the logger "elasticrun" has handlers.

    It is none of those that `logging` knows: a script's level, its file, a
    configuration that disables other loggers, `logging.disable` are for the script's
    own messages. These would else be among them, and missing where one looks for them.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.parent = _OF_SCRIPT

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802
        return level >= (self.level or _OF_SCRIPT.level or logging.WARNING)

    def callHandlers(self, record: logging.LogRecord) -> None:  # noqa: N802
        if _OF_SCRIPT.handlers:
            super().callHandlers(record)
        else:
            _TO_STDERR.handle(record)


class _ToStderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what stderr is now: a script, or a notebook, may replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


_TO_STDERR = _ToStderr()
