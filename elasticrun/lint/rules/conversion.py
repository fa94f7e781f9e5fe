"""ER003: what makes a plain PyTorch script elastic, as far as its text tells."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from elasticrun.lint.finding import Finding, Rule, place_of
from elasticrun.lint.naming import last_name, made_by, named
from elasticrun.lint.project import Module
from elasticrun.lint.script import Loop, Script, assignments

ER003 = Rule(
    "ER003 W a training that is not elastic yet",
    help="write what each of these findings says",
)

_LOADER = re.compile(r"loader|batches|(^|_)(dl|train|valid|val|test)$", re.IGNORECASE)
_BARS = named("tqdm track")
_AROUND = _BARS | named("enumerate zip iter")
_NO_LOADERS = named("range trange arange len items values keys")
_MAY_TRAIN = re.compile(r"(?<!def )\bbackward\s*\(|epoch", re.IGNORECASE)
_OTHER_LOOP = (
    "loop over `elasticrun.remaining_epochs_until(n)`, `remaining_steps_until(n)`, or "
    "an AdaptiveDataLoader's `batches(n)`"
)
_GROUPING = named("list filter dict set items values parameters named_parameters")
_WRAPPERS = named("DistributedDataParallel DDP DataParallel")
_NAME = r"(self\.)?(?!self\b)\w+"
_WHY = "{} is in no checkpoint, and no gradient of it is averaged"
_NEW = "elasticrun.AdaptiveDataParallel"


def may_train(text: str) -> bool:
    """Return whether a file is worth the time to look for its training."""
    return _MAY_TRAIN.search(text) is not None


def edits_of(tree: ast.Module) -> list[Edit]:
    """Return what makes a script elastic, in the order of its lines.

    Empty if no loop trains in it, or if there is nothing to change.
    """
    script = Script(tree)
    trains = _training_loops(script)
    if not trains:
        return []
    in_loops, folds = set().union(*trains.values()), _folds(script, trains)
    edits = [
        *_turns(folds),
        *_loops(script, trains, folds),
        *_loaders(script, in_loops),
        *wrappings(script, in_loops),
    ]
    return _with_import(tree, edits)


def edits_beside(tree: ast.Module) -> list[Edit]:
    """Return the edits of a file with which another one trains.

    If nothing trains in it, these are its loaders and models.
    """
    script = Script(tree)
    beside = [*_loaders(script, set()), *wrappings(script, set())]
    return edits_of(tree) or _with_import(tree, beside)


def findings(module: Module, edits: list[Edit]) -> Iterator[Finding]:
    """Yield a finding for each edit."""
    for edit in edits:
        yield Finding(
            ER003.code, ER003.severity, module.name, *place_of(edit.node, module),
            edit.why, "", module.line(edit.node.lineno), "", edit.help,
        )  # fmt: skip


def _with_import(tree: ast.Module, edits: list[Edit]) -> list[Edit]:
    """Return edits in the order of their lines, with `import elasticrun` before."""
    if not edits:
        return []
    imports = [e for e in tree.body if isinstance(e, ast.Import | ast.ImportFrom)]
    at = (imports or tree.body)[0]
    new = "import elasticrun"
    why = "nothing of elasticrun is imported"
    edits = [*edits, Edit(at, why, f"add `{new}`", new, "behind")]
    return sorted(edits, key=lambda each: (each.node.lineno, each.node.col_offset))


# Loops over epochs and steps.


def _training_loops(script: Script) -> dict[Loop, set[ast.AST]]:
    """Return the loops that train, with all that runs in them.

    If the file has no backward pass, those are meant whose names speak of epochs.
    """
    trains: dict[Loop, set[ast.AST]] = {}
    has_backward_pass = any(map(_is_backward_pass, script.nodes))
    for node in script.nodes:
        if not isinstance(node, ast.For | ast.While):
            continue
        if has_backward_pass or _says_epochs(node):
            inside = script.reached(node.body)
            if not has_backward_pass or any(map(_is_backward_pass, inside)):
                trains[node] = inside
    return trains


def _folds(
    script: Script, trains: dict[Loop, set[ast.AST]]
) -> dict[Loop, set[ast.AST]]:
    """Return the loops each of whose turns makes an optimizer, and so trains."""
    return {
        loop: inside
        for loop, inside in trains.items()
        if any(is_optimizer(script, each) for each in inside)
    }


def _turns(folds: dict[Loop, set[ast.AST]]) -> Iterator[Edit]:
    """Yield what becomes of the outermost loops over folds."""
    inner = {node for each in folds for node in folds[each] - {each}}
    for loop in folds:
        if loop not in inner and not _is_over_batches(loop):
            yield Edit(
                _head(loop),
                "each turn of this loop trains a model of its own, and a restart would "
                "begin with the first",
                "give the states of each turn a `name=`, and let its epochs count on "
                "from those before; or make model and optimizer before the loop",
            )


def _loops(
    script: Script,
    trains: dict[Loop, set[ast.AST]],
    folds: dict[Loop, set[ast.AST]],
) -> Iterator[Edit]:
    """Yield what becomes of the loops that count; of others, if no loop counts.

    Of those that run in no other one, but for folds.
    """
    others: list[Edit] = []
    counting: dict[str, list[Edit]] = {"epochs": [], "steps": []}
    in_folds = set().union(*folds.values())
    once = {loop: inside for loop, inside in trains.items() if loop not in folds}
    inner = {node for each in once for node in once[each] - {each}}
    for loop, inside in once.items():
        if loop in inner or _is_over_batches(loop):
            continue  # The loader itself goes on where it was.
        what, is_of_fold = _what_counts(script, loop, inside), loop in in_folds
        if is_of_fold and what == "steps":
            continue  # It may as well adapt a copy of what is trained around it.
        if edit := _counted(loop, what, is_of_fold):
            if not any(map(_is_backward_pass, inside)):
                edit = edit._replace(help=f"if this trains, {edit.help}")
            counting[what].append(edit)
        else:
            why = "a restart would begin this loop again"
            others.append(Edit(_head(loop), why, _OTHER_LOOP))
    for edits in counting.values():
        for edit in edits:
            also = "; all such loops of a job count on from one another"
            yield edit._replace(help=f"{edit.help}{also if len(edits) > 1 else ''}")
    if not any(counting.values()):
        yield from others


def _head(loop: Loop) -> ast.expr:
    """Return what a loop tests, or iterates below a bar."""
    return loop.test if isinstance(loop, ast.While) else _below(loop.iter, _BARS)


def _below(iterated: ast.expr, around: frozenset[str]) -> ast.expr:
    """Return what is iterated below a bar, `enumerate` or their like."""
    while isinstance(iterated, ast.Call) and iterated.args:
        if last_name(iterated.func) not in around:
            break
        iterated = iterated.args[0]
    return iterated


def _what_counts(script: Script, loop: Loop, inside: set[ast.AST]) -> str:
    """Return "epochs" for a loop whose names say so, or with a loop that trains."""
    over_batches = (each for each in inside if _is_over_batches(each))
    trains = any(map(_is_backward_pass, script.reached(over_batches)))
    return "epochs" if trains or _says_epochs(loop) else "steps"


def _says_epochs(loop: Loop) -> bool:
    if isinstance(loop, ast.While):
        return False
    return "epoch" in (ast.unparse(loop.target) + ast.unparse(loop.iter)).lower()


def _counted(loop: Loop, what: str, is_of_fold: bool) -> Edit | None:
    """Return what becomes of a loop over `range(...)`, or `while i < n` that counts."""
    why = f"a restart would begin with the first of these {what} again"
    match loop, _head(loop):
        case ast.For(), ast.Call(ast.Name("range"), [ast.Starred()], []):
            pass
        case ast.For(), ast.Call(ast.Name("range"), [end], []):
            new, kept = _until(what, ast.Constant(0), end, is_of_fold)
            return Edit(_head(loop), why, f"write `{new}`{kept}", new)
        case ast.For(), ast.Call(ast.Name("range"), [start, end], []):
            new, kept = _until(what, start, end, is_of_fold)
            return Edit(_head(loop), why, f"write `{new}`{kept}", new)
        case ast.While(), ast.Compare(counter, [ast.Lt()], [end]):
            name = ast.unparse(counter)
            if f"{name} += 1" in map(ast.unparse, loop.body):
                new, kept = _until(what, counter, end, is_of_fold)
                head = f"for {name} in {new}"
                return Edit(loop, why, f"write `{head}`{kept}", f"{head}: pass")
    return None


def _until(
    what: str, start: ast.expr, end: ast.expr, is_of_fold: bool
) -> tuple[str, str]:
    """Return what counts from one number to another, and what else is to write."""
    name, also = ast.unparse(start), ""
    match start, end:
        case ast.Constant(0), _:
            number = end
        case ast.Constant(1), ast.BinOp(number, ast.Add(), ast.Constant(1)):
            pass
        case ast.Constant(int(first)), ast.Constant(int(last)):
            number = ast.Constant(last - first)
        case _:
            number = ast.BinOp(end, ast.Sub(), start)
    if not isinstance(start, ast.Constant):
        # Whatever a script finds at a restart, the loop began with the first one.
        also = f" behind `{name} = elasticrun.Variables(value={name}).value`"
    if is_of_fold:
        turns = ast.BinOp(ast.Name("turn"), ast.Add(), ast.Constant(1))
        number = ast.BinOp(turns, ast.Mult(), number)
        also += ", where `turn` counts the trainings before this one"
    given = ast.unparse(number) + (f", start={name}" if name != "0" else "")
    return f"elasticrun.remaining_{what}_until({given})", also


def _is_over_batches(node: ast.AST) -> bool:
    if not isinstance(node, ast.For):
        return False
    iterated = _below(node.iter, _AROUND)
    if isinstance(iterated, ast.Call) and last_name(iterated.func) in _NO_LOADERS:
        return False
    return bool(_LOADER.search(ast.unparse(iterated)))


def _is_backward_pass(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and last_name(node.func) == "backward"


# Loaders.


def _loaders(script: Script, in_loops: set[ast.AST]) -> Iterator[Edit]:
    new = "elasticrun.AdaptiveDataLoader"
    is_loader = re.compile(r"torch\.utils\.data\.(.*\.)?DataLoader").fullmatch
    for node in script.nodes:
        if isinstance(node, ast.Call) and is_loader(script.origin(node.func)):
            is_in_loop = node in in_loops
            also = "; make it before the loop, or give it a name=" if is_in_loop else ""
            yield Edit(
                node.func,
                "a restart would begin the loop again",
                f"write `{new}`, whose batch_size is that of all replicas "
                f"together{also}",
                new,
            )


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
        also = ", with a name= for each turn" if last in in_loops else ""
        yield Edit(last, why, f"add behind it: `{new}`{also}", new, "behind")


def is_optimizer(script: Script, node: ast.AST) -> bool:
    """Return whether a node is a call that makes an optimizer."""
    if not isinstance(node, ast.Call) or not (node.args or node.keywords):
        return False
    name = script.origin(node.func) or ast.unparse(node.func)
    if made_by(name) == "optimizer" or re.search(r"\boptim\.[A-Z]\w*$", name):
        return True
    inside = (e for given in ast.iter_child_nodes(node) for e in ast.walk(given))
    is_around = any(is_optimizer(script, each) for each in inside)
    return "optim" in name.lower() and not is_around and bool(_model_of(script, node))


def _model_of(script: Script, call: ast.Call) -> str:
    """Return what an optimizer is given parameters of, if that is one with a name."""
    given = call.args[:1] or [e.value for e in call.keywords if e.arg == "params"]
    owners = _owners(given) or _owners(_behind_names(script, given))
    if not all(re.fullmatch(_NAME, each) for each in owners):
        # Of `net.body` and `net.head` the model is `net`, if that is called as one.
        calls = (each for each in script.nodes if isinstance(each, ast.Call))
        owners = {each.rpartition(".")[0] for each in owners}
        if not owners <= {ast.unparse(each.func) for each in calls}:
            return ""
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
                found += (
                    value
                    for value in script.assigned.get(each.id, ())
                    if not isinstance(value, ast.Call)
                    or last_name(value.func) in _GROUPING
                )
    return found


def _scheduled(script: Script, call: ast.Call) -> str:
    """Return what a scheduler is made of, if a call makes one."""
    if made_by(script.origin(call.func) or last_name(call.func)) != "scheduler":
        return ""
    given = [each.value for each in call.keywords if each.arg == "optimizer"]
    return ast.unparse((given or call.args or [call])[0])


def _made(script: Script, call: ast.Call, of: str) -> _Made:
    statement = next(e for e in script.above(call) if isinstance(e, ast.stmt))
    names = [ast.unparse(to) for to, value in assignments(statement) if value is call]
    is_plain = len(names) == 1 and re.fullmatch(_NAME, names[0])
    return _Made(call, names[0] if is_plain else "", of, statement)


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
        for target, value in assignments(each)
        if isinstance(target, ast.Attribute) and ast.unparse(value) == model
    ]
    return kept[0] if len(kept) == 1 else model


class Edit(NamedTuple):
    """One change of a script.

    Attributes:
        why: What is wrong with the node as it is.
        text: The code that the linter goes on with; empty if the author must find it.
        place: Whether it stands instead of the node, or behind it.
    """

    node: ast.expr | ast.stmt
    why: str
    help: str
    text: str = ""
    place: Literal["instead", "behind"] = "instead"


class Application(ast.NodeTransformer):
    """Changes a tree by edits; what is new has the lines of what it replaces."""

    def __init__(self, edits: Iterable[Edit]) -> None:
        self._edits = [each for each in edits if each.text]

    def visit(self, node: ast.AST) -> ast.AST | list[ast.AST]:
        nodes = [self.generic_visit(node)]
        for edit in (each for each in self._edits if each.node is node):
            [new] = ast.parse(edit.text).body
            for each in ast.walk(new):
                ast.copy_location(each, node)
            if edit.place == "behind":
                nodes.append(new)
            else:
                nodes = [new.value if isinstance(new, ast.Expr) else new]
                if isinstance(new, ast.For) and isinstance(node, ast.While):
                    new.body = node.body
        return nodes if len(nodes) > 1 else nodes[0]
