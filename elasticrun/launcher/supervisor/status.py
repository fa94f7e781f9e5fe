"""What `elasticrun status` shows of a job."""

from __future__ import annotations

import os
import time

from elasticrun.checkpoint.position import STEPS, STEPS_OF, unit_of
from elasticrun.errors import counted
from elasticrun.launcher import processes
from elasticrun.launcher.supervisor.generation import Member
from elasticrun.launcher.supervisor.supervisor import Supervisor
from elasticrun.launcher.terminal.status_table import duration, speed_text
from elasticrun.replicas.wire import Message

_SHORTEST_SPAN = 2.0
_SHORTEST_LOOK = 0.4  # Seconds between two reports of which a speed is taken.
_LOOK_SECONDS = 1.0
_SHORTEST_STRETCH = 5.0  # Trained before it is said how long more it takes.
_OF_REPORT = (
    *("position", "num_epochs", "epoch", "batch", "num_batches", "no_boundary"),
    *("index", "num_samples"),
)


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

    def take(self, report: Message) -> None:
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
        self._update_rate(passed, when)
        self._update_rest(self._fraction(report), report, when)

    def _update_rate(self, passed: int, when: float) -> None:
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

    def _update_rest(self, done: float | None, report: Message, when: float) -> None:
        if done is None or report["num_passed"] == 0:
            return
        self._first = since, done_then = self._first or (when, done)
        if when - since >= _SHORTEST_STRETCH and done > done_then:
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
        number = f"{unit_of(report['loader'], 'batch')} {report['batch']}"
        number += f" of {report['num_batches']}" if report["num_batches"] else ""
        parts.append(number + (f" in `{loader}`" if loader not in ("", STEPS) else ""))
    return ", ".join(parts) or str(report["position"])


class JobStatus:
    """Describes the job; speed and processor use come from what it saw before."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._pace = Pace()
        self._state, self._state_since = "", time.monotonic()
        self._usage: dict[int, tuple[float, float]] = {}
        self._look: dict[int, tuple[float, int]] = {}
        self._looked_at = 0.0
        # The newest checkpoint's number, and when it was saved if that is known.
        newest = supervisor.crashes.newest_at_start or None
        self._saved: tuple[int | None, float | None] = newest, None
        supervisor.reports.on_reported.append(self._on_report)
        self._look_at_state()

    def _look_at_state(self) -> None:
        """Notice since when the job does what it does, to a second."""
        self._seconds_in_state()
        self._supervisor.loop.call_later(_LOOK_SECONDS, self._look_at_state)

    def _seconds_in_state(self) -> float:
        now, state = time.monotonic(), self._supervisor.state
        if state != self._state:
            self._state, self._state_since = state, now
        return now - self._state_since

    def _on_report(self, member: Member) -> None:
        generation = self._supervisor.generation
        if generation is not None and member is generation.members[0]:
            self._pace.take(member.report)
            if member.report["checkpoint"] is not None:
                self._saved = member.report["checkpoint"], member.report["saved_at"]

    def status(self) -> Message:
        """Return everything, as plain values."""
        supervisor = self._supervisor
        options, generation = supervisor.options, supervisor.generation
        members, report = self._running, self._first_report
        spares = supervisor.successors.spares
        usage = self._usage_of([*(member.pid for member in members), *spares])
        checkpoint, saved_at = self._saved
        return {
            "job": options.name,
            "pid": os.getpid(),
            "state": supervisor.state,
            "seconds_in_state": self._seconds_in_state(),
            "replicas": len(members),
            "target": supervisor.successors.size,
            **self._describe_nodes(),
            "generation": generation.number if generation is not None else None,
            **{key: report.get(key) for key in _OF_REPORT},
            "place": place_of(report),
            "seconds_left": self._pace.seconds_left if report else None,
            "samples_per_second": self._pace.rate if report else None,
            "unit": unit_of(report.get("loader", "")),
            "last_output": supervisor.reports.last_output,
            "seconds_since_output": (
                time.time() - supervisor.reports.last_output_at
                if supervisor.reports.last_output
                else None
            ),
            "checkpoint": checkpoint,
            "failed_saves": report.get("failed_saves", 0),
            "seconds_since_checkpoint": (
                None if saved_at is None else max(0.0, time.time() - saved_at)
            ),
            "restarts": supervisor.crashes.num_restarts,
            "causes": supervisor.crashes.causes,
            "checkpoint_dir": report.get("checkpoint_dir")
            or str(options.checkpoint_dir),
            "started_in": os.getcwd(),
            "local_dir": str(options.local_dir),
            "log_dir": str(options.log_dir),
            "seconds": time.time() - supervisor.policy.started_at,
            "spares": supervisor.successors.num_ready_spares,
            "spare_memory": sum(usage[pid][1] for pid in spares),
            "members": [
                self._describe(member, *usage[member.pid]) for member in members
            ],
        }

    def _usage_of(self, pids: list[int]) -> dict[int, tuple[float, int]]:
        """Return what replicas use, as it was a moment ago: a look takes its time."""
        now = time.monotonic()
        if now - self._looked_at >= _SHORTEST_LOOK or self._look.keys() != set(pids):
            self._look = processes.usage_of_groups(pids)
            self._looked_at = now
        return self._look

    @property
    def _running(self) -> list[Member]:
        generation = self._supervisor.generation
        return generation.running if generation is not None else []

    @property
    def _first_report(self) -> Message:
        """The report of the first replica; empty if that does not run."""
        generation = self._supervisor.generation
        members = self._running
        is_first = bool(generation and members[:1] == generation.members[:1])
        return members[0].report if is_first else {}

    def _describe_nodes(self) -> Message:
        """Return what there is of a job on many machines."""
        supervisor, round_ = self._supervisor, self._supervisor.nodes.round
        is_among_nodes = supervisor.options.nodes is not None
        if not is_among_nodes or supervisor.generation is None or round_ is None:
            return {}
        return {
            "node": round_.node,
            "nodes": round_.num_nodes,
            "node_names": list(round_.names),
            "world_size": round_.size,
        }

    def status_line(self) -> str:
        """Return the line that a terminal shows all the time.

        It takes nothing else of a status, which looks at all processes for usage: that
        would cost too much twice a second.
        """
        supervisor, report = self._supervisor, self._first_report
        state, generation = supervisor.state, supervisor.generation
        if state == "starting" and generation is not None:
            state = "running"  # Perhaps a script that never makes a job.
        parts = [f"{supervisor.options.name}: {state}"]
        if generation is not None:
            number = len(generation.running)
            parts.append(
                f"generation {generation.number}, {counted(number, 'replica')}"
            )
        if place := place_of(report):
            left = self._pace.seconds_left
            parts.append(place + ("" if left is None else f", {duration(left)} left"))
        if report and self._pace.rate:
            parts.append(speed_text(self._pace.rate, unit_of(report.get("loader", ""))))
        return " | ".join(parts)

    def _describe(self, member: Member, seconds: float, memory: int) -> Message:
        now = time.monotonic()
        before, since = self._usage.get(member.pid, (0.0, member.started_at))
        if now - since >= _SHORTEST_SPAN or member.pid not in self._usage:
            self._usage[member.pid] = seconds, now
        return {
            "rank": member.rank,
            "pid": member.pid,
            "memory": memory,
            "cpu": (seconds - before) / max(now - since, 0.001),
            "can_rescue": bool(member.report.get("can_rescue")),
            "gpu_memory": member.report.get("gpu_memory"),
            "gpu_utilization": member.report.get("gpu_utilization"),
            "position": member.report.get("position"),
        }
