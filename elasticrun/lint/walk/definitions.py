"""Definitions of functions and classes, and imports of modules."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from elasticrun.lint import roles
from elasticrun.lint.project import Module
from elasticrun.lint.values import Class, MethodDef, Value, external
from elasticrun.lint.walk.frames import Frame
from elasticrun.lint.walk.functions import decorated
from elasticrun.lint.walk.walk import RunStatement, Walk


def _run_function_def(walk: Walk, node: MethodDef) -> None:
    frame = walk.frame
    value = Value("func", node.name, node=node, frame=frame)
    frame.env[node.name] = value
    outcome = decorated(walk, value)
    if outcome is not value:
        # Kept under a name that no program has, to be walked through if uncalled.
        frame.env[f"{node.name} undecorated"] = value
        frame.env[node.name] = outcome


def _run_class_def(walk: Walk, node: ast.ClassDef) -> None:
    cls = Class(node, walk.frame.module, walk.frame)
    for base in node.bases:
        root = base.value if isinstance(base, ast.Subscript) else base
        cls.bases.append(walk.evaluate(root))
    for each in node.body:
        if isinstance(each, MethodDef):
            cls.methods[each.name] = each
        elif isinstance(each, ast.Assign | ast.AnnAssign) and each.value is not None:
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    cls.constants[target.id] = each.value
    cls.role = _role_of(cls)
    walk.frame.env[node.name] = Value("class", node.name, node=node, cls=cls)
    walk.classes.append(cls)


# Imports.


def load_module(walk: Walk, module: Module) -> Frame | None:
    """Walk through a module's top level once; return its names."""
    if module in walk.frames:
        return walk.frames[module]
    tree = module.parse() if walk.may_import(module) else None
    if tree is None:
        walk.frames[module] = None
        return None
    frame = walk.frames[module] = Frame(module, tree)
    outer = walk.epoch, walk.loop, walk.guards
    walk.epoch, walk.loop, walk.guards = None, None, ()
    walk.depth += 1
    with walk.inside(frame):
        walk.step(tree)
        walk.run(tree.body)
    walk.depth -= 1
    walk.epoch, walk.loop, walk.guards = outer
    if not walk.here:
        walk.here = [walk.graph.steps[-1]]
    return frame


def _run_import(walk: Walk, node: ast.Import) -> None:
    for alias in node.names:
        name = alias.name if alias.asname else alias.name.partition(".")[0]
        walk.frame.env[alias.asname or name] = _imported(walk, name, 0)
        if not alias.asname and "." in alias.name:
            _imported(walk, alias.name, 0)


def _imported(walk: Walk, name: str, level: int) -> Value:
    importer = walk.frame.module
    module = None if _is_elastic(name) else walk.project.find(name, importer, level)
    if module is None:
        return external(name)
    module.imported_by.add(importer.name)
    return Value("module", name, frame=load_module(walk, module))


def _run_import_from(walk: Walk, node: ast.ImportFrom) -> None:
    frame = walk.frame
    source = node.module or ""
    origin = _imported(walk, source, node.level)
    for alias in node.names:
        if alias.name == "*" and _is_elastic(source):
            for name in roles.ELASTIC_NAMES:
                frame.env.setdefault(name, external(f"{source}.{name}"))
            continue
        if alias.name == "*":
            if origin.kind == "module" and origin.frame is not None:
                for key, value in list(origin.frame.env.items()):
                    frame.env.setdefault(key, value)
            continue
        value = external(f"{source}.{alias.name}")
        if origin.kind == "module" and origin.frame is not None:
            known = origin.frame.env.get(alias.name)
            value = known or _imported(walk, f"{source}.{alias.name}", node.level)
        elif node.level and not source:
            value = _imported(walk, alias.name, node.level)
        frame.env[alias.asname or alias.name] = value


def _role_of(cls: Class) -> str:
    for each in cls.lineage():
        for base in each.bases:
            if base.kind == "ext":
                role = roles.base_role(base.name)
                if role:
                    return role
    if "step" in cls.methods or "update" in cls.methods:
        role = roles.class_role(cls.node.name)
        wanted = "step" if role == "scheduler" else "update"
        return role if wanted in cls.methods else ""
    return ""


def _is_elastic(name: str) -> bool:
    return name.split(".", 1)[0] in roles.ELASTIC_ROOTS


STATEMENTS: Mapping[type[ast.stmt], RunStatement] = {
    ast.FunctionDef: _run_function_def,
    ast.AsyncFunctionDef: _run_function_def,
    ast.ClassDef: _run_class_def,
    ast.Import: _run_import,
    ast.ImportFrom: _run_import_from,
}
