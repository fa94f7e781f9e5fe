"""For ER003: where a plain script's models are wrapped, with what trains them."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from elasticrun.lint.editing import Edit, ends_its_line
from elasticrun.lint.naming import last_name, named
from elasticrun.lint.script import Script, is_stored

_OPTIMIZERS = named(
    "SGD Adam AdamW Adagrad Adadelta Adamax NAdam RAdam RMSprop Rprop ASGD SparseAdam "
    "Adafactor Muon Lion"
)
_WRAPPERS = named("DistributedDataParallel DDP DataParallel")
_MOVING = named("to cuda cpu half float double bfloat16 compile")
_GROUPING = named("""
    parameters named_parameters list filter dict set any all id len requires_grad
    append extend items keys values startswith endswith lower print
""")
_NAME = r"(self\.)?(?!self\b)\w+"
_WHY = "in no checkpoint, and no gradient is averaged"


class _Made(NamedTuple):
    """A call that makes an optimizer or a scheduler.

    Attributes:
        name: What it is assigned to, such as `self.optimizer`, or nothing.
        of: The model, or the optimizer, that it is made of, in the same way.
    """

    call: ast.Call
    name: str
    of: str
    statement: ast.stmt


def wrappings(script: Script, in_loops: set[ast.AST]) -> Iterator[Edit]:
    """Yield where each model is wrapped, behind its optimizers and schedulers."""
    calls = [each for each in script.nodes if isinstance(each, ast.Call)]
    ready = [each for each in calls if last_name(each.func) in _WRAPPERS and each.args]
    for call in ready:
        why = "AdaptiveDataParallel averages gradients: give it the bare module"
        yield Edit(call, why, ast.unparse(call.args[0]), is_certain=False)
    optimizers = [
        _made(script, call, _kept_as(script, call, _model_of(script, call)))
        for call in calls
        if is_optimizer(script, call)
    ]
    schedulers = [_made(script, call, _scheduled(script, call)) for call in calls]
    groups: dict[tuple[ast.AST, str], list[_Made]] = defaultdict(list)
    for made in optimizers:
        if made.name and made.of:
            groups[script.parents[made.statement], made.of].append(made)
        else:
            new = f"elasticrun.AdaptiveDataParallel(model, {made.name or 'optimizer'})"
            yield Edit(made.call, f"{_WHY}: wrap the model that it trains, `{new}`")
    models = [model for _, model in groups]
    for (_, model), trained in groups.items():
        own = [each for each in schedulers if each.of in {e.name for e in trained}]
        name = model.split(".")[-1] if len(set(models)) > 1 else ""
        new = _wrapped(model, trained, [each for each in own if each.name], name)
        last = max((*trained, *own), key=lambda made: made.statement.lineno).statement
        averages = _averages(script, model, last, in_loops)
        names = {model, *(e.name for e in (*trained, *own)), *averages}
        last = _last_before(script, names, set(averages.values()), last, in_loops)
        is_certain = (
            not ready
            and models.count(model) == 1
            and not any(each.call in in_loops for each in trained)
            and script.runs_once(last)
            and _is_certain(script, model, [*trained, *own], last)
        )
        how = "add" if is_certain else "wrap the model where it is made,"
        yield Edit(last, f"{_WHY}: {how} `{new}`", new, is_certain, "behind")
        for average in averages:
            state = f"{average.split('.')[-1]}={average}"
            yield Edit(last, "", f"elasticrun.register({state})", is_certain, "behind")


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


def _behind_names(script: Script, given: Iterable[ast.AST]) -> list[ast.AST]:
    """Return all statements that store or change the names in some expressions.

    Nothing, if one of them calls what may give parameters that are not seen there.
    """
    found, names = list(given), set[str]()
    made = script.statement(found[0]) if found else None
    for part in found:  # which grows
        for each in ast.walk(part):
            is_base = isinstance(script.parents[each], ast.Attribute)
            if isinstance(each, ast.Name) and not is_base and each.id not in names:
                names.add(each.id)
                mentions = script.mentions(each.id, script.scope(each))
                changed = (e for e in mentions if _may_change(script, e))
                found += [e for e in map(script.statement, changed) if e is not made]
            elif isinstance(each, ast.Call) and last_name(each.func) not in _GROUPING:
                return []
    return found


def _may_change(script: Script, name: ast.Name) -> bool:
    around = script.parents[name]
    return is_stored(name) or isinstance(around, ast.Attribute | ast.Call)


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
    return f"{model} = elasticrun.AdaptiveDataParallel({', '.join(given)})"


def _kept_as(script: Script, call: ast.Call, model: str) -> str:
    """Return what a method calls the model that it is given: `self.model = model`.

    Nothing else has the model then, but the copies that are made of it.
    """
    function = script.scope(call)
    if not isinstance(function, ast.FunctionDef) or model not in {
        each.arg for each in function.args.args
    }:
        return model
    mentions = script.mentions(model, function)
    kept = [e for e in mentions if isinstance(script.parents[e], ast.Assign)]
    if len(kept) != 1 or not all(
        e in kept or _is_harmless(script, e) for e in mentions
    ):
        return model
    given = script.given(model, function)
    if not given or not all(_is_given_away(script, each) for each in given):
        return model
    [name] = getattr(script.parents[kept[0]], "targets", [None])[:1]
    return ast.unparse(name) if isinstance(name, ast.Attribute) else model


def _is_given_away(script: Script, model: ast.expr | None) -> bool:
    """Return whether what gives a model to a method does not run it itself."""
    if not isinstance(model, ast.Name):
        return isinstance(model, ast.Call)
    mentions = script.mentions(model.id, script.scope(model))
    others = (e for e in mentions if e is not model and not is_stored(e))
    return model in mentions and all(_is_harmless(script, each) for each in others)


def _is_harmless(script: Script, model: ast.AST) -> bool:
    """Return whether a model is only copied, printed, or asked for something of it."""
    parent = script.parents[model]
    if not isinstance(parent, ast.Call):
        return isinstance(parent, ast.Attribute)
    if last_name(parent.func) in ("print", "deepcopy"):
        return True
    taken = [
        script.mentions(each.arg, function)
        for function in script.called(parent)
        for each in function.args.args
        if model in script.given(each.arg, function)
    ]
    return bool(taken) and all(_is_harmless(script, e) for each in taken for e in each)


def _averages(
    script: Script, model: str, last: ast.stmt, in_loops: set[ast.AST]
) -> dict[str, ast.AST]:
    """Return the copies of a model that training changes, and where each is made.

    Each is a copy itself, or an object of a class of the file that can be saved.
    """
    found: dict[str, ast.AST] = {}
    changed = {
        ast.unparse(e) for e in in_loops if isinstance(e, ast.Name | ast.Attribute)
    }
    body = script.body_of(last)
    given = (
        e for e in body if isinstance(e, ast.Assign) and isinstance(e.value, ast.Name)
    )
    same = {model, *(ast.unparse(e.value) for e in given if _is_made(e, model))}
    for each in body:
        match each:
            case ast.Assign([name], ast.Call(func, [of, *_])) if (
                ast.unparse(of) in same
            ):
                methods = {e.name for e in script.methods(last_name(func))}
                is_state = methods >= {"state_dict", "load_state_dict"}
                is_copy = last_name(func) == "deepcopy" or is_state
                if is_copy and ast.unparse(name) in changed:
                    found[ast.unparse(name)] = each
    return found


def _last_before(
    script: Script,
    names: set[str],
    copies: set[ast.AST],
    last: ast.stmt,
    in_loops: set[ast.AST],
) -> ast.stmt:
    """Return the last statement before the training that loads or copies something.

    What a script loads itself behind AdaptiveDataParallel, it has after a restart too.
    """
    body = script.body_of(last)
    for each in body[body.index(last) + 1 :]:
        if isinstance(each, ast.FunctionDef | ast.ClassDef):
            continue
        if any(
            e in in_loops for e in script.reached([each]) if isinstance(e, ast.stmt)
        ):
            break
        is_loaded = any(
            node.attr == "load_state_dict" and ast.unparse(node.value) in names
            for node in ast.walk(each)
            if isinstance(node, ast.Attribute)
        )
        if isinstance(each, ast.stmt) and (is_loaded or each in copies):
            last = each
    return last


def _is_certain(script: Script, model: str, made: list[_Made], last: ast.stmt) -> bool:
    """Return whether a model can be wrapped behind a statement.

    It is where statements of one body, in no branch, make the model and all that trains
    it; where nothing but its own methods has it before; and none of them is changed.
    """
    outer = script.parents[last]
    if isinstance(outer, ast.If) and not ast.unparse(outer.test).startswith("__name__"):
        return False
    if not isinstance(outer, ast.Module | ast.FunctionDef | ast.If):
        return False
    body = outer.body
    for each in made:
        stores = [at for at, node in _mentions(body, each.name) if is_stored(node)]
        if len(stores) != 1 or body[stores[0]] is not each.statement:
            return False
    first = min(body.index(each.statement) for each in made)
    end = body.index(last)
    made_at: list[int] = []
    for at, node in _mentions(body, model):
        parent = script.parents[node]
        if is_stored(node):
            made_at.append(at)
        elif isinstance(parent, ast.Attribute):
            if at > first and parent.attr in _MOVING:
                return False
        elif (
            made_at and at <= end and not (at in made_at or _is_harmless(script, node))
        ):
            return False
    return (
        any(_has_one_target(body[at]) for at in made_at)
        and max(made_at) < first
        and ends_its_line(body, end)
        and body[0].lineno > getattr(outer, "lineno", 0)
        and all(last_name(each.call.func) != "LBFGS" for each in made)
    )


def _mentions(
    body: list[ast.stmt], name: str
) -> Iterator[tuple[int, ast.Name | ast.Attribute]]:
    """Yield what is called so in a body, each with the number of its statement."""
    for at, statement in enumerate(body):
        for node in ast.walk(statement):
            if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) == name:
                yield at, node


def _is_made(statement: ast.Assign, name: str) -> bool:
    return name in map(ast.unparse, statement.targets)


def _has_one_target(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Assign) and len(statement.targets) == 1
