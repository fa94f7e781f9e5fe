"""Definitions of functions and classes, and imports of modules."""

from __future__ import annotations

import ast

from elasticrun.lint import roles
from elasticrun.lint.values import Class, Value, external
from elasticrun.lint.walk.assignment import Assignment
from elasticrun.lint.walk.core import Frame


class Definitions(Assignment):
    """Binds what a program defines and imports."""

    def _run_FunctionDef(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef, frame: Frame
    ) -> None:
        value = Value("func", node.name, node=node)
        value.frame, value.data = frame, frame.module
        frame.env[node.name] = value
        decorated = self.decorated(value, frame)
        if decorated is not value:
            # Kept under a name that no program has, to be walked through if uncalled.
            frame.env[f"{node.name} undecorated"] = value
            frame.env[node.name] = decorated

    _run_AsyncFunctionDef = _run_FunctionDef

    def _run_ClassDef(self, node: ast.ClassDef, frame: Frame) -> None:
        cls = Class(node, frame.module, frame)
        for base in node.bases:
            root = base.value if isinstance(base, ast.Subscript) else base
            cls.bases.append(self.evaluate(root, frame))
        for each in node.body:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                cls.methods[each.name] = each
            elif (
                isinstance(each, ast.Assign | ast.AnnAssign) and each.value is not None
            ):
                targets = (
                    each.targets if isinstance(each, ast.Assign) else [each.target]
                )
                for target in targets:
                    if isinstance(target, ast.Name):
                        cls.constants[target.id] = each.value
        cls.role = _role_of(cls)
        value = Value("class", node.name, node=node)
        value.cls = cls
        frame.env[node.name] = value
        self.classes.append(cls)

    # Imports.

    def _run_Import(self, node: ast.Import, frame: Frame) -> None:
        for alias in node.names:
            name = alias.name if alias.asname else alias.name.partition(".")[0]
            frame.env[alias.asname or name] = self._imported(name, frame, 0)
            if not alias.asname and "." in alias.name:
                self._imported(alias.name, frame, 0)

    def _imported(self, name: str, frame: Frame, level: int) -> Value:
        module = (
            None if _is_elastic(name) else self.project.find(name, frame.module, level)
        )
        if module is None:
            return external(name)
        value = Value("module", name)
        value.data = self.load_module(module)
        module.imported_by.add(frame.module.name)
        return value

    def _run_ImportFrom(self, node: ast.ImportFrom, frame: Frame) -> None:
        source = node.module or ""
        origin = self._imported(source, frame, node.level)
        for alias in node.names:
            if alias.name == "*" and _is_elastic(source):
                for name in roles.ELASTIC_NAMES:
                    frame.env.setdefault(name, external(f"{source}.{name}"))
                continue
            if alias.name == "*":
                if origin.kind == "module" and origin.data is not None:
                    for key, value in list(origin.data.env.items()):
                        frame.env.setdefault(key, value)
                continue
            value = external(f"{source}.{alias.name}")
            if origin.kind == "module" and origin.data is not None:
                known = origin.data.env.get(alias.name)
                value = known or self._imported(
                    f"{source}.{alias.name}", frame, node.level
                )
            elif node.level and not source:
                value = self._imported(alias.name, frame, node.level)
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
