"""ER107, ER306, ER311: states that lack something, or are changed again."""

from __future__ import annotations

from collections.abc import Iterator

from elasticrun.lint.finding import Finding, Rule
from elasticrun.lint.graph import Call, Event, Step
from elasticrun.lint.program import Program
from elasticrun.lint.values import Value

ER107 = Rule(
    "ER107 E registered state changed again at every start",
    help="do it before the state is registered, or once: `if once(key):`",
)
ER306 = Rule(
    "ER306 W trained object in no state",
    help="give it to AdaptiveDataParallel(model, optimizer) or to register(...)",
)
ER311 = Rule(
    "ER311 W value of one replica's own batches in Variables",
    help="keep the sum in an Accumulator, and set this in its synchronized() block",
)

_PARAMETER = "torch.nn.Parameter"

_TRAINED = {
    "optimizer": "optimizer",
    "scheduler": "LR scheduler",
    "scaler": "gradient scaler",
    "ema": "averaged model",
}


def _unregistered(program: Program) -> Iterator[Finding]:
    seen: set[int] = set()
    covered = _covered(program)
    for event in [] if program.events("unseen states") else program.events("trained"):
        value, what = event.value, _TRAINED.get(event.role)
        is_outside = event.step.epoch is None and event.step.loop is None
        if value is None or what is None or is_outside or value.kind == "unknown":
            continue
        if value.made_at >= 0 and program.made(value).step.loop is not None:
            continue  # It is of one batch.
        if value.uid in seen:
            continue
        seen.add(value.uid)
        if value.uid in covered or value.node is None or value.made_at < 0:
            continue
        averages = value.attrs.values() if event.role == "ema" else ()
        if any(is_saved(each, depth=0) for each in averages if each.is_model):
            continue
        message = (
            f"this {what} is trained (line {getattr(event.at, 'lineno', 0)}) and in no "
            "state: a restart begins with a new one"
        )
        is_scaler = event.role == "scaler"
        help_text = "give it to register(scaler=...)" if is_scaler else None
        at = program.made(value)
        yield program.finding(ER306, at, message, help_text=help_text)
    yield from _unregistered_models(program, seen, covered)


def _unregistered_models(
    program: Program, stepped: set[int], covered: set[int]
) -> Iterator[Finding]:
    """Yield models that are trained, and that no state has."""
    reported: set[int] = set()
    wholes = {
        part.uid: whole
        for whole in program.walk.objects
        if whole.is_model and whole.made_at >= 0
        for part in whole.attrs.values()
    }
    for model, by, event in _trained_models(program, stepped):
        if model.uid in covered or is_saved(model):
            continue
        if not _is_known(model, by) or model.node is None or model.made_at < 0:
            continue
        if model.name != _PARAMETER:
            model = wholes.get(model.uid, model)
        if model.uid in reported:
            continue
        what = "parameter" if model.name == _PARAMETER else "model"
        message = (
            f"this {what} is trained and in no state: a restart begins with a new one"
        )
        reported.add(model.uid)
        made = program.made(model)
        known = _common_call(made.step, event.step)
        if made.step.call is not None and made.step.call.name == "__init__":
            known = made.step.call  # It is what a class has, not what it gives.
        yield program.finding(ER306, program.called_at(made, known), message)


def _common_call(one: Step, other: Step) -> Call | None:
    """Return the innermost call that leads to both of two steps."""
    calls = [each.call.links() if each.call else [] for each in (one, other)]
    return next((each for each in reversed(calls[0]) if each in calls[1]), None)


def _trained_models(
    program: Program, stepped: set[int]
) -> Iterator[tuple[Value, Value, Event]]:
    """Yield models whose weights change, each with what changes them, and when."""
    for event in program.events("made", role="optimizer"):
        optimizer = event.value
        if optimizer is not None and optimizer.uid in stepped:
            for model in _models_of(optimizer):
                yield model, optimizer, event
    for event in program.events("trained"):
        moved, step = event.value, event.step
        if moved is None or moved.in_epoch or not moved.is_model:
            continue
        is_copied = event.role == "loaded" and event.how == "copied"
        is_moved = event.role == "weights" and step.epoch and step.loop
        if is_moved or (is_copied and (step.loop or program.zone(step) == "C")):
            yield moved, moved, event


def _is_known(model: Value, optimizer: Value) -> bool:
    """Return whether it is certain that nothing out of sight registers a model."""
    # One that is unknown is known by the use of its parameters.
    is_seen = is_saved(optimizer) and not model.is_handed_on
    return model.kind != "unknown" or is_seen


def _covered(program: Program) -> set[int]:
    """Return the parts, of any depth, of what is saved."""
    covered: set[int] = set()
    todo = [each for each in program.walk.objects if is_saved(each)]
    while todo:
        value = todo.pop()
        if value.uid not in covered:
            covered.add(value.uid)
            if value.kind not in ("optimizer", "scheduler", "loader", "ema"):
                todo += [*value.attrs.values(), *value.parts, *value.also]
    return covered


def _models_of(value: Value, depth: int = 4) -> Iterator[Value]:
    """Yield the models whose parameters a value holds."""
    if value.kind == "param" and value.owner is not None:
        yield value.owner
    elif value.name == _PARAMETER:
        yield value
    elif depth:
        for part in (*value.parts, *value.attrs.values()):
            yield from _models_of(part, depth - 1)


def is_saved(value: Value, depth: int = 4) -> bool:
    """Return whether a value, or what it wraps or may be, is saved in some way."""
    if value.registered or value.is_loaded_by_hand:
        return True
    if depth == 0:
        return False
    inner = [*value.also, *(value.parts if value.kind == "model" else [])]
    return any(is_saved(each, depth - 1) for each in inner if each.is_object)


def _copies(program: Program) -> Iterator[Finding]:
    """Yield copies that no state has, made when the model may be trained already."""
    covered = _covered(program)
    for event in program.events("made", role="copy"):
        [copy] = event.given.args
        is_late = event.registered and program.is_kept_at_start(event)
        if not is_late or not copy.is_model or copy.uid in covered:
            continue
        message = (
            "this copy is in no state: a restart makes it again, of the model that "
            "the checkpoint has"
        )
        help_text = "copy it before AdaptiveDataParallel, which loads the checkpoint"
        yield program.finding(ER306, event, message, help_text=help_text)


# What happens to what is trained, and to fields of it.
_DONE = {
    "scheduler": "LR scheduler stepped",
    "optimizer": "optimizer stepped",
    "scaler": "gradient scaler updated",
    "ema": "averaged weights updated",
    "weights": "weights changed",
    "loaded": "state loaded over that of the checkpoint",
    "update": "updated from its own value",
    "grow": "added to",
}


def _changes(program: Program) -> Iterator[Finding]:
    for event in program.events("trained"):
        is_unknown = event.value is not None and event.value.kind == "unknown"
        severity = "W" if is_unknown else "E"
        yield from _done_again(program, event, _DONE[event.role], severity)
    for event in program.events("changed"):
        if event.how != "set":
            what = f"`{event.text}` is saved, and {_DONE[event.how]}"
            # A counter of starts is meant to change.
            yield from _done_again(program, event, what, "W")


def _done_again(
    program: Program, event: Event, what: str, severity: str
) -> Iterator[Finding]:
    if event.registered and program.is_kept_at_start(event):
        message = f"{what} in zone P, after registration; every restart does it again"
        yield program.finding(ER107, event, message, severity=severity)


def _own_values(program: Program) -> Iterator[Finding]:
    kept = [each for each in program.walk.objects if each.kind == "variables"]
    lists = {each for one in kept for each in one.attrs.values() if each.is_container}
    for event in program.events("changed"):
        loop = event.step.loop
        if event.value is None or not (event.value in kept or event.value in lists):
            continue
        if any("rank" in each.taints for each in event.step.guards):
            if event.step.epoch is None and loop is None:
                continue
            message = (
                f"`{event.text}` is set on some replicas only; the others keep another "
                "value"
            )
            help_text = "set it on all replicas; test the rank only around effects"
            yield program.finding(ER311, event, message, help_text=help_text)
        elif (loop or event.step.epoch) and "batch" in event.taints:
            message = (
                f"`{event.text}` depends on this replica's own part of the batches; a "
                "restart gives all replicas the value of rank 0"
            )
            yield program.finding(ER311, event, message)


CHECKS = (_unregistered, _copies, _changes, _own_values)
