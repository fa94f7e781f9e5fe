"""Kills a generation that has failed, that hangs, or that does not stop in time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elasticrun.launcher import processes
from elasticrun.launcher.event_loop import EventLoop, Timer
from elasticrun.launcher.options import AUTO
from elasticrun.launcher.supervisor.generation import Generation, Member

_SHORTEST = 540.0  # NCCL ends processes after 600, and says nothing of who hangs.
_TIMES_USUAL = 20.0
_SHORTEST_NOTICING = 10.0
_TIMES_USUAL_NOTICING = 3.0
_BETTER_CAUSE_SECONDS = 1.0
_FINALIZING_SECONDS = 10.0
_MOST_STACKS_SECONDS = 3.0
_STACKS_END_SECONDS = 0.3
_STACKS_ELSEWHERE_SECONDS = 2.0
_LOOK_SECONDS = 0.05
_TICK = 0.5


@dataclass
class HangClock:
    """Learns how long boundaries usually take.

    By itself ("auto") it looks at loops only, where boundaries must come: a program may
    do anything for any time outside of them. It doubles its patience after each hang,
    so that a job whose steps really take so long gets through.

    Args:
        setting: Seconds, which then count from the start; "auto"; None for never.
    """

    setting: float | str | None
    _longest: float = 0.0
    _shortest: float = _SHORTEST

    @property
    def timeout(self) -> float | None:
        """Seconds without a boundary that count as a hang, or None."""
        if self.setting == AUTO:
            return max(self._shortest, _TIMES_USUAL * self._longest)
        return None if self.setting is None else float(self.setting)

    @property
    def noticing(self) -> float:
        """Seconds in which one of the others comes to a collective or a boundary."""
        return max(_SHORTEST_NOTICING, _TIMES_USUAL_NOTICING * self._longest)

    def learn_gap(self, seconds: float) -> None:
        """Learn from the time between two boundaries of a loop."""
        self._longest = max(self._longest, seconds)

    def learn_hang(self) -> None:
        """Learn that this was too long, or that the patience was too short."""
        self._shortest *= 2

    def is_hung(self, silence: float, *, is_in_loop: bool) -> bool:
        """Return whether a replica hangs that has passed no boundary for so long."""
        timeout = self.timeout
        if timeout is None or (self.setting == AUTO and not is_in_loop):
            return False
        return silence > timeout


class Watchdog:
    """Watches one generation after another.

    Args:
        grace: Seconds that survivors have to save what was trained.
        on_hang: Called when a replica hangs, before it is ended.

    Attributes:
        reason: Why it let the running generation print its stacks and killed it, and in
            the end what those show; empty if it did not.
    """

    def __init__(
        self,
        loop: EventLoop,
        say: Callable[[str], None],
        hang: HangClock,
        *,
        grace: float,
        on_hang: Callable[[], None] = lambda: None,
    ) -> None:
        self.reason = ""
        self._loop = loop
        self._say = say
        self._hang = hang
        self._grace = grace
        self._on_hang = on_hang
        self._generation: Generation | None = None
        self._timer: Timer | None = None
        self._is_alone = True
        self._has_printed = False  # For another node, which has seen the hang.
        self._is_in_trouble = False
        self._looked_at = 0.0

    def begin(self, generation: Generation, *, is_alone: bool = True) -> None:
        """Watch a generation that starts."""
        self.reason = ""
        self._generation = generation
        self._is_alone = is_alone
        self._has_printed = False
        self._is_in_trouble = False
        self._looked_at = time.monotonic()
        self._loop.call_later(_TICK, lambda: self._tick(generation))

    def end(self) -> None:
        """Watch it no more: it has ended, and its stacks have been read."""
        generation, self._generation = self._generation, None
        if self.reason and generation is not None and generation.places:
            self.reason += f" ({generation.places})"
        self._set_timer(None)

    def on_trouble(self) -> None:
        """End the generation, once it is clear what the trouble began with.

        Survivors that may save what was trained come to an end of themselves. Once one
        of them has, they have the grace for it. A replica that has raised finalizes
        what its program has left before.
        """
        generation = self._generation
        if generation is None or generation.is_killed:
            return
        if generation.may_rescue:
            has_survivor_failed = generation.num_failed > 1
            seconds = self._grace if has_survivor_failed else self._hang.noticing
            self._is_in_trouble = True
            self._set_timer(min(seconds, self._grace), generation.kill)
            return
        if any(member.failure for member in generation.running):
            self._is_in_trouble = True  # It calls again when that one has ended.
            self._set_timer(_FINALIZING_SECONDS, generation.kill)
        elif any(ending.is_own_fault for ending in generation.endings):
            generation.kill()
        else:
            self._is_in_trouble = True
            self._set_timer(_BETTER_CAUSE_SECONDS, generation.kill)

    def expect_end(self, *, grace: float, leeway: float, cause: str) -> None:
        """End the generation if it has not ended by itself in time."""
        if self.reason or self._is_in_trouble:
            return  # It is about to be killed, which a grace would only put off.
        self._set_timer(
            grace + leeway,
            lambda: self._dump_and_kill(
                f"no boundary came within {grace:g} s of {cause}"
            ),
        )

    def print_stacks(self, why: str) -> None:
        """Let every replica print its stacks, unless they have."""
        generation = self._generation
        if generation is not None and not (generation.is_killed or self.reason):
            self._has_printed = True
            self._say(f"{why}: printing the stacks")
            generation.dump_stacks()

    def _dump_and_kill(self, why: str, *, culprit: Member | None = None) -> None:
        """Let every replica print its stacks before it is killed.

        Args:
            culprit: The one that hangs, if it is known.
        """
        generation = self._generation
        if generation is None or generation.is_killed or self.reason:
            return
        self.reason = why
        self._say(f"{why}: printing the stacks, then ending the replicas")
        generation.dump_stacks()
        deadline = time.monotonic() + _MOST_STACKS_SECONDS

        def look() -> None:
            # A replica that was suspended (SIGSTOP) never prints them.
            if not generation.has_dumped and time.monotonic() <= deadline:
                self._set_timer(_LOOK_SECONDS, look)
                return
            # What follows the first line comes with it, or in a moment; on other nodes
            # the replicas must first hear of it, and lose none until then.
            is_alone = self._is_alone
            seconds = _STACKS_END_SECONDS if is_alone else _STACKS_ELSEWHERE_SECONDS
            self._set_timer(seconds, kill)

        def kill() -> None:
            has_others = any(each is not culprit for each in generation.running)
            if culprit is not None and has_others and generation.may_rescue:
                # Whoever may save what was trained does so once that one is gone, and
                # comes to an end of itself.
                self._set_timer(self._grace, generation.kill)
                processes.kill_groups([culprit.pid])
            else:
                generation.kill()

        look()

    def _tick(self, generation: Generation) -> None:
        if generation is not self._generation or generation.is_killed:
            return
        if self.reason or self._has_printed:
            return
        self._loop.call_later(_TICK, lambda: self._tick(generation))
        now = time.monotonic()
        # While this process was suspended nobody has read what the replicas said.
        pause = max(0.0, now - self._looked_at - _TICK)
        self._looked_at = now
        for member in generation.running:
            member.moved_at = min(now, member.moved_at + pause)
            silence = now - member.moved_at
            is_in_loop = bool(member.report.get("is_in_loop"))
            if self._hang.is_hung(silence, is_in_loop=is_in_loop):
                self._hang.learn_hang()
                self._on_hang()
                culprit = self._find_culprit(generation.running, silence)
                why = self._explain_hang(culprit, silence)
                self._dump_and_kill(why, culprit=culprit)
                return
            if member.report.get("has_trained") and is_in_loop:
                self._hang.learn_gap(silence)

    def _find_culprit(self, running: Sequence[Member], silence: float) -> Member | None:
        # The others may have fallen silent a moment later, when they began to wait.
        since = time.monotonic() - silence / 2
        silent = [member for member in running if member.moved_at < since]
        is_known = self._is_alone or len(running) > 1
        return find_hanging(silent) if is_known else None

    def _explain_hang(self, culprit: Member | None, silence: float) -> str:
        if culprit is not None:
            return f"rank {culprit.rank} passed no boundary for {silence:.0f} s"
        where = "" if self._is_alone else " on this node"
        return f"no rank{where} passed a boundary for {silence:.0f} s"

    def _set_timer(
        self, seconds: float | None, callback: Callable[[], None] | None = None
    ) -> None:
        """Set the one timer; it replaces the one before."""
        if self._timer is not None:
            self._timer.cancel()
        if seconds is not None and callback is not None:
            self._timer = self._loop.call_later(seconds, callback)


def find_hanging(silent: Sequence[Member]) -> Member | None:
    """Return the silent replica for which the others wait, None if none stands out.

    Where one hangs, the others soon wait for it: in a collective, a forward pass
    further than it has come, or at a boundary that it has not reached.
    """
    behind = min(map(_progress, silent))
    last = [member for member in silent if _progress(member) == behind]
    return last[0] if len(last) < len(silent) or len(silent) == 1 else None


def _progress(member: Member) -> tuple[list[int], int]:
    report = member.report
    return list(report.get("counts", ())), report.get("num_forward_passes", 0)
