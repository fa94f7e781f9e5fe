"""ER003: what makes a plain PyTorch script elastic, as far as its text tells."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from elasticrun.lint.editing import Edit, ends_its_line
from elasticrun.lint.finding import Finding, Rule, place_of
from elasticrun.lint.naming import last_name, named
from elasticrun.lint.project import Module
from elasticrun.lint.rules.asking import Asked, asked_loops
from elasticrun.lint.rules.counting import AGAIN, counted, start_kept, until
from elasticrun.lint.rules.keeping import Kept
from elasticrun.lint.rules.summing import BARS, Loaders, below, sums
from elasticrun.lint.rules.wrapping import is_optimizer, wrappings
from elasticrun.lint.rules.writing import files
from elasticrun.lint.script import Loop, Script

ER003 = Rule(
    "ER003 W a training that is not elastic yet",
    help="`elasticrun lint --diff` prints the safe changes as a patch",
)

_LOADER = re.compile(r"loader|batches|(^|_)(dl|train|valid|val|test)$", re.IGNORECASE)
_AROUND = BARS | named("enumerate zip iter")
_NO_LOADERS = named("range trange arange len items values keys")
_BY_HAND = named("iter next zip cycle chain islice prepare")
_MAY_TRAIN = re.compile(r"(?<!def )\bbackward\s*\(|epoch", re.IGNORECASE)
_REPLICAS = ("torch.distributed", "torch.multiprocessing")
_OTHER_LOOP = (
    "a restart would begin this loop again: loop over "
    "`elasticrun.remaining_epochs_until(n)`, `remaining_steps_until(n)`, or an "
    "AdaptiveDataLoader's `batches(n)`"
)
_OWN_TRAININGS = (
    "each turn of this loop trains a model of its own, and a job has one training: let "
    "each turn be a job, or make model and optimizer before the loop"
)


def may_train(text: str) -> bool:
    """Return whether a file is worth the time to look for its training."""
    return _MAY_TRAIN.search(text) is not None


def edits_of(tree: ast.Module, text: str) -> list[Edit]:
    """Return what makes a script elastic, in the order of its lines.

    Empty if no loop trains in it, or if there is nothing to change.
    """
    script = Script(tree, text)
    outermost = _outermost_loops(script)
    if not outermost:
        return []
    in_loops = set().union(*outermost.values())
    wraps = list(wrappings(script, in_loops))
    made = _loaders_made(script)
    training = in_loops.union(outermost)
    asked = [
        e for e in asked_loops(script, Loaders(script, made)) if e.loop in training
    ]
    loaders = list(_loaders(script, made, in_loops, asked))
    changes = [edit for each in asked for edit in each.edits]
    if not all(each.is_certain for each in loaders):
        changes = [each._replace(is_certain=False) for each in changes]
    edits = [*_loops(script, outermost, asked), *loaders, *changes]
    if not wraps or not all(each.text and each.is_certain for each in wraps):
        # They would go on with a model that is in no checkpoint, or has a share of the
        # samples and its own gradients.
        edits = [each._replace(is_certain=False) for each in edits]
    edits += wraps
    if any(each.startswith(_REPLICAS) for each in _imported(script)):
        # It starts its own replicas; what becomes of that is for the author to find.
        edits = [each._replace(is_certain=False) for each in edits]
    elif wraps and all(each.is_in_patch for each in wraps):  # as `edits` then are
        edits += _uses(script, edits, asked)
    if edits:
        edits.append(_import(tree, edits))
    return sorted(edits, key=lambda each: (each.node.lineno, each.node.col_offset))


def edits_beside(tree: ast.Module, text: str) -> list[Edit]:
    """Return the edits of a file with which another one trains.

    If nothing trains in it, these are its loaders and models. They are not certain,
    since it may have them for something else.
    """
    if edits := edits_of(tree, text):
        return edits
    script = Script(tree, text)
    loaders = _loaders(script, _loaders_made(script), set(), [])
    edits = [*loaders, *wrappings(script, set())]
    edits += [_import(tree, edits)] if edits else []
    return [each._replace(is_certain=False) for each in edits]


def _uses(script: Script, edits: list[Edit], asked: list[Asked]) -> Iterator[Edit]:
    """Yield what becomes of files, and of sums and values if all loops go on."""
    yield from files(script)
    if not all(each.is_in_patch or isinstance(each.node, ast.While) for each in edits):
        return
    made = _loaders_made(script)
    changed = {script.parents.get(each.node) for each in edits}
    loaders = Loaders(script, (each for each in made if each in changed))
    loaders.loops |= {e.loop: ast.parse(e.over, mode="eval").body for e in asked}
    counting: dict[Loop, str] = {}
    for edit in edits:
        if "elasticrun.remaining_" in edit.text:
            loop = edit.node if isinstance(edit.node, Loop) else script.loop(edit.node)
            counting |= {loop: edit.text} if loop else {}
    steps = {each for each, text in counting.items() if "remaining_steps" in text}
    yield from loaders.enumerated()
    names = {each.id for each in script.nodes if isinstance(each, ast.Name)}
    name = next(e for e in ("sums", "all_sums", "sums_of_all") if e not in names)
    summed = list(sums(script, loaders, steps, name))
    yield from summed
    added: set[ast.AST] = {each.node for each in summed}
    yield from Kept(script, loaders, set(counting), added).edits()


def _imported(script: Script) -> Iterator[str]:
    for node in script.nodes:
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{each.name}" for each in node.names)


def findings(module: Module, edits: list[Edit]) -> Iterator[Finding]:
    """Yield a finding for each edit."""
    for edit in (each for each in edits if each.why):
        yield Finding(
            ER003.code, ER003.severity, module.name, *place_of(edit.node, module),
            edit.why, "", module.line(edit.node.lineno), "", ER003.help,
        )  # fmt: skip


def _import(tree: ast.Module, edits: list[Edit]) -> Edit:
    """Return the edit that adds `import elasticrun` to the imports at the top."""
    last = None
    for number, each in enumerate(tree.body):
        is_docstring = not number and isinstance(each, ast.Expr)
        if not is_docstring and not isinstance(each, ast.Import | ast.ImportFrom):
            break
        last = each if ends_its_line(tree.body, number) else last
    why = "nothing of elasticrun is imported: add `import elasticrun`"
    new = "import elasticrun"
    is_used = any(each.text and each.is_certain for each in edits)
    if last is None:
        return Edit(tree.body[0], why, new, is_used, "before")
    return Edit(last, why, new, is_used, "behind")


# Loops over epochs and steps.


def _outermost_loops(script: Script) -> dict[Loop, set[ast.AST]]:
    """Return the loops that train and run in no other such one, with all that runs.

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
    inner = {node for each in trains for node in trains[each] - {each}}
    return {each: inside for each, inside in trains.items() if each not in inner}


def _loops(
    script: Script, outermost: dict[Loop, set[ast.AST]], asked: list[Asked]
) -> Iterator[Edit]:
    """Yield what becomes of the loops that count; of others, if no loop counts."""
    counting: list[tuple[ast.Call, str, Loop]] = []
    others: list[Edit] = []
    for loop, inside in outermost.items():
        if _is_over_batches(loop) or loop in [each.loop for each in asked]:
            continue  # The loader itself goes on where it was.
        head = loop.test if isinstance(loop, ast.While) else below(loop.iter, BARS)
        if any(is_optimizer(script, each) for each in inside):
            yield Edit(head, _OWN_TRAININGS)
        elif isinstance(head, ast.Call) and _is_range(head):
            counting.append((head, _what_counts(script, loop, inside), loop))
        else:
            others.append(Edit(head, _OTHER_LOOP))
    for head, what, loop in counting:
        edit, *kept = _until(head, what, loop)
        is_alone = [each[1] for each in counting].count(what) == 1
        if not (is_alone and script.runs_once(loop)):
            why = f"{edit.why}; all such loops of a job count on from one another"
            edit = edit._replace(why=why, is_certain=False)
        if not any(map(_is_backward_pass, outermost[loop])):
            edit = edit._replace(why=f"if this trains, {edit.why}", is_certain=False)
        yield edit
        yield from (each._replace(is_certain=edit.is_certain) for each in kept)
    if not counting:
        yield from _by_hand(script, outermost) or others


def _by_hand(script: Script, outermost: dict[Loop, set[ast.AST]]) -> list[Edit]:
    """Return what becomes of the only loop, if that is a `while` that counts."""
    [loop, *others] = outermost
    if others or not isinstance(loop, ast.While) or not script.runs_once(loop):
        return []
    return counted(script, loop, _what_counts(script, loop, outermost[loop]))


def _what_counts(script: Script, loop: Loop, inside: set[ast.AST]) -> str:
    """Return "epochs" for a loop whose names say so, or with a loop that trains."""
    over_batches = (each for each in inside if _is_over_batches(each))
    trains = any(map(_is_backward_pass, script.reached(over_batches)))
    return "epochs" if trains or _says_epochs(loop) else "steps"


def _says_epochs(loop: Loop) -> bool:
    if isinstance(loop, ast.While):
        return False
    return "epoch" in (ast.unparse(loop.target) + ast.unparse(loop.iter)).lower()


def _until(counts: ast.Call, what: str, loop: Loop) -> list[Edit]:
    """Return the edits of `range(...)`, which counts epochs or steps."""
    *begin, end = counts.args[:2]
    start = begin[0] if begin else ast.Constant(0)
    kept = start_kept(loop, start)
    if len(counts.args) > 2 or kept is None:
        new = f"elasticrun.remaining_{what}_until"
        return [Edit(counts, f"{AGAIN.format(what)}: count one by one, with `{new}`")]
    new = until(what, start, end)
    why = f"{AGAIN.format(what)}: write `{new}`"
    if kept:
        why += f", and keep where that begins, `{kept[0].text}`"
    return [Edit(counts, why, new), *kept]


def _is_range(call: ast.Call) -> bool:
    is_named = isinstance(call.func, ast.Name) and call.func.id == "range"
    has_stars = any(isinstance(each, ast.Starred) for each in call.args)
    return is_named and bool(call.args) and not has_stars


def _is_over_batches(node: ast.AST) -> bool:
    if not isinstance(node, ast.For):
        return False
    iterated = below(node.iter, _AROUND)
    if isinstance(iterated, ast.Call) and last_name(iterated.func) in _NO_LOADERS:
        return False
    return bool(_LOADER.search(ast.unparse(iterated)))


def _is_backward_pass(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and last_name(node.func) == "backward"


# Loaders.


def _loaders(
    script: Script, made: list[ast.Call], in_loops: set[ast.AST], asked: list[Asked]
) -> Iterator[Edit]:
    asked_at = _asked_at(script, made, set().union(*(each.nodes for each in asked)))
    new = "elasticrun.AdaptiveDataLoader"
    for node in made:
        doubt = _doubt_about(script, node)
        if node in in_loops:
            doubt = "make it before the loop, or give it a name="
        elif in_loops and not any(map(_is_backward_pass, in_loops)):
            doubt = "where it trains, loop over it with `for`"
        elif asked_at:
            doubt = (
                f"do not ask its iterator as in line {asked_at}: loop over it with "
                "`for`, over a number of `batches(n)`, over two as a CombinedLoader"
            )
        why = (
            f"a restart would begin the loop again: write `{new}`, whose batch_size is "
            f"that of all replicas together{doubt and '; '}{doubt}"
        )
        yield Edit(node.func, why, new, is_certain=not doubt)


def _loaders_made(script: Script) -> list[ast.Call]:
    """Return the calls that make a DataLoader of torch's."""
    calls = [each for each in script.nodes if isinstance(each, ast.Call)]
    origins = [script.origin(each.func) for each in calls]
    is_loader = re.compile(r"torch\.utils\.data\.(.*\.)?DataLoader").fullmatch
    return [call for call, name in zip(calls, origins, strict=True) if is_loader(name)]


def _doubt_about(script: Script, loader: ast.Call) -> str:
    """Return what else is to be changed in a loader's arguments, or nothing."""
    if len(loader.args) > 3 or any(isinstance(e, ast.Starred) for e in loader.args):
        return "give what stands behind shuffle by name"
    for name, value in ((e.arg, ast.unparse(e.value)) for e in loader.keywords):
        if name == "batch_size" and value == "None":
            return "it makes the batches itself: give it a batch_size"
        if name == "sampler" and "Weighted" in value:
            return "give it sampler=elasticrun.WeightedDraws(weights, num_samples)"
        if name == "sampler" and value != "None":
            return "it shares the samples out itself: leave sampler= out"
        if name == "batch_sampler" and value != "None":
            return "batch_sampler= must map a batch's number to its indices"
        if name is None and any(map(_names_sampler, script.nodes)):
            return f"**{value} must have no sampler of torch's"
    return ""


def _names_sampler(node: ast.AST) -> bool:
    """Return whether a node may be what makes options have a sampler."""
    name = getattr(node, "value", "") if isinstance(node, ast.Constant) else ""
    if isinstance(node, ast.keyword) and ast.unparse(node.value) != "None":
        name = node.arg
    return name in ("sampler", "batch_sampler")


def _asked_at(script: Script, loaders: list[ast.Call], known: set[ast.AST]) -> int:
    """Return a line in which something else than a loop asks a loader, or 0.

    Args:
        known: What asks one, and becomes a loop.
    """
    parents = (script.parents[each] for each in loaders)
    targets = (each for p in parents for each in getattr(p, "targets", ()))
    names = {ast.unparse(each) for each in targets}
    for node in (each for each in script.nodes if each not in known):
        for each in map(ast.unparse, _asked_by_hand(node)):
            if each in names or re.search(r"(?i)loader|(^|_)dl$", each):
                return getattr(node, "lineno", 0)
    return 0


def _asked_by_hand(node: ast.AST) -> list[ast.expr]:
    """Return what is given to `iter` and its like, or goes on in a generator."""
    if isinstance(node, ast.YieldFrom):
        return [node.value]
    if isinstance(node, ast.Call) and last_name(node.func) in _BY_HAND:
        return node.args
    if isinstance(node, ast.For):
        has_yield = any(isinstance(each, ast.Yield) for each in ast.walk(node))
        return [node.iter] if has_yield else []
    return []
