"""A plain script as its syntax tree shows it: imports, calls, what runs in a loop."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator

from elasticrun.lint.naming import last_name

Loop = ast.For | ast.While


class Script:
    """A file's tree, and what its names stand for."""

    def __init__(self, tree: ast.Module) -> None:
        self.nodes = list(ast.walk(tree))
        self.parents = {
            inner: node for node in self.nodes for inner in ast.iter_child_nodes(node)
        }
        self.assigned: dict[str, list[ast.expr]] = defaultdict(list)
        self._imported = dict(_imported(self.nodes))
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
            for target, value in assignments(node):
                self.assigned[ast.unparse(target)].append(value)
                if isinstance(value, ast.Call):
                    made = self._class_of.get(last_name(value.func))
                    if made and (name := last_name(target)):
                        self._class_of[name] = made

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes in which a node stands, the next one first."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield all that stands in the function, class or file of a node."""
        scopes = (ast.FunctionDef, ast.ClassDef, ast.Module)
        return ast.walk(next(e for e in self.above(node) if isinstance(e, scopes)))

    def body_of(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the statements of which one is a part."""
        fields = (value for _, value in ast.iter_fields(self.parents[statement]))
        return next(e for e in fields if isinstance(e, list) and statement in e)

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
                    todo += self._called(node)
        return found

    def _called(self, call: ast.Call) -> list[ast.FunctionDef]:
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

    def _class_around(self, node: ast.AST) -> str:
        for each in self.above(node):
            if isinstance(each, ast.ClassDef):
                return self._class_of[each.name]
        return ""


def assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield what a statement assigns to, each with its value: two of `a, b = c, d`."""
    match node:
        case ast.AnnAssign(value=ast.expr() as value):
            yield node.target, value
        case ast.Assign(targets, value):
            for target in targets:
                pairs: list[tuple[ast.expr, ast.expr]] = [(target, value)]
                match target, value:
                    case ast.Tuple(names), ast.Tuple(values) if not any(
                        isinstance(each, ast.Starred) for each in (*names, *values)
                    ):
                        pairs = [*zip(names, values, strict=False)]
                yield from pairs


def _imported(nodes: list[ast.AST]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            for each in node.names:
                head = each.name.split(".")[0]
                yield each.asname or head, each.name if each.asname else head
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for each in node.names:
                yield each.asname or each.name, f"{node.module}.{each.name}"
