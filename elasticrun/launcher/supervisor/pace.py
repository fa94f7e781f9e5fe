"""Speed and remaining time of a job, from the reports of its rank 0."""

from __future__ import annotations

from elasticrun.checkpoint.position import STEPS, STEPS_OF
from elasticrun.replicas.wire import Message

_SHORTEST_LOOK = 0.4  # Seconds between two reports of which a speed is taken.
_SHORTEST_SPAN = 5.0  # Of training, before it is said how long more it takes.


class Pace:
    """Follows the reports of one generation after another.

    Attributes:
        rate: Samples (or steps) a second, over the last seconds; None before a batch.
        seconds_left: Until all epochs are finished; outside of epochs, the loop. None
            while that is not known.
    """

    def __init__(self) -> None:
        self.rate: float | None = None
        self.seconds_left: float | None = None
        self._generation = -1

    def note(self, report: Message) -> None:
        """Take the newest report."""
        passed, when = report["num_passed"], report["time"]
        if report["generation"] != self._generation:
            self._generation = report["generation"]
            self.rate = self.seconds_left = None
            self._looked_at, self._passed_then = when, passed
            self._first: tuple[float, float] | None = None
            self._epoch, self._epoch_size = report["epoch"], 0.0
            # What it began with belongs to this epoch, too.
            self._epoch_began = passed - report["index"]
        self._note_rate(passed, when)
        self._note_rest(self._fraction(report), report, when)

    def _note_rate(self, passed: int, when: float) -> None:
        if passed == 0 and self.rate is None:  # The first batch may take long.
            self._looked_at, self._passed_then = when, passed
        elif passed > self._passed_then and when - self._looked_at >= _SHORTEST_LOOK:
            rate = (passed - self._passed_then) / (when - self._looked_at)
            self.rate = rate if self.rate is None else (2 * self.rate + rate) / 3
            self._looked_at, self._passed_then = when, passed

    def _fraction(self, report: Message) -> float | None:
        """Return how many epochs are done; without epochs, how much of the loop."""
        passed, epoch = report["num_passed"], report["epoch"]
        if epoch > self._epoch:
            self._epoch_size = (passed - self._epoch_began) / (epoch - self._epoch)
            self._epoch, self._epoch_began = epoch, passed
        if report["num_epochs"] is None:
            size = report["num_samples"] if epoch == 0 else None
            return report["index"] / size if size else None
        size = self._epoch_size or report["num_samples"]
        return epoch + min(1.0, (passed - self._epoch_began) / size) if size else None

    def _note_rest(self, done: float | None, report: Message, when: float) -> None:
        if done is None or report["num_passed"] == 0:
            return
        self._first = since, done_then = self._first or (when, done)
        if when - since >= _SHORTEST_SPAN and done > done_then:
            rest = (report["num_epochs"] or 1) - done
            self.seconds_left = max(0.0, rest) * (when - since) / (done - done_then)


def place_of(report: Message) -> str | None:
    """Return where rank 0 is: "epoch 2 of 20, batch 119 of 900 in `train`".

    Epochs and batches are numbered from 0, as the loops' variables are; the numbers are
    also what is finished, as in a progress bar. None before the program has made the
    job.
    """
    if "batch" not in report:
        position: str | None = report.get("position")
        return position
    parts = []
    epoch, num_epochs = report["epoch"], report["num_epochs"]
    of_all = f" of {num_epochs}" if num_epochs else ""
    if report["in_epoch"]:
        parts.append(f"epoch {epoch}{of_all}")
    elif epoch:
        parts.append(f"after {epoch}{of_all} epochs")
    if report["batch"] is not None:
        loader = report["loader"].removeprefix(STEPS_OF)
        number = f"{unit_of(report, 'batch')} {report['batch']}"
        number += f" of {report['num_batches']}" if report["num_batches"] else ""
        parts.append(number + (f" in `{loader}`" if loader not in ("", STEPS) else ""))
    return ", ".join(parts) or str(report["position"])


def unit_of(report: Message, what: str) -> str:
    """Return `what`, or "step" where the loop that runs counts these."""
    is_steps = report.get("loader", "").startswith((STEPS, STEPS_OF))
    return "step" if is_steps else what
