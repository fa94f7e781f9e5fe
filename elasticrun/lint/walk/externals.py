"""Calls of what is not in the project: constructors, effects, draws, collectives."""

from __future__ import annotations

import ast

from elasticrun.lint import catalog
from elasticrun.lint.graph import DataLoop
from elasticrun.lint.values import (
    NO_TAINTS,
    Value,
    constant,
    register,
    register_reachable,
    unknown,
)
from elasticrun.lint.walk.calls import LOG, OPTIMIZER, SAVE, TRACK, Calls
from elasticrun.lint.walk.core import VALUE, Frame

Arguments = tuple[list[Value], dict[str, Value]]
_PLAIN_EXTERNALS = frozenset(("copy.copy", "copy.deepcopy"))


class Externals(Calls):
    """Knows what calls of other packages do."""

    def call_external(
        self,
        name: str,
        node: ast.Call,
        frame: Frame,
        *,
        is_iterated: bool = False,
        given: Arguments | None = None,
    ) -> Value:
        """Return what an external call makes, noting its effects."""
        elastic = catalog.elastic_name(name)
        if elastic or name.rpartition(".")[2] in self.options.loaders:
            return self._elastic(elastic or "AdaptiveDataLoader", node, frame, given)
        sink = self.sink
        if name in catalog.LOGGERS:
            sink = TRACK if name in catalog.TRACKING else LOG
        elif name in catalog.SAVES:
            sink = SAVE
        args, keywords = given or self.arguments(node, frame, sink)
        files = [each for each in (*args, *keywords.values()) if each.kind == "file"]
        if files and (name in catalog.SAVES or name == "print"):
            self.note("file_written", node, files[0], name)
        for finder in (self._effect, self._object, self._language):
            value = finder(name, node, args, keywords, frame)
            if value is not None:
                return value
        values = [*args, *keywords.values()]
        return self._opaque(name, node, values, frame, is_iterated=is_iterated)

    # elasticrun itself.

    def _elastic(
        self, name: str, node: ast.Call, frame: Frame, given: Arguments | None
    ) -> Value:
        sink = SAVE if name == "Variables" else VALUE
        args, keywords = given or self.arguments(node, frame, sink)
        if name in catalog.LOADERS:
            return self._make_loader(name, node, args, keywords)
        if name == "AdaptiveDataParallel":
            return self._make_parallel(node, args, keywords)
        if name == "remaining_epochs_until":
            value = Value("epochs", name, node=node)
            value.parts = args[:1] or list(keywords.values())[:1]
            return value
        if name == "register":
            for value in [*args, *keywords.values()]:
                register(value)
                if value.kind == "instance":
                    register_reachable(value)
            self.note("state_made", node, data="register")
            return constant(None)
        if name == "Variables":
            return self._make_variables(node, keywords)
        if name == "Accumulator":
            self.note("state_made", node, data=name)
            return self.made(Value("accumulator", name, node=node))
        if name in catalog.ELASTIC_COLLECTIVES:
            self.note("collective", node, data=name)
            return unknown()
        return unknown(name, _ELASTIC_TAINTS.get(name, NO_TAINTS))

    def _make_loader(
        self, name: str, node: ast.Call, args: list[Value], keywords: dict[str, Value]
    ) -> Value:
        value = self.made(Value("loader", name, node=node))
        value.parts = args if name == "CombinedLoader" else args[:1]
        value.data = (args, keywords)
        self.note("state_made", node, value, name)
        self.note("loader_made", node, value, (args, keywords))
        return value

    def _make_parallel(
        self, node: ast.Call, args: list[Value], keywords: dict[str, Value]
    ) -> Value:
        value = self.made(Value("model", "AdaptiveDataParallel", node=node))
        names = ("module", "model", "optimizer", "lr_scheduler")
        states = [*args, *(v for k, v in keywords.items() if k in names)]
        value.parts = [each for each in states if each.kind != "const"]
        for part in states:
            register(part)
        register(value)
        self.note("state_made", node, value, "AdaptiveDataParallel")
        return value

    def _make_variables(self, node: ast.Call, keywords: dict[str, Value]) -> Value:
        value = self.made(Value("variables", "Variables", node=node))
        value.attrs = {k: v for k, v in keywords.items() if k != "name"}
        for each in value.attrs.values():
            each.registered = each.kind in ("list", "dict", "set")
        self.note("state_made", node, value, "Variables")
        return value

    # Effects.

    def _effect(
        self,
        name: str,
        node: ast.Call,
        args: list[Value],
        keywords: dict[str, Value],
        frame: Frame,
    ) -> Value | None:
        last = name.rpartition(".")[2]
        if name in catalog.SEEDERS:
            return self._seed(name, node, args, keywords)
        if name in catalog.DRAWS:
            seeded = {"generator", "random_state", "seed"} & keywords.keys()
            self.note("draw", node, data=(name, bool(seeded), self._is_seeded(name)))
            is_same = seeded or (self.epoch is None and self._is_seeded(name))
            return unknown(taints=NO_TAINTS if is_same else frozenset(("random",)))
        if name in catalog.OUTSIDE:
            self.note("outside", node, data=name)
            return unknown()
        if name in catalog.UNREPEATABLE or name == "os.makedirs":
            self.note("file_moved", node, data=(name, set(keywords), self.catching))
            return unknown()
        if name in catalog.SAVES:
            self.note("saved", node, data=(name, args))
            return unknown()
        if name in catalog.LOGGERS:
            self.note("logged", node, data=name)
            return constant(None)
        if last in catalog.COLLECTIVES and name.startswith(
            ("torch.distributed", "dist")
        ):
            self.note("collective", node, data=last)
            return unknown(taints=self.taints_of(args) - {"rank"})
        if name.startswith("torch.nn.init.") or "prune" in name.split("."):
            self.note("weights", node, args[0] if args else None, name)
            return unknown()
        if last == "update_bn" and args:
            self.assume_loop(args[0], node, frame, sure=True)
            return unknown()
        if last in ("clip_grad_norm_", "clip_grad_value_", "backward"):
            return unknown()
        return None

    def _seed(
        self, name: str, node: ast.Call, args: list[Value], keywords: dict[str, Value]
    ) -> Value | None:
        values = [*args, *keywords.values()]
        self.note("seeded", node, data=(name, values))
        if values and not (self.taints_of(values) & {"time", "entropy", "random"}):
            self.has_seeded.add(name.split(".", 1)[0])
        return None if catalog.made_by(name) == "rng" else unknown()

    def _is_seeded(self, name: str) -> bool:
        family = name.split(".", 1)[0]
        family = "numpy" if family == "sklearn" else family
        general = self.has_seeded - {"torch", "numpy", "random"}
        return family in self.has_seeded or bool(general)

    # Objects.

    def _object(
        self,
        name: str,
        node: ast.Call,
        args: list[Value],
        keywords: dict[str, Value],
        frame: Frame,
    ) -> Value | None:
        if name in ("open", "io.open", "gzip.open", "bz2.open", "codecs.open"):
            return self.open_file(
                node, args[1:], keywords, ast.unparse(node.args[0]) if node.args else ""
            )
        if name in _PLAIN_EXTERNALS and args:
            return self._copied(args[0], node)
        kind = catalog.made_by(name)
        if not kind:
            return None
        if kind == "model_wrapper":
            models = [each for each in args if is_model(each)]
            return self._wrapped_model(models[0], node) if models else None
        value = self.made(Value(kind, name, node=node, taints=NO_TAINTS))
        value.parts = [*args, *keywords.values()]
        value.data = (args, keywords)
        self.note(f"{kind}_made", node, value, name)
        return value

    def _wrapped_model(self, inner: Value, node: ast.Call) -> Value:
        value = self.made(Value("model", inner.name, node=node))
        value.parts = [inner]
        value.registered = inner.registered
        return value

    def _copied(self, original: Value, node: ast.Call) -> Value:
        copied = Value(original.kind, original.name, node=node, data=original.data)
        copied.cls, copied.parts = original.cls, list(original.parts)
        copied.attrs = dict(original.attrs)
        return self.made(copied) if original.is_object else copied

    def open_file(
        self, node: ast.Call, rest: list[Value], keywords: dict[str, Value], path: str
    ) -> Value:
        """Return an open file, noting the mode and the path as it is written."""
        mode_value = keywords.get("mode") or (rest[0] if rest else constant("r"))
        is_known = mode_value.kind == "const" and isinstance(mode_value.data, str)
        mode = mode_value.data if is_known else "?"
        value = self.made(Value("file", path, node=node, data=mode))
        self.note("file_opened", node, value, (path, mode))
        return value

    # The language and its library.

    def _language(
        self,
        name: str,
        node: ast.Call,
        args: list[Value],
        keywords: dict[str, Value],
        frame: Frame,
    ) -> Value | None:
        last = name.rpartition(".")[2]
        values = [*args, *keywords.values()]
        if name in catalog.TIME:
            return unknown("time", frozenset(("time",)))
        if name in catalog.ENTROPY:
            return unknown("entropy", frozenset(("entropy",)))
        if name in catalog.RANK:
            return unknown("rank", frozenset(("rank",)))
        if name in catalog.WORLD_SIZE:
            return unknown("world_size", frozenset(("world_size",)))
        if name in catalog.ENVIRONMENT_READERS and args:
            return unknown("environ", _environment(args[0]))
        if name in catalog.EXISTENCE:
            return unknown("exists", frozenset(("exists",)))
        if name == "functools.partial" and args:
            partial = Value("partial", args[0].name, parts=args)
            partial.attrs = dict(keywords)
            return partial
        if name == "next" and args:
            self.note("next", node, args[0])
            return unknown(taints=self.taints_of(args))
        if last == "zip" and name in ("zip", "itertools.zip_longest"):
            self.note("zipped", node, data=args)
        if last in ("iter", "cycle") and args:
            return self._iterator(last, node, args[0])
        if last in catalog.WRAPPERS and values:
            return self._wrapping(last, node, args, values, frame)
        if last in catalog.CONSUMING and "." not in name:
            return self._consumed(args, node, frame)
        if last in ("ThreadPoolExecutor", "Thread"):
            return unknown()
        if last in ("deque", "defaultdict", "OrderedDict", "Counter"):
            made = self.made(Value("list" if last == "deque" else "dict", node=node))
            made.is_complete = False
            return made
        if name == "range":
            return Value("range", parts=args, taints=self.taints_of(args))
        if name == "dataclasses.field" and "default_factory" in keywords:
            return self.made(Value(keywords["default_factory"].name, node=node))
        if name in ("list", "dict", "set", "tuple") and not values:
            return self.made(Value(name, node=node))
        if name in ("csv.writer", "csv.DictWriter") and args:
            return args[0]
        if name in ("dict", "vars") and not args:
            made = self.made(Value("dict", node=node))
            made.attrs = dict(keywords)
            return made
        return None

    def _iterator(self, last: str, node: ast.Call, source: Value) -> Value:
        value = Value("iterator", last, parts=[source], node=node)
        self.note("iterator_made", node, source, last)
        return value

    def _wrapping(
        self,
        last: str,
        node: ast.Call,
        args: list[Value],
        values: list[Value],
        frame: Frame,
    ) -> Value:
        if last in ("list", "tuple", "sorted") and args:
            if args[0].kind in ("list", "tuple", "dict") and last != "sorted":
                copied = Value("list", parts=args[0].parts or [])
                copied.is_complete = args[0].is_complete
                return self.made(copied)
            self._consumed(args, node, frame)
            return self.made(Value("list", taints=self.taints_of(args)))
        parts = args if last == "zip" else values
        wrapped = Value("wrapped", last, parts=parts, node=node)
        wrapped.taints = self.taints_of(values)
        return wrapped

    def _consumed(self, args: list[Value], node: ast.Call, frame: Frame) -> Value:
        for value in args:
            if value.kind in ("loader", "wrapped", "generator"):
                self.iterate(value, node, frame, lambda _: None)
        return unknown(taints=self.taints_of(args))

    # Everything else.

    def _opaque(
        self,
        name: str,
        node: ast.Call,
        values: list[Value],
        frame: Frame,
        *,
        is_iterated: bool,
    ) -> Value:
        if name in catalog.ITERATED_SAMPLERS:
            return Value("sampler", name, parts=values, node=node)
        loaders = [each for each in values if self.loaders_in(each)]
        last = name.rpartition(".")[2]
        if loaders and last not in catalog.LOOKING:
            looks_like_class = last[:1].isupper()
            if self.epoch is not None and not is_iterated and not looks_like_class:
                self.assume_loop(loaders[0], node, frame, sure=False)
            else:
                return Value("wrapped", last, parts=values, node=node)
        value = unknown(taints=self.taints_of(values))
        self.write((value.uid, "[]"), node, "set", value, "")
        return value

    def call_unknown(
        self,
        callee: Value,
        name: str,
        node: ast.Call,
        frame: Frame,
        *,
        is_iterated: bool = False,
    ) -> Value:
        """Return what a call of something unknown returns."""
        last = name.rpartition(".")[2]
        if last in self.options.non_idempotent:
            self.note("outside", node, data=last)
        sink = OPTIMIZER if callee.kind in ("model", "optimizer") else self.sink
        args, keywords = self.arguments(node, frame, sink)
        values = [*args, *keywords.values()]
        return self._opaque(name, node, values, frame, is_iterated=is_iterated)

    def assume_loop(
        self, loader: Value, node: ast.AST, frame: Frame, *, sure: bool
    ) -> None:
        """Note a loop over a loader inside a function that cannot be seen."""
        found = self.loaders_in(loader)
        if not found:
            return
        loop = DataLoop(node, frame.module, ast.unparse(node)[:60], found[0])
        loop.sure = sure and found[0].sure
        loop.is_elastic = found[0].kind == "loader"
        loop.call, loop.epoch, loop.outer = frame.call, self.epoch, self.loop
        step = self.step(node, frame)
        step.head_of, loop.head = loop, step.number
        self.loops.append(loop)
        self.step(frame.statement, frame)

    def loaders_in(self, value: Value, depth: int = 3) -> list[Value]:
        """Return the loaders that iterating a value iterates."""
        if value.kind in ("loader", "plain_loader"):
            return [value]
        if value.kind not in ("wrapped", "iterator") or depth == 0:
            return []
        return [
            each for part in value.parts for each in self.loaders_in(part, depth - 1)
        ]


_ELASTIC_TAINTS = {
    "rank": frozenset(("rank",)),
    "local_rank": frozenset(("rank",)),
    "replica_rank": frozenset(("rank",)),
    "world_size": frozenset(("world_size",)),
    "num_replicas": frozenset(("world_size",)),
    "generation": frozenset(("generation",)),
    "num_restarts": frozenset(("generation",)),
    "once": frozenset(("once",)),
    "current_epoch": frozenset(("epoch",)),
    "finished_epochs": frozenset(("epoch",)),
}


def is_model(value: Value) -> bool:
    """Return whether a value is a model, of the project or not, or named like one."""
    is_user_model = value.cls is not None and value.cls.role == "model"
    hinted = value.kind == "unknown" and catalog.hint(value.name) == "model"
    return value.kind == "model" or is_user_model or hinted


def _environment(key: Value) -> frozenset[str]:
    if key.kind == "const" and key.data in catalog.RANK_VARIABLES:
        return frozenset(("rank",))
    if key.kind == "const" and key.data in catalog.WORLD_VARIABLES:
        return frozenset(("world_size",))
    return NO_TAINTS
