"""ER208, ER212, ER401 to ER403: what replicas do together, and how they stop."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from elasticrun.lint.finding import Finding, Rule
from elasticrun.lint.graph import DataLoop, Event, Guard, Site, Step, WalkedLoop
from elasticrun.lint.naming import named, written
from elasticrun.lint.program import Program, in_words, is_lazy, is_once
from elasticrun.lint.rules.effects import missing_keys, only_reads
from elasticrun.lint.values import UNFIXED, constant, taints_of
from elasticrun.lint.walk.walk import Function

ER208 = Rule(
    "ER208 E whether a loop runs depends on rank, random numbers or time",
    help="let the epoch's number or a saved value decide, or use request_stop()",
)
ER212 = Rule(
    "ER212 W signal handler in the place of the stop",
    help="leave the signal to elasticrun, or let the handler call request_stop()",
)
ER401 = Rule(
    "ER401 E collective, checkpoint or loop under an unbalanced rank test",
    help="let all replicas come to it; test the rank only around what one does",
)
ER402 = Rule(
    "ER402 E State or loader created conditionally",
    help="create it before the first loop, in every start and on every replica",
)
ER403 = Rule(
    "ER403 W all replicas write one path, or send one message",
    help="do it on rank 0 only (`if rank() == 0:`), or put the rank into the name",
)

_CHANGING = frozenset(("rank", "random", "time", "entropy", "generation", "exists"))


def _rank_guard(step: Step) -> Guard | None:
    return next((each for each in step.guards if "rank" in each.taints), None)


def _collectives(program: Program) -> Iterator[Finding]:
    events = program.events("collective")
    found = [(event, guard) for event in events if (guard := _rank_guard(event.step))]
    guarded: dict[tuple[str, ast.AST], set[tuple[int, bool]]] = defaultdict(set)
    for event, guard in found:
        guarded[event.name, guard.function].add((guard.number, guard.holds))
    for event, guard in found:
        # Otherwise another branch, or the opposite test, has it as well.
        if len(guarded[event.name, guard.function]) == 1:
            message = (
                f"{event.name} is collective, and runs only where the test at line "
                f"{_line(guard)} holds; the other replicas wait"
            )
            at = _where_decided(program, event, guard)
            yield program.finding(ER401, at, message)


def _line(guard: Guard) -> int:
    return getattr(guard.test, "lineno", 0)


def _where_decided(
    program: Program, where: Event | WalkedLoop, guard: Guard
) -> Event | WalkedLoop | Site:
    """Return where to change what a test decides: at the test, if that is elsewhere."""
    if any(node is where.at for node in ast.walk(guard.function)):
        return where
    for step in program.graph.steps:
        is_around = isinstance(step.node, ast.Module | ast.ClassDef | Function)
        if not is_around and any(n is guard.test for n in ast.walk(step.node)):
            return Site(guard.test, step)
    return where


def _loops(program: Program) -> Iterator[Finding]:
    for loop in program.graph.loops:
        guard = _rank_guard(loop.step)
        made_at = loop.loader.made_at
        made = program.graph.steps[made_at].guards if made_at >= 0 else ()
        if guard is None or guard in made or not loop.is_elastic:
            continue  # if the loader is made under the same test, ER402 speaks of it
        message = (
            f"the loop over {loop.text} runs only where the test at line "
            f"{_line(guard)} holds; the other replicas never enter it"
        )
        at = _where_decided(program, loop, guard)
        yield program.finding(ER401, at, message)


def _states(program: Program) -> Iterator[Finding]:
    events = program.events("state")
    branches = {
        (event.name, guard.number, guard.holds)
        for event in events
        for guard in event.step.guards
    }
    # Of an evaluation under a test ER401 and ER208 speak.
    elastic = [each for each in program.graph.loops if each.is_elastic]
    deciding = {guard.number for loop in elastic for guard in loop.step.guards}
    for event in events:
        name, step = event.name, event.step
        is_sum = name == "Accumulator"
        guards = [
            guard
            for guard in step.guards
            # What both branches make is made in any case.
            if (name, guard.number, not guard.holds) not in branches
            and not (is_sum and guard.number in deciding)
        ]
        if any(guard.taints & _CHANGING for guard in guards):
            what = _in_words(event)
            message = f"{what} is created under a condition that may not always hold"
            yield program.finding(ER402, event, message)
        elif message := _made_again(event):
            yield program.finding(ER402, event, message)


def _in_words(event: Event) -> str:
    return "what is registered" if event.name == "register" else event.name


def _made_again(event: Event) -> str:
    """Return why a state must not be created where it is, if that is in a loop."""
    step, is_sum = event.step, event.name == "Accumulator"
    if is_once(step) or is_lazy(step):
        return ""
    if step.loop is not None:
        return (
            f"{_in_words(event)} is created in each turn of the loop at line "
            f"{step.loop.line}, but a restart continues in its middle"
        )
    name = event.given.keywords.get("name", constant(None))
    is_own = "epoch" in name.taints or (is_sum and name.kind != "const")
    if step.epoch is None or is_own or (is_sum and name.is_none):
        return ""
    what = "an Accumulator of one name" if is_sum else _in_words(event)
    return f"{what} is created in each epoch, but a restart skips finished ones"


_OF_ONE_PROCESS = re.compile(
    r"rank|BytesIO|StringIO|\bis_main|state_dict_type|"
    r"[(, ](?:f|fp|fh|fout|file|fileobj|buf|buffer|stream|handle)\)"
)
_MAY_ASK = named("save save_checkpoint push_to_hub torch.distributed.checkpoint.save")


def _paths(program: Program) -> Iterator[Finding]:
    for event in program.events("saved", "opened", "sent"):
        zone = program.zone(event.step)
        if not zone and event.step in program.zones.after_loops:
            zone = "D"
        if not zone or _rank_guard(event.step) is not None:
            continue
        if event.what == "sent":
            is_reported = program.replayed(event) or program.is_before_epochs(event)
            if not is_reported and event.role != "program" and not only_reads(event):
                text = "every replica sends this"
                yield program.finding(ER403, event, text)
        elif not _is_own_path(event) and _is_written(event, zone):
            # What each start writes is mostly the same on all of them.
            is_log = event.name.startswith("logging.")
            is_vague = (zone == "P" and not is_log) or event.name in _MAY_ASK
            text = "every replica writes this path"
            severity = "H" if is_vague else "W"
            yield program.finding(ER403, event, text, severity=severity)


def _trackers(program: Program) -> Iterator[Finding]:
    """Yield trackers that all replicas make; of runs without an id ER110 speaks."""
    for event in program.events("made", role="tracker"):
        is_alone = _rank_guard(event.step) is not None or "rank" in written(event.at)
        is_reported = missing_keys(event) or "adaptdl" in event.step.module.text
        if program.zone(event.step) and not is_alone and not is_reported:
            message = f"every replica calls {event.name} here"
            yield program.finding(ER403, event, message)


def _is_own_path(event: Event) -> bool:
    given = event.given
    path = [*(given.args[1:] or given.args), *given.keywords.values()]
    if {"rank", "temporary", *UNFIXED} & taints_of(path):
        return True
    is_file = any(each.kind == "file" for each in given.values)
    return is_file or bool(_OF_ONE_PROCESS.search(written(event.at)))


def _is_written(event: Event, zone: str) -> bool:
    """Return whether a file is written, and ER104 or ER114 does not speak of it."""
    mode = event.how[:1] if event.what == "opened" else "w"
    is_last = mode == "a" and (zone == "D" or is_once(event.step))
    return is_last or mode in "wx" or event.name.startswith("logging.")


_UNCERTAIN = UNFIXED | {"rank"}


def _uncertain(program: Program) -> Iterator[Finding]:
    elastic = [each for each in program.graph.loops if each.is_elastic]
    loops: list[WalkedLoop] = [*elastic, *program.graph.epochs]
    for loop in loops:
        uncertain = _uncertain_of(loop.step.guards)
        if isinstance(loop, DataLoop):
            uncertain -= {"rank"}  # of which ER401 speaks
        if uncertain:
            guards = (each for each in loop.step.guards if each.taints & uncertain)
            at = _where_decided(program, loop, next(guards))
            message = (
                f"whether the loop at line {loop.line} runs depends on "
                f"{in_words(uncertain)}"
            )
            yield program.finding(ER208, at, message)
    for event in program.events("left"):
        if event.loop not in loops:
            continue
        inner = event.step.guards[len(event.loop.step.guards) :]
        what = in_words(_uncertain_of(inner))
        if not what and any("batch" in guard.taints for guard in inner):
            what = "this replica's part of the batch"
        if what:
            message = (
                f"whether the loop at line {event.loop.line} goes on depends on {what}"
            )
            yield program.finding(ER208, event, message)


def _cut_short(program: Program) -> Iterator[Finding]:
    """Yield breaks by which a replica takes fewer steps of a batch than others."""
    trained = program.events("trained", role="optimizer")
    for event in program.events("left"):
        loop = event.step.loop
        if event.loop is not None or loop is None:
            continue
        around = next(reversed(event.plain_loops), None)
        own = [each for each in trained if each.step.loop is loop]
        if around is None or not any(around in each.plain_loops for each in own):
            continue
        inside = set(ast.walk(around))
        for guard in event.step.guards:
            if guard.test in inside and "batch" in guard.taints:
                message = (
                    f"how many steps the loop at line {getattr(around, 'lineno', 0)} "
                    "takes depends on this replica's part of the batch"
                )
                help_text = "let all replicas decide it: all_reduce the value first"
                at = Site(guard.test, event.step)
                yield program.finding(ER208, at, message, help_text=help_text)


def _uncertain_of(guards: Iterable[Guard]) -> frozenset[str]:
    return frozenset().union(*(guard.taints for guard in guards)) & _UNCERTAIN


_ANNOUNCING = named("SIGHUP SIGUSR1 SIGUSR2")  # no stops where a program takes them
_ENDING = re.compile(r"\b(?:_?exit|quit|raise|SIG_DFL|SIG_IGN)\b")


def _signals(program: Program) -> Iterator[Finding]:
    for event in program.events("signal"):
        names = [each.name.rpartition(".")[2] for each in event.given.args[:1]]
        handler = next(iter(event.given.args[1:]), None)
        if handler is None or handler.kind not in ("func", "ext"):
            continue
        text = handler.name if handler.node is None else written(handler.node)
        is_taken = handler.kind == "func" and not _ANNOUNCING.isdisjoint(names)
        is_end = "SIGTERM" in names and _ENDING.search(text)
        if (is_taken or is_end) and "request_" not in text:
            message = f"with this handler the job does not save and stop on {names[0]}"
            yield program.finding(ER212, event, message)


CHECKS = (
    _collectives, _loops, _states, _paths, _trackers, _uncertain, _cut_short, _signals,
)  # fmt: skip
