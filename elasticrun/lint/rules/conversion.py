"""ER003, and the edits that make a plain PyTorch script elastic, as far as certain."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from elasticrun.lint.finding import Finding, Rule, place_of
from elasticrun.lint.naming import last_name, named, written
from elasticrun.lint.project import Module

ER003 = Rule(
    "ER003 W a training that is not elastic yet",
    help="write that; `elasticrun lint --diff` prints it as a patch",
)

_LOADER = re.compile(r"loader|batches|(^|_)(dl|train|valid|val|test)$", re.IGNORECASE)
_OPTIMIZERS = named(
    "SGD Adam AdamW Adagrad Adadelta Adamax NAdam RAdam RMSprop Rprop ASGD SparseAdam "
    "Adafactor Muon Lion"
)
_AROUND = ("enumerate", "tqdm", "zip", "iter", "track")
_WRAPPERS = ("DistributedDataParallel", "DDP", "DataParallel")
_OTHER_LOOP = (
    "a restart would begin this loop again: loop over "
    "`elasticrun.remaining_epochs_until(n)`, `remaining_steps_until(n)`, or an "
    "AdaptiveDataLoader's `batches(n)`"
)


class Edit(NamedTuple):
    """One change of a script's text.

    Attributes:
        node: What is replaced, or the statement behind which a line is added.
        text: What is to stand there; empty if that is for the author to find.
        why: For people.
        is_added: Whether it is a line of its own.
    """

    node: ast.expr | ast.stmt
    text: str
    why: str
    is_added: bool = False


def edits_of(tree: ast.Module) -> list[Edit]:
    """Return what makes a script elastic, in the order of its lines.

    Empty if there is no loop over epochs or steps in it that is known for one.
    """
    edits = list(_loops(tree))
    if not edits:
        return []
    edits += [*_loaders(tree), *_models(tree)]
    imports = [
        each for each in tree.body if isinstance(each, ast.Import | ast.ImportFrom)
    ]
    if imports:
        why = "nothing of elasticrun is imported: add `import elasticrun`"
        edits.append(Edit(imports[-1], "import elasticrun", why, is_added=True))
    return sorted(edits, key=lambda each: (each.node.lineno, each.node.col_offset))


def findings(module: Module, edits: list[Edit]) -> Iterator[Finding]:
    """Yield a finding for each edit."""
    for edit in edits:
        yield Finding(
            ER003.code, ER003.severity, module.name, *place_of(edit.node, module),
            edit.why, "", module.line(edit.node.lineno), "", ER003.help,
        )  # fmt: skip


def converted(text: str, edits: list[Edit], *, adds_lines: bool) -> str:
    """Return a script with its edits; every other byte is kept.

    Args:
        adds_lines: Give what is added lines of its own; else it stands behind a
            semicolon, and all lines keep their numbers.
    """
    lines = text.encode().splitlines(keepends=True)
    for edit in sorted(edits, key=_end, reverse=True):
        node = edit.node
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        first, last = node.lineno - 1, node.end_lineno - 1
        if edit.is_added and adds_lines:
            ending = re.search(rb"[\r\n]*$", lines[last])
            assert ending is not None
            if not ending.group():
                lines[last] += b"\n"
            indent = lines[first][: node.col_offset]
            new = indent + edit.text.encode() + (ending.group() or b"\n")
            lines.insert(last + 1, new)
        elif edit.is_added:
            place = node.end_col_offset
            own = lines[last]
            lines[last] = own[:place] + f"; {edit.text}".encode() + own[place:]
        elif edit.text:
            kept = lines[last][node.end_col_offset :]
            new = lines[first][: node.col_offset] + edit.text.encode()
            lines[first : last + 1] = [new + kept, *[b"\n"] * (last - first)]
    return b"".join(lines).decode()


def _end(edit: Edit) -> tuple[int, int]:
    return edit.node.end_lineno or 0, edit.node.end_col_offset or 0


# Loops over epochs and steps.


def _loops(tree: ast.Module) -> Iterator[Edit]:
    """Yield the outermost loops over a range in which is trained, or any others."""
    with_batches = _functions(tree, _is_loop_over_batches)
    with_steps = _functions(tree, _is_backward_pass)
    others, is_known = [], False
    todo: list[ast.AST] = [tree]
    while todo:
        for node in ast.iter_child_nodes(todo.pop(0)):
            if not isinstance(node, ast.For | ast.While):
                todo.append(node)
                continue
            head = node.test if isinstance(node, ast.While) else _unwrapped(node.iter)
            is_range = isinstance(head, ast.Call) and last_name(head.func) == "range"
            what = (
                "epochs" if _leads_to(node, _is_loop_over_batches, with_batches) else ""
            )
            if not what and _leads_to(node, _is_backward_pass, with_steps):
                what = "steps"
            if what and isinstance(head, ast.Call) and is_range:
                is_known = True
                yield _until(head, what)
            elif what and not _is_loop_over_batches(node):
                others.append(Edit(head, "", _OTHER_LOOP))
            else:
                todo.append(node)
    if not is_known:
        yield from others


def _until(counts: ast.Call, what: str) -> Edit:
    """Return the edit of `range(...)`, which counts epochs or steps."""
    why = f"a restart would begin with the first of these {what} again"
    *start, end = counts.args[:2]
    until, first = ast.unparse(end), ""
    if start and isinstance(start[0], ast.Constant) and start[0].value == 1:
        first = ", start=1"
        is_more = until.endswith(" + 1")
        until = until.removesuffix(" + 1") if is_more else f"{until} - 1"
    elif start and isinstance(start[0], ast.Constant) and start[0].value != 0:
        return Edit(counts, "", f"{why}: count them from 0 or 1")
    if len(counts.args) > 2:
        return Edit(counts, "", f"{why}: count them one by one")
    new = f"elasticrun.remaining_{what}_until({until}{first})"
    return Edit(counts, new, f"{why}: write `{new}`")


Test = Callable[[ast.AST], bool]


def _functions(tree: ast.Module, has: Test) -> set[str]:
    """Return the names of functions that have something, or call such a one."""
    every = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
    found: set[str] = set()
    while new := {
        each.name
        for each in every
        if each.name not in found and _leads_to(each, has, found)
    }:
        found |= new
    return found


def _leads_to(node: ast.AST, has: Test, functions: set[str]) -> bool:
    """Return whether something is in a node, or a call of a function with it."""
    return any(
        has(each) or (isinstance(each, ast.Call) and last_name(each.func) in functions)
        for each in ast.walk(node)
        if each is not node
    )


def _is_loop_over_batches(node: ast.AST) -> bool:
    if not isinstance(node, ast.For):
        return False
    return bool(_LOADER.search(written(_unwrapped(node.iter))))


def _is_backward_pass(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and last_name(node.func) == "backward"


def _unwrapped(iterated: ast.expr) -> ast.expr:
    """Return what is iterated below `enumerate`, a bar and their like."""
    while isinstance(iterated, ast.Call) and iterated.args:
        if last_name(iterated.func) not in _AROUND:
            break
        iterated = iterated.args[0]
    return iterated


# Loaders.


def _loaders(tree: ast.Module) -> Iterator[Edit]:
    new = "elasticrun.AdaptiveDataLoader"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or last_name(node.func) != "DataLoader":
            continue
        why = (
            f"a restart would begin the loop again: write `{new}`, whose batch_size is "
            "that of all replicas together"
        )
        yield Edit(node.func, new, why)
        for keyword in node.keywords:
            if keyword.arg == "sampler":
                why = "the loader shares the samples out itself: leave sampler= out"
                yield Edit(keyword.value, "", why)


# Models and their optimizers.


def _models(tree: ast.Module) -> Iterator[Edit]:
    """Yield where each model is wrapped, behind its optimizers and schedulers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and last_name(node.func) in _WRAPPERS:
            why = "AdaptiveDataParallel averages gradients: give it the bare module"
            yield Edit(node, "", why)
    num_models = 0
    for body in _bodies(tree):
        for model, trained in _trained_in(body).items():
            given = [model, _listed(trained.optimizers)]
            given += [_listed(trained.schedulers)] if trained.schedulers else []
            given += [f'name="{model}"'] if num_models else []
            num_models += 1
            new = f"{model} = elasticrun.AdaptiveDataParallel({', '.join(given)})"
            why = f"in no checkpoint, and no gradient is averaged: add `{new}`"
            yield Edit(trained.statement, new, why, is_added=True)


@dataclass
class _Trained:
    """Names of a model's optimizers and schedulers, and the statement of the last."""

    statement: ast.stmt
    optimizers: list[str] = field(default_factory=list)
    schedulers: list[str] = field(default_factory=list)


def _trained_in(body: list[ast.stmt]) -> dict[str, _Trained]:
    """Return the models whose optimizers are made in a body, by their names."""
    models: dict[str, _Trained] = {}
    for statement in body:
        name, call = _assigned(statement)
        if call is None or not call.args:
            continue
        if model := _model_of(call):
            trained = models.setdefault(model, _Trained(statement))
            trained.optimizers.append(name)
            trained.statement = statement
        elif re.search(r"LR|[Ss]cheduler", last_name(call.func)):
            for trained in models.values():
                if written(call.args[0]) in trained.optimizers:
                    trained.schedulers.append(name)
                    trained.statement = statement
    return models


def _bodies(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    yield tree.body
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.If):
            yield node.body


def _assigned(statement: ast.stmt) -> tuple[str, ast.Call | None]:
    """Return the name that a call's result is given, and the call."""
    if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
        [target, *more] = statement.targets
        if isinstance(target, ast.Name) and not more:
            return target.id, statement.value
    return "", None


def _model_of(call: ast.Call) -> str:
    """Return the name of the model whose parameters an optimizer is given."""
    name = last_name(call.func)
    if name not in _OPTIMIZERS and "optim" not in written(call.func).lower():
        return ""
    first = call.args[0] if call.args else None
    if not isinstance(first, ast.Call) or last_name(first.func) != "parameters":
        return ""
    owner = first.func.value if isinstance(first.func, ast.Attribute) else None
    return owner.id if isinstance(owner, ast.Name) else ""


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"[{', '.join(names)}]"
