"""A plain script as its syntax tree shows it: imports, calls, what runs in a loop."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property

from elasticrun.lint.naming import last_name, named

Name = ast.Name | ast.Attribute
Loop = ast.For | ast.While
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_LOOPS = (ast.For, ast.While, ast.ListComp, ast.DictComp, ast.GeneratorExp)
# What is a method of torch's modules, if it is given nothing.
_OF_MODULES = named("train eval")


class Script:
    """A file's tree, and what its names stand for.

    Attributes:
        nodes: All of them, those further outside first.
        parents: The node in which each one stands.
        at_top: The statements that the file runs by itself.
    """

    def __init__(self, tree: ast.Module, text: str = "") -> None:
        self._lines = text.encode().splitlines()
        self.nodes = list(ast.walk(tree))
        self.at_top = [
            each
            for each in tree.body
            if not isinstance(each, ast.FunctionDef | ast.ClassDef)
        ]
        self.parents = {
            inner: node for node in self.nodes for inner in ast.iter_child_nodes(node)
        }
        self._imported = dict(_imported(self.nodes))
        self._calls_of: dict[ast.FunctionDef, list[ast.Call]] = {}
        # Of classes and of objects, by their names; the oldest one of the file stands
        # for all that are derived from it.
        self._class_of: dict[str, str] = {}
        self._functions: dict[tuple[str, str], list[ast.FunctionDef]] = defaultdict(
            list
        )
        for node in self.nodes:
            if isinstance(node, ast.ClassDef):
                bases = (self._class_of.get(last_name(each)) for each in node.bases)
                self._class_of[node.name] = next(filter(None, bases), node.name)
            elif isinstance(node, ast.FunctionDef):
                is_method = isinstance(self.parents[node], ast.ClassDef)
                own = self._class_around(node) if is_method else ""
                self._functions[own, node.name].append(node)
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                made = self._class_of.get(last_name(node.value.func))
                names = (last_name(each) for each in node.targets if made)
                self._class_of.update((name, made) for name in names if made)

    def has_own_lines(self, statement: ast.stmt) -> bool:
        """Return whether nothing but a comment stands in the lines of a statement."""
        first, end = statement.lineno - 1, (statement.end_lineno or 0) - 1
        behind = self._lines[end][statement.end_col_offset :].strip()
        before = self._lines[first][: statement.col_offset].strip()
        return not before and (not behind or behind.startswith(b"#"))

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes in which a node stands, the next one first."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def origin(self, node: ast.expr) -> str:
        """Return what an imported name stands for, as `torch.optim.SGD`, or nothing."""
        if isinstance(node, ast.Attribute):
            origin = self.origin(node.value)
            return origin and f"{origin}.{node.attr}"
        return self._imported.get(node.id, "") if isinstance(node, ast.Name) else ""

    def reached(self, nodes: Iterable[ast.AST]) -> set[ast.AST]:
        """Return all that runs in some statements, and in functions called there."""
        found: set[ast.AST] = set()
        todo = list(nodes)
        while todo:
            node = todo.pop()
            if node not in found:
                found.add(node)
                todo += ast.iter_child_nodes(node)
                if isinstance(node, ast.Call):
                    todo += self.called(node)
        return found

    def body_of(self, statement: ast.AST) -> list[ast.AST]:
        """Return the statements of which one is a part."""
        fields = [value for _, value in ast.iter_fields(self.parents[statement])]
        return next(e for e in fields if isinstance(e, list) and statement in e)

    def statement(self, node: ast.AST) -> ast.AST:
        """Return the statement of which a node is a part."""
        return next(each for each in self.above(node) if isinstance(each, ast.stmt))

    def loop(self, node: ast.AST) -> Loop | None:
        """Return the loop in which a node stands, the inner one."""
        return next((each for each in self.above(node) if isinstance(each, Loop)), None)

    def around(self, node: ast.AST) -> set[ast.AST]:
        """Return all in which a node may run: what it stands in, and so may calls."""
        found: set[ast.AST] = set()
        todo = [node]
        while todo:
            for each in self.above(todo.pop()):
                if each in found:
                    break
                found.add(each)
                if isinstance(each, ast.FunctionDef):
                    todo += self.calls_of(each)
        return found

    def calls_of(self, function: ast.FunctionDef) -> list[ast.Call]:
        """Return what may call a function."""
        if function not in self._calls_of:
            calls = self._calls[function.name if function.name != "__init__" else ""]
            found = [each for each in calls if self._may_call(each, function)]
            self._calls_of[function] = found
        return self._calls_of[function]

    @cached_property
    def _calls(self) -> dict[str, list[ast.Call]]:
        """The calls by the last names of what they call, and all of them by ""."""
        calls: dict[str, list[ast.Call]] = defaultdict(list)
        for node in self.nodes:
            if isinstance(node, ast.Call):
                for name in {"", last_name(node.func)}:
                    calls[name].append(node)
        return calls

    def scope(self, node: ast.AST) -> ast.AST:
        """Return the function, class or file whose names a node has."""
        scopes = (*_FUNCTIONS, ast.ClassDef, ast.Module)
        return next(each for each in self.above(node) if isinstance(each, scopes))

    def mentions(self, name: str, scope: ast.AST) -> list[ast.Name]:
        """Return where a name of a scope stands; nothing if other scopes have it too.

        Those that have a variable of their own by this name do not count.
        """
        by_scope = self._names.get(name, {})
        others = (at for at in by_scope if at is not scope and scope in self.above(at))
        has_others = any((at, name) not in self._bound for at in others)
        return (
            [] if has_others or ("", name) in self._bound else by_scope.get(scope, [])
        )

    @cached_property
    def _names(self) -> dict[str, dict[ast.AST, list[ast.Name]]]:
        """All names by what they are, and by their scopes, in order."""
        names: dict[str, dict[ast.AST, list[ast.Name]]] = defaultdict(
            lambda: defaultdict(list)
        )
        found = (each for each in self.nodes if isinstance(each, ast.Name))
        for each in sorted(found, key=lambda e: (e.lineno, e.col_offset)):
            names[each.id][self.scope(each)].append(each)
        return names

    @cached_property
    def _bound(self) -> set[tuple[ast.AST | str, str]]:
        """The names that functions have of their own; with "" those of others."""
        bound: set[tuple[ast.AST | str, str]] = set()
        for node in self.nodes:
            if isinstance(node, ast.Global | ast.Nonlocal):
                bound |= {("", each) for each in node.names}
            elif isinstance(node, ast.arg):
                bound.add((self.scope(node), node.arg))
            elif isinstance(node, ast.Name) and is_stored(node):
                scope = self.scope(node)
                bound |= {(scope, node.id)} if isinstance(scope, _FUNCTIONS) else set()
        return bound

    def assigned(self, name: Name) -> ast.expr | None:
        """Return what is assigned to a name where it stands, if the text tells it."""
        around = self.parents[name]
        if isinstance(around, ast.Assign | ast.AnnAssign):
            return around.value
        statement = self.parents[around]
        if not isinstance(around, ast.Tuple) or not isinstance(statement, ast.Assign):
            return None
        value: ast.expr | None = statement.value
        if isinstance(value, ast.Call):
            value = self.returned(value)
        is_alike = isinstance(value, ast.Tuple) and len(value.elts) == len(around.elts)
        if not is_alike or any(isinstance(e, ast.Starred) for e in around.elts):
            return None
        assert isinstance(value, ast.Tuple)
        return value.elts[around.elts.index(name)]

    def returned(self, call: ast.Call) -> ast.expr | None:
        """Return the only thing that a function returns, if a call is one of it."""
        functions = self.called(call)
        returns = [
            each
            for function in functions
            for each in ast.walk(function)
            if isinstance(each, ast.Return | ast.Yield | ast.YieldFrom)
        ]
        is_one = len(functions) == len(returns) == 1
        return returns[0].value if is_one else None

    def given(self, name: str, function: ast.FunctionDef) -> list[ast.expr | None]:
        """Return what each call gives to a function's parameter; None if unknown."""
        names = [each.arg for each in function.args.posonlyargs + function.args.args]
        is_method = isinstance(self.parents[function], ast.ClassDef)
        at = names.index(name) - is_method if name in names else len(self.nodes)
        found: list[ast.expr | None] = []
        for call in self.calls_of(function):
            by_name = [each.value for each in call.keywords if each.arg == name]
            has_stars = any(isinstance(each, ast.Starred) for each in call.args)
            found += by_name or ([] if has_stars else call.args[at : at + 1]) or [None]
        return found

    def runs_once(self, node: ast.AST) -> bool:
        """Return whether a function is called in one place at most, and in no loop."""
        for function in self.above(node):
            if isinstance(function, ast.FunctionDef):
                calls = self.calls_of(function)
                around = (above for call in calls for above in self.above(call))
                return len(calls) < 2 and not any(isinstance(e, _LOOPS) for e in around)
        return True

    def _may_call(self, node: ast.Call, function: ast.FunctionDef) -> bool:
        if known := self.called(node):
            return function in known
        is_of_module = function.name in _OF_MODULES and not node.args
        return last_name(node.func) == function.name and not is_of_module

    def called(self, call: ast.Call) -> list[ast.FunctionDef]:
        """Return the functions of the file that a call is known to run."""
        name = last_name(call.func)
        if not isinstance(call.func, ast.Attribute):
            init = self._functions.get((self._class_of.get(name, ""), "__init__"), [])
            return self._functions.get(("", name), init)
        owner = call.func.value
        of = last_name(owner.func if isinstance(owner, ast.Call) else owner)
        is_own = of in ("self", "super")
        family = self._class_around(call) if is_own else self._class_of.get(of, "")
        return self._functions.get((family, name), []) if family else []

    def methods(self, name: str) -> list[ast.FunctionDef]:
        """Return the methods of a class of the file, and of what it is derived from."""
        family = self._class_of.get(name, "")
        return [
            e
            for (of, _), all_of in self._functions.items()
            if of == family
            for e in all_of
            if family
        ]

    def _class_around(self, node: ast.AST) -> str:
        for each in self.above(node):
            if isinstance(each, ast.ClassDef):
                return self._class_of[each.name]
        return ""


def is_stored(node: ast.AST) -> bool:
    """Return whether a name is given a value where it stands."""
    return isinstance(getattr(node, "ctx", None), ast.Store)


def _imported(nodes: list[ast.AST]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            for each in node.names:
                head = each.name.split(".")[0]
                yield each.asname or head, each.name if each.asname else head
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for each in node.names:
                yield each.asname or each.name, f"{node.module}.{each.name}"
