"""The walk from a module's top, and from functions that nothing in it calls."""

from __future__ import annotations

import ast

from elasticrun.lint.options import Options
from elasticrun.lint.project import Module, Project
from elasticrun.lint.values import Class, Value, register_reachable, unknown
from elasticrun.lint.walk.core import Frame
from elasticrun.lint.walk.entries import Entries
from elasticrun.lint.walk.functions import is_generator
from elasticrun.lint.walk.statements import Statements

Method = ast.FunctionDef | ast.AsyncFunctionDef

MAX_MODULES = 80
MAX_IMPORTS = 12  # one within the other


class Walker(Statements):
    """Walks through one program, beginning with its main module."""

    def __init__(self, project: Project, options: Options, root: Module) -> None:
        super().__init__(project, options)
        self.root_module = root
        self.frames: dict[str, Frame | None] = {}
        self.depth = 0  # of imports

    def walk(self) -> None:
        """Walk through the module, then through what it defines and does not call."""
        frame = self.load_module(self.root_module)
        if frame is None:
            return
        own = [each for each in self.classes if each.module is self.root_module]
        entries = Entries(frame, own)
        for function, value in _functions(frame, entries):
            if function not in self.visited and entries.is_worth_it(function):
                self._enter_alone(value, frame)
        for cls in own:
            self._try_class(cls, frame, entries)

    def load_module(self, module: Module) -> Frame | None:
        """Walk through a module's top level once; return its names."""
        key = str(module.path)
        if key in self.frames:
            return self.frames[key]
        tree = module.parse() if self._is_within_reach(module) else None
        if tree is None:
            self.frames[key] = None
            return None
        frame = Frame(module, tree)
        self.frames[key] = frame
        outer = self.epoch, self.loop, self.guards
        self.epoch, self.loop, self.guards = None, None, ()
        self.step(tree, frame)
        self.depth += 1
        self.run(tree.body, frame)
        self.depth -= 1
        self.epoch, self.loop, self.guards = outer
        if not self.here:
            self.here = [len(self.graph.steps) - 1]
        return frame

    def _is_within_reach(self, module: Module) -> bool:
        """Return whether to walk through a module: not through a whole library."""
        if self.depth < 2:
            return True
        is_small = self.depth < MAX_IMPORTS and len(self.frames) < MAX_MODULES
        return is_small and module.is_about_training

    def _enter_alone(self, value: Value, frame: Frame) -> None:
        """Walk through a function as a program of its own, its arguments unknown."""
        function = value.node
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        self.visited.add(function)
        if is_generator(function):
            return
        self.here = []
        self.has_seeded = set(self.has_seeded)
        self.step(function, frame)
        inner = Frame(frame.module, function, outer=value.frame)
        inner.instance, inner.cls = value.owner, value.cls
        self.bind(value, inner, [], {})
        self._unfix(inner)
        self.run_function(function, inner, frame, function)

    def _unfix(self, frame: Frame) -> None:
        """Forget defaults: nobody knows what the function will be called with."""
        frame.fixed.clear()
        for name, value in frame.env.items():
            if value.kind == "const":
                frame.env[name] = unknown(name)

    def _try_class(self, cls: Class, frame: Frame, entries: Entries) -> None:
        methods = [
            each
            for each in cls.methods.values()
            if each not in self.visited and entries.is_worth_it(each)
        ]
        methods = [each for each in methods if each.name != "__init__"]
        methods += self._inherited(cls, entries)
        if not methods or cls.role in ("model", "dataset", "state"):
            return
        made = self.made(Value("instance", cls.node.name, node=cls.node))
        made.cls = cls
        constructor = cls.find("__init__")
        if constructor is not None:
            method = self.attribute(made, "__init__", cls.node, frame)
            if method.kind == "func":
                self._enter_alone(method, frame)
        # Those with an epoch loop first: they call the others.
        for each in sorted(methods, key=lambda m: entries.order(m, m.name)):
            if each not in self.visited or each.name not in cls.methods:
                method = self.attribute(made, each.name, cls.node, frame)
                if method.kind == "func":
                    self._enter_alone(method, frame)
        if made.is_durable:
            register_reachable(made)

    def _inherited(self, cls: Class, entries: Entries) -> list[Method]:
        """Return inherited methods with epochs: they may call what nobody calls."""
        own = [each for each in cls.methods.values() if each.name != "__init__"]
        if all(each in self.visited for each in own):
            return []
        found: dict[str, Method] = {}
        for base in cls.lineage()[1:]:
            for name, each in base.methods.items():
                is_near = base.module is cls.module and name not in cls.methods
                if is_near and not entries.order(each, name)[0]:
                    found.setdefault(name, each)
        return list(found.values())


def _functions(frame: Frame, entries: Entries) -> list[tuple[ast.AST, Value]]:
    """Return the functions that a module defines, callers before what they call."""
    found = [
        (value.node, value)
        for value in frame.env.values()
        if value.kind == "func" and value.frame is frame and value.node is not None
    ]
    return sorted(found, key=lambda each: entries.order(each[0], each[1].name))
