"""The launcher's core: starts one generation after another until the job ends.

A generation ends and the next one begins in these steps. All of them run in the
launcher's one thread, called back by its loop; in brackets, who works meanwhile.

    request        `scale`, from a command over the control socket; or a replica has
                   crashed, or another node asks for it
    TRAINING       `Successors.prepare`: they are forked [the forkserver], run their
                   script beside the generation, up to where it needs the job, and wait
                   there [their main threads]
    STOPPING       `_on_prepared`: all of them wait, or there are other nodes, so the
                   generation is asked to save and exit [rank 0's reporter thread asks
                   its job, the watchers of all replicas agree on a boundary, their main
                   threads save there and exit]
    CONCLUDING     `on_all_ended`: the kernel has said of each that it has; the nodes
                   tell each other how
    GATHERING      `on_outcome`: this node asks to join the next generation
    OFFERED        `on_joined`: it offers the successors that wait
    TRAINING       `on_round`: all nodes have offered, so the successors get their
                   orders and run the program, or on, which loads what was saved

A job on one machine goes through the same steps, and waits for nobody in them.

These are callbacks, and no coroutine that reads from top to bottom: at each of its
waits a crash, a stop, another `scale`, another node's request or a failed fork may come
instead, so behind each `await` there would be the same table of cases.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from elasticrun.errors import BY_SIGNAL, STOPPED, counted
from elasticrun.launcher import directory, processes
from elasticrun.launcher.endings import EndKind, Outcome
from elasticrun.launcher.event_loop import EventLoop
from elasticrun.launcher.forks.starter import ForkserverClient
from elasticrun.launcher.forks.waiting import ForkedReplica
from elasticrun.launcher.nodes.many_nodes import nodes_of
from elasticrun.launcher.nodes.nodes import END, LEAVE, SCALE, Offer, RoundPlan
from elasticrun.launcher.options import Options
from elasticrun.launcher.replica.functions import remove_results
from elasticrun.launcher.supervisor.generation import Generation
from elasticrun.launcher.supervisor.orders import make_orders
from elasticrun.launcher.supervisor.replica_reports import ReplicaReports
from elasticrun.launcher.supervisor.restart_policy import (
    CrashHistory,
    NextAction,
    RestartPolicy,
    Stop,
    outcome_of,
)
from elasticrun.launcher.supervisor.successors import Successors
from elasticrun.launcher.supervisor.watchdog import HangClock, Watchdog
from elasticrun.launcher.terminal.console import Console
from elasticrun.replicas.signals import ANNOUNCING

_AFTER_GRACE_SECONDS = 3.0
_REAP_SECONDS = 1.0
_REPEATABLE = {number.name for number in BY_SIGNAL if number not in ANNOUNCING}


class Phase(enum.Enum):
    """Where the job is between two generations' beginnings; what it waits for."""

    # Without a generation:
    PAUSED = "the delay before the restart after a crash"
    GATHERING = "replicas that wait, and membership for them"
    OFFERED = "the offers of the other nodes"
    # With one, from its start to the end of its last replica:
    TRAINING = "a request, successors that can take over, or an end"
    STOPPING = "all replicas to save and exit"
    # Without it again:
    CONCLUDING = "how it ended on the other nodes"


class Supervisor:
    """Keeps a job running: starts generations, judges their ends, obeys requests.

    Args:
        find_loss: Tells how the job's directory was lost, in words, if it was.

    Attributes:
        generation: The one that runs, or None between two.
        successors: The replicas that wait for the next one.
        policy: Decides what follows from the end of a generation.
        exit_code: The launcher's, once the job is over.
        problem: Why it, or the generation before, ended without saving what was
            trained; empty if it did not.
        reports: Tells what is heard of the generation that runs.
    """

    def __init__(
        self,
        options: Options,
        console: Console,
        loop: EventLoop,
        find_loss: Callable[[], str],
    ) -> None:
        self.options = options
        self.loop = loop
        self.generation: Generation | None = None
        self.exit_code: int | None = None
        self.problem = ""
        newest = directory.newest_checkpoint(options.checkpoint_dir)
        self.crashes = CrashHistory(options.max_restarts, newest_at_start=newest)
        self.policy = RestartPolicy(options, console, self.crashes)
        self.reports = ReplicaReports(console, self.crashes, is_quiet=options.is_quiet)
        self._console = console
        self._find_loss = find_loss
        self._phase = Phase.GATHERING
        self._stop = Stop.NONE  # Why the generation was asked to exit, until the next.
        self._stop_code = STOPPED
        self._is_hurried = False
        self._place = options.checkpoint_dir  # Or where its replicas save.
        self._grace = options.settings.grace
        # This process had them before it was the launcher, as by `tensorboard & exec
        # elasticrun run`.
        self._strangers = set(processes.children())
        self._watchdog = Watchdog(
            loop,
            console.event,
            HangClock(options.hang_timeout),
            grace=options.settings.grace,
            on_hang=lambda: self.nodes.tell_trouble(is_hang=True),
        )
        self._starter = ForkserverClient(
            loop,
            is_exec=options.is_exec,
            say=self.reports.tell,
            on_failure=self._on_no_replicas,
        )
        self.nodes = nodes_of(options, loop=loop, subscriber=self, say=console.event)
        self.successors = Successors(
            options,
            loop,
            starter=self._starter,
            console=console,
            reports=self.reports,
            on_ready=self._join_round,
            on_prepared=self._on_prepared,
        )

    # What the rest of the launcher asks for.

    def start(self) -> None:
        """Start the forkserver, and with it the first generation."""
        self._starter.start()
        if self.exit_code is not None:  # It has said that it cannot.
            return
        self.nodes.open()
        self._reap()

    def close(self) -> None:
        """Leave no process behind."""
        self._starter.close()
        if self.generation is not None:
            self.generation.kill()
        self.nodes.close(is_hurried=self._is_hurried)
        processes.kill_children(
            but=self._strangers, patience=processes.CLEANING_SECONDS
        )
        # Last, for a disk may hang.
        if isinstance(self._place, Path) and not self._is_hurried:
            directory.force_newest(self._place, self._console.event)

    def _reap(self) -> None:
        """Forget orphans that have ended, now and then; there may be any number."""
        running = self.generation.members if self.generation is not None else []
        # While one is forked, its end would be taken for that of an orphan.
        if not self._starter.is_forking:
            processes.reap(but={each.pid for each in running} | self._waiting_pids)
        self.loop.call_later(_REAP_SECONDS, self._reap)

    @property
    def _waiting_pids(self) -> set[int]:
        """The processes that outlive the generation that runs."""
        return self._starter.pids | self.successors.pids | self.nodes.pids

    @property
    def state(self) -> str:
        if self._stop is not Stop.NONE:
            return "rescaling" if self._stop is Stop.SCALE else "stopping"
        if self._phase is Phase.PAUSED:
            return "waiting"
        has_job = self.generation is not None and self.generation.has_job
        return "training" if has_job else "starting"

    @property
    def is_first_node(self) -> bool:
        """Whether this node tells of what becomes of all of them."""
        round_ = self.nodes.round
        return round_ is None or round_.node == 0

    @property
    def is_settled(self) -> bool:
        """Whether the running generation is neither to stop nor to be rescaled."""
        return self._stop is Stop.NONE and not self.successors.is_rescaling

    @property
    def num_shares(self) -> int | None:
        """Virtual replicas; None if there are none, or it is not known."""
        told = None if self.generation is None else self.generation.num_shares
        return told or self.options.settings.virtual_replicas

    def scale(self, size: int, *, is_forced: bool = False) -> str:
        """Go on with so many replicas here; return what will happen."""
        self.options.replicas.check(size)
        if self._stop is Stop.END:
            return "the job is stopping, so it is not rescaled"
        round_ = self.nodes.round
        elsewhere = round_.size - round_.share if round_ is not None else 0
        return self.successors.scale(
            size, self.generation, elsewhere=elsewhere, is_forced=is_forced
        )

    def stop(self, cause: str, code: int, *, is_for_all: bool = False) -> None:
        """Save and end the job here; the second time, end it at once."""
        if self._stop is Stop.END:
            self._console.event(f"{cause} again: ending at once", "stop", cause=cause)
            self._is_hurried = True
            if self.generation is not None:
                self.problem = "ended at once, without a new checkpoint"
            self.exit_code = self._stop_code
            return
        self._stop_code = code
        reason = END if is_for_all or self.nodes.is_needed else LEAVE
        if self._phase is Phase.CONCLUDING:
            # It has saved, or has not; the outcome says it, and ends the job then.
            self._stop = Stop.END
            self.nodes.request_stop(reason, cause)
        elif self.generation is None or not self._may_train(self.generation):
            # There is nothing to save, so nobody need be waited for.
            self.policy.say_idle_end(cause)
            self.nodes.leave(reason, cause)
            self.exit_code = code
        else:
            can_be_hurried = is_for_all or cause in _REPEATABLE
            self._console.event(
                f"{cause}: saving at the next boundary"
                + " (again: ends at once)" * can_be_hurried,
                "stop",
                cause=cause,
            )
            self.nodes.request_stop(reason, cause)
            self._ask_to_stop(Stop.END, cause)

    def limit_grace(self, seconds: float) -> None:
        """Let a stop take no longer than this machine has left, if that is less."""
        left = max(seconds - _AFTER_GRACE_SECONDS, 0.0)
        self._grace = min(self._grace, left)

    # From one generation to the next.

    def _on_prepared(self, cause: str) -> None:
        """Have the running generation save and exit for one of another size."""
        if self.options.nodes is not None:
            self._say_all_save(cause)
            self.nodes.request_stop(SCALE, cause)
        cause = f"a rescaling to {counted(self.successors.size, 'replica')}"
        self._ask_to_stop(Stop.SCALE, cause)

    def _ask_to_stop(self, stop: Stop, cause: str) -> None:
        """Have the generation save and exit; it may have been asked, or have ended."""
        generation = self.generation
        if stop is Stop.END:
            self.successors.discard()
        elif generation is not None:
            replicas = {"replicas": generation.size, "target": self.successors.size}
            self._console.record("rescaling", cause, cause=cause, **replicas)
        if generation is not None:
            self._phase = Phase.STOPPING
            self.successors.beside = None
            if stop is Stop.SCALE and not self._may_train(generation):
                generation.discard()  # It could save nothing, and loses nothing.
            else:
                if self._stop is Stop.NONE:
                    is_followed = stop is Stop.SCALE and self.options.nodes is None
                    generation.ask_to_stop(cause, is_followed=is_followed)
                self._watchdog.expect_end(
                    grace=self._grace, leeway=_AFTER_GRACE_SECONDS, cause=cause
                )
        self._stop = stop

    @property
    def _is_between(self) -> bool:
        """Whether there is no generation that runs, or waits for its outcome."""
        return self.generation is None and self._phase is not Phase.CONCLUDING

    def _may_train(self, generation: Generation) -> bool:
        """Return whether a generation may have something to save, here or elsewhere."""
        round_ = self.nodes.round
        is_alone = round_ is None or round_.num_nodes == 1
        return generation.has_begun or not is_alone

    def on_all_ended(self) -> None:
        """Tell the other nodes how the generation ended here, and hear from them."""
        generation, self.generation = self.generation, None
        assert generation is not None
        self._phase = Phase.CONCLUDING
        # Before the outcome, which may follow at once, and begins the next generation.
        self.successors.beside = None
        self._watchdog.end()
        self._starter.tell_groups(sorted(self.successors.pids))
        self._place = generation.checkpoint_dir(self._place)
        self.policy.is_plain = not generation.has_begun
        outcome = outcome_of(
            generation, reason=self._watchdog.reason, place=self._place
        )
        self.nodes.conclude(replace(outcome, has_trained=self.crashes.has_trained))

    def on_outcome(self, outcome: Outcome) -> None:
        """Begin the next generation, or end the job."""
        round_ = self.nodes.round
        assert round_ is not None
        next_ = self.policy.decide(
            outcome,
            number=round_.number,
            stop=self._stop,
            code=self._stop_code,
            is_first=round_.node == 0,
            lost=self._find_loss(),
        )
        if outcome.kind in (EndKind.CRASHED, EndKind.LEFT):
            self._stop = Stop.NONE
        self._go_on(next_)

    def _go_on(self, next_: NextAction) -> None:
        self.exit_code, self.problem = next_.exit_code, next_.problem
        if next_.exit_code is not None:
            return
        self._phase = Phase.GATHERING
        if next_.delay:
            self._phase = Phase.PAUSED
            self.loop.call_later(next_.delay, self._end_pause)
        if not self.successors.is_requested:
            self.successors.prepare()
        self._join_round()

    def _end_pause(self) -> None:
        self._phase = Phase.GATHERING
        self._join_round()

    def _join_round(self) -> None:
        if self._phase is Phase.GATHERING:
            self.nodes.join()

    def on_joined(self) -> None:
        """Offer the successors, or ask again when they wait."""
        if self._phase is not Phase.GATHERING or not self.successors.is_ready:
            return
        if lost := self._find_loss():  # Since the outcome, or what ended saved nothing.
            self._go_on(self.policy.fail(lost))
            return
        self._phase = Phase.OFFERED
        offered = self.successors.offer()
        self.nodes.offer(self._offer(len(offered), offered[0]))

    def _offer(self, size: int, first: ForkedReplica) -> Offer:
        number = max(directory.next_generation(self.options.checkpoint_dir), 0)
        last = self.nodes.round
        if self.crashes.has_trained and last is not None and number <= last.number:
            number = last.number + 1  # The script has another directory.
        return Offer(
            share=size,
            ports=first.ports,
            number=number,
            has_trained=self.crashes.has_trained,
            newest_at_crash=self.crashes.newest_at_crash,
            num_used=self.crashes.num_used,
        )

    def on_round(self, round_: RoundPlan) -> None:
        processes.kill_children(but=self._waiting_pids | self._strangers)
        replicas = self.successors.take()
        self._phase, self._stop = Phase.TRAINING, Stop.NONE
        self.crashes.adopt(round_)
        generation = self.generation = Generation(
            replicas,
            number=round_.number,
            offset=round_.offset,
            loop=self.loop,
            log_dir=self.options.log_dir,
            audience=self.reports,
            subscriber=self,
        )
        self.successors.beside = generation
        self._watchdog.begin(generation, is_alone=round_.num_nodes == 1)
        self._starter.tell_groups([each.pid for each in replicas])
        if self.options.program.kind == "function":
            remove_results(Path(self.options.program.target))
        if round_.num_nodes > 1:  # The logs of all of them lie in one folder.
            for member in generation.members:
                where = f"elasticrun: rank {member.rank} runs on {round_.label}\n"
                member.log.write(where.encode())
        self.reports.begin(generation, round_.describe())
        generation.start(make_orders(self.options, round_))
        if round_.share != self.successors.size:  # Rescaled after it was offered.
            self.successors.prepare()

    # What is heard from the generation that runs.

    def on_trouble(self) -> None:
        self._watchdog.on_trouble()
        self.nodes.tell_trouble()

    # What is heard from the other nodes.

    def _say_all_save(self, cause: str) -> None:
        self._console.event(f"{cause}: saving at the next boundary, on all nodes")

    def on_open(self, bind: str) -> None:
        """Have replicas wait that other nodes can reach, and begin with them."""
        if bind != self._starter.outward:
            self._starter.outward = bind
            self.successors.take_back()
            if self._phase is Phase.OFFERED:
                self._phase = Phase.GATHERING
        is_between = self.generation is None and self._phase is not Phase.OFFERED
        if is_between and not self.successors.is_requested:
            self.successors.prepare()
            self._join_round()

    def on_stop_requested(self, kind: str, cause: str) -> None:
        if self._stop is Stop.END:
            return
        if kind == END:
            self._stop_code = STOPPED
            if self._is_between:
                self._console.event(f"{cause}: ending")
                self.exit_code = STOPPED
            else:
                self._say_all_save(cause)
                self._ask_to_stop(Stop.END, cause)
        elif self._stop is Stop.NONE and not self._is_between:
            self._say_all_save(cause)
            # They have the same size here, as a rule, and rehearse while all save.
            if not self.successors.is_requested:
                self.successors.prepare_beside(self.generation)
            self._ask_to_stop(Stop.SCALE, cause)

    def on_trouble_elsewhere(self, *, is_hang: bool) -> None:
        if is_hang:
            self._watchdog.print_stacks("a replica on another node hangs")
        self._watchdog.on_trouble()

    def on_broken(self, text: str) -> None:
        generation = self.generation
        if generation is None or generation.is_killed:
            return
        if not generation.is_broken:  # It is told as long as that lasts.
            generation.is_broken = True
            self._console.event(f"generation {generation.number} ends: {text}")
            if generation.may_rescue:
                self._watchdog.on_trouble()
        if not generation.may_rescue:
            generation.kill()

    def on_closed(self) -> None:
        self._go_on(self.policy.on_closed())

    def on_no_nodes(self, why: str) -> None:
        self._go_on(self.policy.fail(why))

    # What is heard from the starter.

    def _on_no_replicas(self, why: str) -> None:
        """Go on with as many as before, if there were any."""
        last = self.nodes.round
        is_rescaling = last is not None and last.share != self.successors.size
        if last is None or (self.generation is None and not is_rescaling):
            # Nothing trains here, and there is no size before this one to go back to.
            self._go_on(self.policy.fail(why))
            return
        self.successors.discard()
        why += f" The job goes on with {counted(last.share, 'replica')}"
        if is_rescaling and self._stop is not Stop.END:
            self.successors.size = last.share
            self.reports.tell(why, is_over=True)
        else:
            self._console.event(why)
        if self._is_between:  # What ran has ended meanwhile.
            self.successors.prepare()
            self._join_round()
