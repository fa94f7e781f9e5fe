"""The job's stop: its checkpoint, and the exception that ends the program."""

from __future__ import annotations

import logging
from typing import NoReturn

from elasticrun.control.gate import Decision
from elasticrun.control.watcher import Watcher
from elasticrun.errors import AgreementError, JobStopped
from elasticrun.position import Progress
from elasticrun.saves import Saves

logger = logging.getLogger(__name__)


class Stops:
    """Stops this replica at a boundary, and again if its program goes on.

    Args:
        grace: Seconds that the last checkpoint may take.

    Attributes:
        code: The exit code with which the job has stopped, or None.
    """

    def __init__(
        self,
        saves: Saves,
        watcher: Watcher,
        progress: Progress,
        *,
        rank: int,
        grace: float,
    ) -> None:
        self._saves = saves
        self._watcher = watcher
        self._progress = progress
        self._rank = rank
        self._grace = grace
        self.code: int | None = None

    def stop(self, decision: Decision) -> NoReturn:
        """Save, and stop. Collective.

        Raises:
            JobStopped: Always, but for:
            Exception: What a state's `save` raised.
        """
        self._watcher.note_stopping()
        try:
            path = self._saves.save(timeout=self._grace, may_end=True)
        except AgreementError as error:
            logger.error("stopping without a new checkpoint: %s", error)
            path = None
        if self._rank == 0:
            logger.info(
                "stopping at %s because of %s; %s",
                self._progress.position,
                decision.cause,
                f"saved {path}" if path else "nothing was saved",
            )
        self._watcher.note_stopped(decision.exit_code)
        self.code = decision.exit_code
        raise JobStopped(decision.exit_code)

    def check_not_stopped(self) -> None:
        """Stop a program once more that has caught its stop and goes on.

        It would count the loop that it has left as finished, and lose what remained of
        it.

        Raises:
            JobStopped: The job has stopped before.
        """
        if self.code is None:
            return
        logger.warning(
            "the program has caught the JobStopped with which the job stopped at %s, "
            "and went on; stopping again. Let a bare `except:` or `except "
            "BaseException:` around a loop raise it again, or catch Exception.",
            self._progress.position,
        )
        raise JobStopped(self.code)
