"""Which replica is steadily slower than the others, who wait for it in every step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from elasticrun.replicas.wire import Message

_WINDOW_SECONDS = 3.0
_WINDOW_STEPS = 5
_NUM_WINDOWS = 4
_TIMES_OTHERS = 1.5
_LEAST_DIFFERENCE = 0.002  # Seconds a step; below that it is chance.


@dataclass
class Stragglers:
    """Compares, window by window, how long replicas work by themselves in a step.

    A replica is named when it was the slowest by far in several windows in a row, once
    in a generation.
    """

    _generation: object = None
    _begin: list[tuple[float, int]] = field(default_factory=list)
    _began_at: float = 0.0
    _slowest: int = -1
    _num_times: int = 0
    _named: set[int] = field(default_factory=set)

    def note(self, reports: Sequence[Message]) -> str:
        """Take the newest report of each replica, by rank.

        Returns:
            What to tell the user, or nothing.
        """
        if len(reports) < 2 or not all(reports):
            return ""
        own = [(report["own_seconds"], report["num_steps"]) for report in reports]
        now = max(report["time"] for report in reports)
        if reports[0]["generation"] != self._generation or len(own) != len(self._begin):
            self._generation, self._named = reports[0]["generation"], set()
            self._start_window(own, now)
            self._slowest, self._num_times = -1, 0
            return ""
        steps = [new[1] - old[1] for new, old in zip(own, self._begin, strict=True)]
        if now - self._began_at < _WINDOW_SECONDS or min(steps) < _WINDOW_STEPS:
            return ""
        times = [
            (new[0] - old[0]) / count
            for new, old, count in zip(own, self._begin, steps, strict=True)
        ]
        self._start_window(own, now)
        return self._judge(times)

    def _start_window(self, own: list[tuple[float, int]], now: float) -> None:
        self._begin, self._began_at = own, now

    def _judge(self, times: list[float]) -> str:
        rank = max(range(len(times)), key=times.__getitem__)
        others = statistics.median(times[:rank] + times[rank + 1 :])
        is_slow = times[rank] > max(_TIMES_OTHERS * others, others + _LEAST_DIFFERENCE)
        if not is_slow or rank != self._slowest:
            self._num_times = 0
        self._slowest = rank
        self._num_times += is_slow
        if self._num_times < _NUM_WINDOWS or rank in self._named:
            return ""
        self._named.add(rank)
        return (
            f"rank {rank} is slower than the others, who wait for it: until the "
            f"backward pass it needs {times[rank] * 1e3:.3g} ms a step, they "
            f"{others * 1e3:.3g} ms"
        )
