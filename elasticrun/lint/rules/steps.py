"""ER309, ER312 to ER316: what depends on how a step's batch is cut."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from elasticrun.lint.finding import Finding, Rule
from elasticrun.lint.graph import Event, Guard, Site, Step
from elasticrun.lint.naming import written
from elasticrun.lint.program import Program
from elasticrun.lint.values import Arguments

ER309 = Rule(
    "ER309 W loss that is no mean over samples",
    help='give the loss to model.weigh(loss, count=...), or a sum reduction="sum"',
)
ER312 = Rule(
    "ER312 W padding counted",
    help="count loader.num_valid samples of a batch, or set even_batches=False",
)
ER313 = Rule(
    "ER313 W sum of all replicas divided by the number of batches",
    help="add up sums over samples, and divide by loader.num_samples",
)
ER314 = Rule(
    "ER314 W weigh under a condition that depends on the batch",
    help="call it in each batch, with count=0 and a sum divided by max(count, 1)",
)
ER315 = Rule(
    "ER315 W backward pass under a condition that depends on the batch",
    help="let all replicas decide it: all_reduce the value first",
)
ER316 = Rule(
    "ER316 E forward pass past the wrapped model",
    help="call the AdaptiveDataParallel, model(x), and not its module",
)


_UNWEIGHED = {
    "counted": "a mean over what this part of the batch has to count, not over samples",
    "summed": "a sum, which is divided by the number of replicas",
    "shared": "divided by the number of replicas, as the gradients are already",
    "paired": "of all pairs of samples in this part of the batch",
}


def _losses(program: Program) -> Iterator[Finding]:
    """Yield backward passes of losses that are to be weighed, and are not."""
    names = {event.name for event in program.events("state")}
    for event in program.events("backward"):
        loop = event.step.loop
        whats = [what for key, what in _UNWEIGHED.items() if key in event.taints]
        # A gradient cache: what is made of the gradients of outputs is weighed later.
        if "leaf" in event.taints and "weigh(" in event.step.module.text:
            continue
        if loop is not None and whats and "AdaptiveDataParallel" in names:
            message = f"the loss is {whats[0]}: a step depends on how its batch is cut"
            yield program.finding(ER309, event, message)


_LENGTH = re.compile(r"\blen\(|\.sum\(|\.size\(|\.shape\[|\.numel\(")


def _padding(program: Program) -> Iterator[Finding]:
    """Yield sums over loops whose last batch may be padded."""
    even = {
        event.value
        for event in program.events("made", role="loader")
        if event.name != "CombinedLoader"
        and _is_padded(event.given)
        # AdaptDL's own loaders have no number of valid samples.
        and "adaptdl" not in event.step.module.text
    }
    training = {event.step.loop for event in program.events("backward")}
    seen: set[ast.AST] = set()
    for event in program.events("added"):
        loop = event.step.loop
        if loop is None or loop.loader not in even or loop.at in seen:
            continue
        if "batch" not in event.taints or "valid" in event.taints:
            continue
        # A loss is a sum in training as well, where padding weighs nothing.
        is_sum = bool({"number", "summed"} & event.taints) and loop not in training
        if not is_sum and not _LENGTH.search(written(event.at)):
            continue
        seen.add(loop.at)
        message = (
            "this counts all samples of a batch, but the last batch of the loop over "
            f"{loop.text} at line {loop.line} may be padded"
        )
        yield program.finding(ER312, event, message)


def _quotients(program: Program) -> Iterator[Finding]:
    """Yield means of batches that each replica adds, divided by the global batches."""
    for event in program.events("divided"):
        message = (
            "every replica adds to this sum in each batch, but it is divided by the "
            "number of global batches"
        )
        yield program.finding(ER313, event, message)


def _left_out(program: Program) -> Iterator[Finding]:
    """Yield tests of a batch by which one replica alone leaves out what all must do."""
    backward = program.events("backward")
    counted = [
        event
        for event in program.events("weighed")
        if len(event.given.args) > 1 or "count" in event.given.keywords
    ]
    for rule, what, events in (
        (ER314, "model.weigh(..., count=...)", counted),
        (ER315, "the backward pass", backward),
    ):
        for event in events:
            guard = _deciding(program, event, {each.step for each in events})
            if guard is not None and event.step.loop is not None:
                message = (
                    f"whether {what} at line {event.step.line} runs depends on this "
                    "replica's part of the batch, and the other replicas wait in theirs"
                )
                at = Site(guard.test, event.step)
                yield program.finding(rule, at, message)


def _deciding(program: Program, event: Event, alike: set[Step]) -> Guard | None:
    """Return the test of a batch past which its loop goes on without such an event."""
    loop = event.step.loop
    if loop is None or not loop.is_elastic:
        return None
    for guard in event.step.guards[len(loop.step.guards) :]:
        if "batch" not in guard.taints:
            continue

        def passes(step: Step, guard: Guard = guard) -> bool:
            return step.is_in(loop) and step not in alike and guard not in step.guards

        tests = (
            e for e in program.graph.steps if getattr(e.node, "test", 0) is guard.test
        )
        # What raises or exits there ends the job: nobody waits.
        if loop.step in program.graph.forward(filter(passes, tests), passes):
            return guard
    return None


def _past(program: Program) -> Iterator[Finding]:
    """Yield calls of a wrapped module in loops that train it without its wrapper."""
    through = {event.step.loop for event in program.events("through")}
    trained = {e.step.loop for e in program.events("backward") if "past" in e.taints}
    steps = program.events("trained", role="optimizer")
    for event in program.events("past"):
        loop, wrapper = event.step.loop, event.value
        if wrapper is None or loop is None or loop not in trained - through:
            continue
        is_stepped = any(
            e.step.loop is loop and e.value in wrapper.parts for e in steps
        )
        if is_stepped and not wrapper.is_handed_on:  # Who has it may call it.
            message = (
                "this calls the bare module, past its AdaptiveDataParallel: gradients "
                "are neither weighed nor averaged, and the job refuses the step"
            )
            yield program.finding(ER316, event, message)


def _is_padded(given: Arguments) -> bool:
    """Return whether a loader may have batches with padding."""
    even, drop = given.keywords.get("even_batches"), given.keywords.get("drop_last")
    is_even = even is None or even.constant is not False
    return is_even and (drop is None or drop.constant is not True)


CHECKS = (_losses, _padding, _quotients, _left_out, _past)
