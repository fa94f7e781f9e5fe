"""For ER003: where a plain script's models are wrapped, with what trains them."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from elasticrun.lint.editing import Edit
from elasticrun.lint.naming import last_name, named
from elasticrun.lint.script import Script

_OPTIMIZERS = named(
    "SGD Adam AdamW Adagrad Adadelta Adamax NAdam RAdam RMSprop Rprop ASGD SparseAdam "
    "Adafactor Muon Lion"
)
_GROUPING = named("list filter dict set items values parameters named_parameters")
_WRAPPERS = named("DistributedDataParallel DDP DataParallel")
_NAME = r"(self\.)?(?!self\b)\w+"
_WHY = "{} is in no checkpoint, and no gradient of it is averaged"
_NEW = "elasticrun.AdaptiveDataParallel"


class _Made(NamedTuple):
    """A call that makes an optimizer or a scheduler."""

    call: ast.Call
    name: str
    of: str
    statement: ast.stmt


def wrappings(script: Script, in_loops: set[ast.AST]) -> Iterator[Edit]:
    """Yield where each model is wrapped, behind its optimizers and schedulers.

    Args:
        in_loops: All that runs in loops that train.
    """
    calls = [each for each in script.nodes if isinstance(each, ast.Call)]
    for call in calls:
        if last_name(call.func) in _WRAPPERS and call.args:
            why = "AdaptiveDataParallel averages gradients itself"
            yield Edit(call, why, "give it the bare module", ast.unparse(call.args[0]))
    schedulers = [_made(script, call, _scheduled(script, call)) for call in calls]
    groups: dict[tuple[ast.AST, str], list[_Made]] = defaultdict(list)
    for call in calls:
        if is_optimizer(script, call):
            model = _kept_as(script, call, _model_of(script, call))
            made = _made(script, call, model)
            if made.name and made.of:
                groups[script.parents[made.statement], made.of].append(made)
            else:
                new = f"{_NEW}(model, {made.name or 'optimizer'})"
                why = _WHY.format("the model")
                yield Edit(call, why, f"wrap the model that it trains: `{new}`")
    num_models = len({model for _, model in groups})
    for (_, model), trained in groups.items():
        own = [each for each in schedulers if each.of in {e.name for e in trained}]
        name = model.split(".")[-1] if num_models > 1 else ""
        new = _wrapped(model, trained, [each for each in own if each.name], name)
        last = max((*trained, *own), key=lambda made: made.statement.lineno).statement
        names = {model, *(each.name for each in (*trained, *own))}
        last = _last_loading(script, names, last, in_loops)
        why = _WHY.format(f"`{model}`")
        yield Edit(last, why, f"add behind it: `{new}`", new, "behind")


def is_optimizer(script: Script, node: ast.AST) -> bool:
    """Return whether a node is a call that makes an optimizer."""
    if not isinstance(node, ast.Call) or not (node.args or node.keywords):
        return False
    name = script.origin(node.func) or ast.unparse(node.func)
    if last_name(node.func) in _OPTIMIZERS or re.search(r"\boptim\.[A-Z]\w*$", name):
        return True
    inside = (e for given in ast.iter_child_nodes(node) for e in ast.walk(given))
    is_around = any(is_optimizer(script, each) for each in inside)
    return "optim" in name.lower() and not is_around and bool(_model_of(script, node))


def _model_of(script: Script, call: ast.Call) -> str:
    """Return what an optimizer is given parameters of, if that is one with a name."""
    given = call.args[:1] or [e.value for e in call.keywords if e.arg == "params"]
    owners = _owners(given) or _owners(_behind_names(script, given))
    owner = owners.pop() if len(owners) == 1 else ""
    return owner if re.fullmatch(_NAME, owner) else ""


def _owners(given: Iterable[ast.AST]) -> set[str]:
    return {
        ast.unparse(each.value)
        for part in given
        for each in ast.walk(part)
        if isinstance(each, ast.Attribute)
        and each.attr in ("parameters", "named_parameters")
    }


def _behind_names(script: Script, given: Iterable[ast.expr]) -> list[ast.expr]:
    """Return what groups parameters behind the names in some expressions."""
    found, names = list(given), set[str]()
    for part in found:  # which grows
        for each in ast.walk(part):
            if isinstance(each, ast.Name) and each.id not in names:
                names.add(each.id)
                found += filter(_is_group, script.assigned.get(each.id, ()))
    return found


def _is_group(value: ast.expr) -> bool:
    return not isinstance(value, ast.Call) or last_name(value.func) in _GROUPING


def _scheduled(script: Script, call: ast.Call) -> str:
    """Return what a scheduler is made of, if a call makes one."""
    is_torchs = script.origin(call.func).startswith("torch.optim.lr_scheduler.")
    if not is_torchs and not re.search(
        r"(?<![A-Z])LR|[Ss]chedule", last_name(call.func)
    ):
        return ""
    given = [each.value for each in call.keywords if each.arg == "optimizer"]
    return ast.unparse((given or call.args or [call])[0])


def _made(script: Script, call: ast.Call, of: str) -> _Made:
    statement = next(e for e in script.above(call) if isinstance(e, ast.stmt))
    name = ""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        name = ast.unparse(statement.targets[0])
    elif isinstance(statement, ast.AnnAssign):
        name = ast.unparse(statement.target)
    is_plain = getattr(statement, "value", None) is call and re.fullmatch(_NAME, name)
    return _Made(call, name if is_plain else "", of, statement)


def _wrapped(
    model: str, optimizers: list[_Made], schedulers: list[_Made], name: str
) -> str:
    """Return the statement that wraps a model."""
    given = [model]
    for made in (optimizers, schedulers):
        names = list(dict.fromkeys(each.name for each in made))
        given += names if len(names) < 2 else [f"[{', '.join(names)}]"]
    given += [f'name="{name}"'] if name else []
    return f"{model} = {_NEW}({', '.join(given)})"


def _last_loading(
    script: Script, names: set[str], last: ast.stmt, in_loops: set[ast.AST]
) -> ast.stmt:
    """Return the last statement before the training that loads a state.

    What a script loads itself behind AdaptiveDataParallel, it has after a restart too.
    """
    body = script.body_of(last)
    training = {each for each in in_loops if isinstance(each, ast.stmt)}
    loads = {f"{each}.load_state_dict" for each in names}
    for each in body[body.index(last) + 1 :]:
        if isinstance(each, ast.FunctionDef | ast.ClassDef):
            continue
        if training.intersection(script.reached([each])):
            break
        calls = (e for e in ast.walk(each) if isinstance(e, ast.Call))
        if any(ast.unparse(call.func) in loads for call in calls):
            last = each
    return last


def _kept_as(script: Script, call: ast.Call, model: str) -> str:
    """Return what a method keeps its model as for others: `self.model = model`."""
    kept = [
        ast.unparse(target)
        for each in script.around(call)
        if isinstance(each, ast.Assign) and ast.unparse(each.value) == model
        for target in each.targets
        if isinstance(target, ast.Attribute)
    ]
    return kept[0] if len(kept) == 1 else model
