"""For ER003: values that live over epochs, files, and loops that count by hand."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

from elasticrun.lint.editing import Edit, inserted
from elasticrun.lint.naming import last_name, named
from elasticrun.lint.rules.summing import Loaders, has_backward_pass
from elasticrun.lint.script import Loop, Name, Script, is_stored

AGAIN = "a restart would begin with the first of these {} again"

# Loops that count.


def until(what: str, start: ast.expr, end: ast.expr) -> str:
    """Return what counts epochs or steps from one number to another."""
    match ast.unparse(start), end:
        case "0", _:
            return f"elasticrun.remaining_{what}_until({ast.unparse(end)})"
        case "1", (
            ast.BinOp(rest, ast.Add(), ast.Constant(1))
            | ast.BinOp(ast.Constant(1), ast.Add(), rest)
        ):
            number = rest
        case _, ast.Constant(int(last)) if isinstance(start, ast.Constant):
            number = ast.Constant(last - int(ast.unparse(start)))
        case _:
            number = ast.BinOp(end, ast.Sub(), start)
    new = f"elasticrun.remaining_{what}_until({ast.unparse(number)}"
    return f"{new}, start={ast.unparse(start)})"


def keeping(loop: Loop, start: ast.expr) -> list[Edit] | None:
    """Return what lets a loop begin with the same number after each restart.

    The number is that of the first start, whatever the script finds then, as a file
    that it has written itself. None if the number has no name.
    """
    if isinstance(start, ast.Constant):
        return [] if isinstance(start.value, int) else None
    name = ast.unparse(start)
    if not re.fullmatch(r"(\w+\.)*\w+", name):
        return None
    return [Edit(loop, "", f"{name} = {_variables(name)}.value", place="before")]


def _variables(name: str) -> str:
    return f'elasticrun.Variables(value={name}, name="{name.split(".")[-1]}")'


def counted(script: Script, loop: ast.While, what: str) -> list[Edit]:
    """Return what becomes of `while i < n`, if each turn has one `i += 1`."""
    match loop.test:
        case ast.Compare(ast.Name() | ast.Attribute() as counter, [ast.Lt()], [end]):
            name = ast.unparse(counter)
        case _:
            return []
    inside = script.reached([loop])
    stores, reads = _stores_and_reads(script, loop, counter)
    early = [each for each in stores if each not in inside]
    steps = [each for each in loop.body if ast.unparse(each) == f"{name} += 1"]
    changed = {ast.unparse(each) for each in inside if is_stored(each)}
    is_fixed = not any(
        isinstance(e, ast.Call | ast.Subscript) or ast.unparse(e) in changed
        for e in ast.walk(end)
    )
    goes_on = any(
        isinstance(e, ast.Continue) and script.loop(e) is loop for e in inside
    )
    is_counter = early and len(stores) == len(early) + 1 and reads <= inside and steps
    if not is_counter or not is_fixed or goes_on or loop.orelse or len(loop.body) < 2:
        return []
    begun = _begun(script, early[0], loop) if len(early) == 1 else ""
    start = ast.Constant(int(begun)) if begun.isdigit() else counter
    call = until(what, start, end)
    head = f"for {name} in {call}"
    why = f"{AGAIN.format(what)}: write `{head}`"
    word = ast.copy_location(ast.Name("while"), loop)
    word.end_lineno, word.end_col_offset = loop.lineno, loop.col_offset + len("while")
    is_last = steps == loop.body[-1:] and script.has_own_lines(steps[0])
    return [
        Edit(loop, why, f"{head}: pass", is_certain=False),
        Edit(word, "", f"for {name} in"),
        Edit(loop.test, "", call),
        *(keeping(loop, start) or ()),
        *([Edit(steps[0], "")] if is_last else []),
    ]


def _stores_and_reads(
    script: Script, loop: Loop, counter: Name
) -> tuple[list[Name], set[Name]]:
    """Return where a counter is stored, and where it is read that the loop must be.

    Behind a loop that had ended before a restart, it is where it began.
    """
    if isinstance(counter, ast.Name):
        known = script.mentions(counter.id, script.scope(loop))
        late = {each for each in known if each.lineno > (loop.end_lineno or 0)}
        return [*filter(is_stored, known)], {e for e in late if not is_stored(e)}
    calls = {each.func for each in script.nodes if isinstance(each, ast.Call)}
    mentions = [
        each
        for each in script.nodes
        if isinstance(each, ast.Attribute) and each.attr == counter.attr
        if each not in calls
    ]
    return [*filter(is_stored, mentions)], {e for e in mentions if not is_stored(e)}


def _begun(script: Script, name: Name, loop: Loop) -> str:
    """Return what a name is given in front of a loop, in the same statements."""
    value, statement = script.assigned(name), script.statement(name)
    is_before = (
        isinstance(statement, ast.Assign)
        and len(statement.targets) == 1
        and statement.lineno < loop.lineno
        and script.parents[statement] is script.parents[loop]
    )
    return ast.unparse(value) if is_before and value else ""


# Values that live over epochs.

_JUMPS = ast.Continue | ast.Break | ast.Return | ast.Raise
_SAME_CALLS = named("min max abs round float int bool sum len")


class Kept:
    """Values that a later turn of a loop reads, and that are the same on all replicas.

    Args:
        counting: The loops over epochs and steps.
        summed: The names to which sums are added that are Accumulators then.
    """

    def __init__(
        self,
        script: Script,
        loaders: Loaders,
        counting: set[Loop],
        summed: set[ast.AST],
    ) -> None:
        self._script, self._loaders = script, loaders
        self._counting, self._summed = counting, summed
        self._open: set[str] = set()

    def edits(self) -> Iterator[Edit]:
        """Yield what makes Variables of them."""
        every = [each for loop in self._counting for each in self._candidates(loop)]
        kept = [each for each in every if self._is_same_name(each[1][0].id)]
        for loop, (first, *others) in kept:
            late = [each for each in others if each.lineno > loop.lineno]
            value = self._script.assigned(first)
            is_only = not any(is_stored(e) and e not in late for e in others)
            if value and is_only and _begun(self._script, first, loop):
                label = f', name="{first.id}"' if len(kept) > 1 else ""
                yield inserted(value, "elasticrun.Variables(value=", behind=False)
                yield inserted(value, f"{label})", behind=True)
                late = others
            else:
                is_fixed = not any(map(is_stored, late))
                late = [] if is_fixed else late
                line = f"{first.id} = {_variables(first.id)}{'.value' * is_fixed}"
                yield Edit(loop, "", line, place="before")
            for each in late:
                yield inserted(each, ".value", behind=True)

    def _candidates(self, loop: Loop) -> Iterator[tuple[Loop, list[ast.Name]]]:
        """Yield where each name stands that may be kept, first where it begins."""
        inside = set(ast.walk(loop))
        head = loop.test if isinstance(loop, ast.While) else loop.iter
        counters = {ast.unparse(each) for each in ast.walk(head)}  # by themselves
        names = {e.id for e in inside if isinstance(e, ast.Name)}
        for name in sorted(names - counters):
            mentions = self._script.mentions(name, self._script.scope(loop))
            stores = [e for e in mentions if not isinstance(e.ctx, ast.Load)]
            early = [e for e in stores if e not in inside]
            if (
                early
                and stores[0] is mentions[0]
                and self._script.statement(early[0]) in self._script.body_of(loop)
                and (
                    _is_read_first(loop, inside.intersection(mentions))
                    if early != stores
                    else any(map(self._is_loaded, early))
                )
                and all(map(self._can_grow, mentions[1:]))
                and (
                    _is_number(self._script.assigned(early[0]))
                    or not any(map(self._is_loaded, early))
                )
            ):
                yield loop, mentions

    def _is_loaded(self, store: Name) -> bool:
        """Return whether a branch that loads an own checkpoint stores a name."""
        return not self._script.loop(store) and any(
            isinstance(node, ast.Call) and self._script.origin(node.func) in _READERS
            for branch in self._script.above(store)
            if isinstance(branch, ast.If) and not self._counting & {*ast.walk(branch)}
            for node in ast.walk(branch)
        )

    def _can_grow(self, name: ast.Name) -> bool:
        """Return whether `.value` can be written behind a name."""
        if not isinstance(name.ctx, ast.Load):
            kinds = ast.Assign | ast.AugAssign
            return isinstance(self._script.statement(name), kinds)
        above = self._script.above(name)
        texts = [ast.unparse(e) for e in above if isinstance(e, ast.JoinedStr)]
        # Python 3.10 does not know where it stands in there; `{x=}` shows its name.
        is_plain = not any(f"{name.id}={{{name.id}!r" in each for each in texts)
        return not texts or (sys.version_info >= (3, 11) and is_plain)

    # What is the same on all replicas.

    def _is_same_name(self, name: str) -> bool:
        if name in self._open:
            return True  # It is asked for already, and is so if all else is.
        self._open.add(name)
        stores, given = self._loaders.stores(name)
        is_same = all(map(self._is_same_store, stores)) and all(
            map(self._is_same, given)
        )
        self._open.remove(name)
        return is_same and bool(stores or given)

    def _is_same_store(self, store: Name) -> bool:
        around = self._script.parents[store]
        is_counter = around in self._counting or store in self._summed
        if is_counter or self._is_loaded(store):
            return True
        loop = self._script.parents[around]
        if loop in self._loaders.loops and isinstance(around, ast.Tuple):
            return bool(self._loaders.numbered(loop)) and store is around.elts[0]
        value = self._script.assigned(store)
        if isinstance(around, ast.AugAssign):
            value = around.value
        above = self._script.above(store)
        return self._is_same(value) and all(map(self._runs_alike, above))

    def _runs_alike(self, node: ast.AST) -> bool:
        """Return whether all replicas come alike to what stands in a statement."""
        if isinstance(node, ast.If):
            is_main = ast.unparse(node.test).startswith("__name__")
            return is_main or self._is_same(node.test)
        if isinstance(node, ast.For) and node in self._loaders.loops:
            jumps = (e for e in ast.walk(node) if isinstance(e, _JUMPS))
            return has_backward_pass(self._script, node) and all(
                self._is_same(e.test)
                for jump in jumps
                for e in self._script.above(jump)
                if isinstance(e, ast.If)
            )
        is_other = isinstance(node, ast.For | ast.While | ast.Try)
        return not is_other or node in self._counting

    def _is_same(self, node: ast.expr | None) -> bool:
        match node:
            case ast.Constant():
                return True
            case ast.Name(name):
                return self._is_same_name(name)
            case ast.Attribute(ast.Name(name)):
                values = self._loaders.values(name)
                calls = [e for e in values if isinstance(e, ast.Call)]
                are_options = all(last_name(e.func) == "parse_args" for e in calls)
                return bool(values) and len(calls) == len(values) and are_options
            case ast.Call(func, args):
                if last_name(func) == "len" and args and self._is_data(args[0]):
                    return True
                origin = self._script.origin(func)
                if ast.unparse(func) in _SAME_CALLS or origin.startswith("math."):
                    return all(map(self._is_same, args))
                return self._is_same(self._script.returned(node))
            case (
                ast.BinOp() | ast.UnaryOp() | ast.Compare() | ast.BoolOp() | ast.IfExp()
            ):
                parts = ast.iter_child_nodes(node)
                return all(self._is_same(e) for e in parts if isinstance(e, ast.expr))
        return False

    def _is_data(self, node: ast.expr) -> bool:
        return last_name(node) == "dataset" or bool(self._loaders.of(node))


def _is_number(node: ast.expr | None) -> bool:
    text = ast.unparse(node) if node else ""
    return re.fullmatch(r"-?(float\('-?inf'\)|[\d.e+]+)", text) is not None


def _is_read_first(loop: Loop, mentions: set[ast.AST]) -> bool:
    """Return whether a turn of a loop may read what an earlier one has stored."""
    for statement in loop.body:
        nodes = set(ast.walk(statement))
        added = {e.target for e in nodes if isinstance(e, ast.AugAssign)}
        own = nodes & mentions
        if any(not is_stored(each) or each in added for each in own):
            return True
        if own and isinstance(statement, ast.Assign):
            return False
    return False


# Files.

_WRITERS = named("""
    torch.save torch.jit.save numpy.save numpy.savez numpy.savetxt json.dump pickle.dump
    torchvision.utils.save_image matplotlib.pyplot.savefig
""")
_READERS = named("torch.load torch.jit.load numpy.load json.load pickle.load")
_IN_BLOCKS = named("write writelines dump dumps print save")
_HARMLESS = named("""
    state_dict cpu detach numpy item tolist items keys values join format str int float
    len dict list tuple Path
""")


def files(script: Script) -> Iterator[Edit]:
    """Yield what lets rank 0 alone write a file that no other one reads.

    What a call computes that it writes, all replicas compute before it.
    """
    found = [e for e in script.nodes if isinstance(e, ast.stmt) and _writes(script, e)]
    names = {each.id for each in script.nodes if isinstance(each, ast.Name)}
    name = next(
        each for each in ("saved", "saved_now", "saved_here") if each not in names
    )
    for statement in found:
        body, computed = script.body_of(statement), _computed(statement)
        number = body.index(statement)
        lines = [f"{name} = {ast.unparse(each)}" for each in computed[:1]]
        if lines or not number or body[number - 1] not in found:
            lines.append("if elasticrun.rank() == 0:")
            yield Edit(statement, "", "\n".join(lines), place="before")
        yield from (Edit(each, "", name) for each in computed[:1])
        yield Edit(statement, "", "    ", place="indent")


def _computed(node: ast.stmt) -> list[ast.expr]:
    """Return what a call is given first, and all in it, if that calls something."""
    match node:
        case ast.Expr(ast.Call(_, [given, *_])):
            inside = [each for each in ast.walk(given) if isinstance(each, ast.expr)]
            calls = (last_name(e.func) for e in inside if isinstance(e, ast.Call))
            return inside if set(calls) - _HARMLESS else []
    return []


def _writes(script: Script, node: ast.stmt) -> bool:
    """Return whether a statement does nothing but write a file that is not read."""
    match node:
        case ast.Expr(ast.Call() as call) if script.origin(call.func) in _WRITERS:
            harmless = _HARMLESS
        case ast.With(
            [ast.withitem(ast.Call(ast.Name("open"), [_, ast.Constant(mode)]) as call)]
        ) if str(mode).startswith("w") and all(
            isinstance(e, ast.Expr) for e in node.body
        ):
            harmless = _HARMLESS | _IN_BLOCKS
        case _:
            return False
    computed = {*_computed(node), call}
    for each in ast.walk(node):
        match each:
            case ast.Constant() | ast.JoinedStr() if each.lineno != each.end_lineno:
                return False  # Lines of a text cannot be indented.
            case ast.Call(func) if last_name(func) not in harmless:
                if each not in computed:
                    return False
            case ast.Await() | ast.Yield() | ast.NamedExpr():
                return False
    is_read = any(_may_read(script, each, node) for each in script.nodes)
    is_opened = any(isinstance(e, ast.With) and _opens(e) for e in script.above(node))
    return script.has_own_lines(node) and not is_read and not is_opened


def _opens(block: ast.With) -> bool:
    """Return whether a file is opened for what stands in a block."""
    return any("open(" in ast.unparse(each.context_expr) for each in block.items)


def _may_read(script: Script, node: ast.AST, written: ast.stmt) -> bool:
    """Return whether another replica may read what rank 0 has not written yet."""
    if not isinstance(node, ast.Call) or script.origin(node.func) not in _READERS:
        return False
    if script.scope(node) is script.scope(written) and not script.loop(node):
        return node.lineno > written.lineno
    read, write = (
        [e.lineno for e in script.at_top if e is each or e in script.around(each)]
        for each in (node, written)
    )
    return not read or not write or max(read) >= min(write)
