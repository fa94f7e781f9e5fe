"""Methods of objects that are known: what they change, write, draw or send."""

from __future__ import annotations

import ast
from collections.abc import Callable

from elasticrun.lint import catalog, roles
from elasticrun.lint.graph import LOG, SAVE, TRACK, Sink, flow_to
from elasticrun.lint.naming import written
from elasticrun.lint.values import Value, constant, unknown
from elasticrun.lint.walk.called import Site
from elasticrun.lint.walk.containers import CHANGING, Containers
from elasticrun.lint.walk.core import Frame
from elasticrun.lint.walk.objects import is_model

_TENSOR_DRAWS = frozenset(
    [
        "uniform_",
        "normal_",
        "random_",
        "bernoulli_",
        "exponential_",
        "cauchy_",
        "geometric_",
        "log_normal_",
    ]
)
_FILE_WRITES = frozenset(
    ("write", "writelines", "writerow", "writerows", "writeheader")
)
_PATH_CHANGES = frozenset(("rename", "replace", "unlink", "rmdir", "mkdir"))
_ONLY_OF_PATHS = frozenset(("mkdir", "rmdir", "unlink"))  # a text has the others too
_SENDING = frozenset(("post", "put", "patch", "sendmail", "send_message", "publish"))
_SENDERS = ("client", "session", "requests", "producer", "smtp", "server", "bot",
            "webhook", "slack", "notifier", "api", "sqs", "sns")  # fmt: skip


class Methods(Containers):
    """Knows the methods of objects."""

    def call_method(
        self, receiver: Value, name: str, node: ast.Call, frame: Frame
    ) -> Value:
        """Return what a method returns, noting its effects."""
        kind = self.kind_of(receiver)
        handler: Callable[[Value, str, ast.Call, Frame], Value | None] | None = getattr(
            self, f"_{kind}_method", None
        )
        if handler is not None:
            value = handler(receiver, name, node, frame)
            if value is not None:
                return value
        return self._any_method(receiver, name, node, frame)

    def kind_of(self, value: Value) -> str:
        """Return what a value is, or what its name suggests where nothing is known."""
        if value.kind == "instance" and value.cls is not None and value.cls.role:
            return value.cls.role
        if value.kind != "unknown":
            return value.kind
        return roles.hint(value.name) if value.name else "unknown"

    # Files, trackers, generators.

    def _file_method(
        self, receiver: Value, name: str, node: ast.Call, frame: Frame
    ) -> Value | None:
        if name not in _FILE_WRITES:
            return None
        self.arguments(node, frame, SAVE)
        self.note("file_written", node, receiver, name)
        return constant(None)

    def _tracker_method(
        self, receiver: Value, name: str, node: ast.Call, frame: Frame
    ) -> Value | None:
        self.arguments(node, frame, TRACK)
        if name in catalog.TRACKER_METHODS or name in catalog.LOG_METHODS:
            self.note("logged", node, receiver, name)
        return receiver if name in ("__enter__",) else unknown()

    def _rng_method(
        self, receiver: Value, name: str, node: ast.Call, frame: Frame
    ) -> Value | None:
        args, _ = self.arguments(node, frame)
        if name in ("manual_seed", "seed"):
            self.note("seeded", node, receiver, (name, args))
            receiver.parts = args
            return receiver
        if name in catalog.RNG_METHODS:
            self.note("draw", node, receiver, (name, False, bool(receiver.parts)))
            if receiver.parts and self.epoch is None:
                return unknown(taints=self.taints_of(receiver.parts))
            return unknown(taints=frozenset(("random",)))
        return None

    def _accumulator_method(
        self, receiver: Value, name: str, node: ast.Call, frame: Frame
    ) -> Value | None:
        self.arguments(node, frame)
        if name == "synchronized":
            self.note("collective", node, data="synchronized")
            return receiver
        return unknown()

    def _loader_method(
        self, receiver: Value, name: str, node: ast.Call, frame: Frame
    ) -> Value | None:
        self.arguments(node, frame)
        if name == "enumerate":
            return Value("wrapped", "true_enumerate", parts=[receiver], node=node)
        if name == "__iter__":
            return self.iterator("iter", node, receiver)
        return unknown()

    # Anything.

    def _any_method(
        self, receiver: Value, name: str, node: ast.Call, frame: Frame
    ) -> Value:
        if is_model(receiver) and name not in ("step", "update", "fit"):
            found = self._model_method(receiver, name, node, frame)
            if found is not None:
                return found
        if name == "load_state_dict":
            return self._loaded(receiver, node, frame)
        if name in ("parameters", "named_parameters") and not node.args:
            part = Value("param", name, sure=False)
            part.owner = receiver
            return part
        if name == "open" and receiver.kind in ("unknown", "ext"):
            args, keywords = self.arguments(node, frame)
            return self.open_file(node, args, keywords, receiver)
        self._note_any(receiver, name, node)
        sink = _sink_of(receiver, name, self.sink)
        if sink is not None:
            self.arguments(node, frame, sink)
            if name in catalog.GROWING and receiver.kind == "unknown":
                self.write_content(receiver, node, "grow", self._text(node))
                self.note("container_grows", node, receiver, name)
            return unknown(taints=receiver.taints)
        result = self.call_unknown(receiver, name, Site(node, frame))
        if result.kind == "wrapped":
            return result
        return unknown(taints=_taints_of_path(name, receiver.taints | result.taints))

    def _note_any(self, receiver: Value, name: str, node: ast.Call) -> None:
        if name in catalog.LOG_METHODS:
            self.note("logged", node, receiver, name)
        elif name in catalog.SAVE_METHODS or name in _FILE_WRITES:
            self._note_written(receiver, name, node)
        elif name == "backward":
            self.note("backward", node)
        elif name in _PATH_CHANGES and _looks_like_path(node):
            self._note_moved(None, name, node)
        elif name in _PATH_CHANGES and _may_be_path(receiver, name, node):
            is_path = "path" in receiver.taints
            self._note_moved(None if is_path else receiver, name, node)
        elif name in _TENSOR_DRAWS:
            if not any(each.arg == "generator" for each in node.keywords):
                self.note("draw", node, data=(name, False, self.is_seeded("torch")))
        else:
            self._note_sent(name, node)

    def _note_moved(self, doubted: Value | None, name: str, node: ast.Call) -> None:
        keywords = {each.arg for each in node.keywords if each.arg}
        data = (f"Path.{name}", keywords, self.catching)
        self.note("file_moved", node, doubted, data)

    def _note_written(self, receiver: Value, name: str, node: ast.Call) -> None:
        if name == "to_csv" and _appends(node):
            self.note("appended", node)
        elif name in catalog.SAVE_METHODS:
            self.note("saved", node, data=(name, [receiver]))
            if name in ("write_text", "write_bytes"):
                file = Value("file", receiver.name, node=node, data="w")
                assert isinstance(node.func, ast.Attribute)
                path = written(node.func.value)
                self.note("file_opened", node, file, (receiver, path, "w"))
        elif receiver.kind == "unknown":
            self.note("file_written", node, receiver, name)

    def _note_sent(self, name: str, node: ast.Call) -> None:
        text = written(node.func).lower()
        if name in _SENDING and any(each in text for each in _SENDERS):
            self.note("outside", node, data=name)
        elif name in ("execute", "executemany") and _is_insert(node):
            self.note("outside", node, data="SQL")


def _sink_of(receiver: Value, name: str, sink: Sink) -> Sink | None:
    """Return where the arguments of a method go that keeps them, or shows them."""
    if name in catalog.LOG_METHODS:
        return TRACK if name in catalog.TRACKER_METHODS else LOG
    if name in catalog.SAVE_METHODS:
        return SAVE
    if name not in CHANGING:
        return None
    return flow_to((receiver.uid, "[]")) if receiver.kind == "unknown" else sink


def _looks_like_path(node: ast.Call) -> bool:
    text = written(node.func).lower()
    owner = text.rpartition(".")[0]
    words = ("path", "file", "dir", "folder", "ckpt", "checkpoint", "lock", "marker")
    is_path = any(word in owner for word in words)
    return is_path and not (text.endswith("replace") and len(node.args) != 1)


def _taints_of_path(name: str, taints: frozenset[str]) -> frozenset[str]:
    """Return what a method's result depends on, if it may be one of a path."""
    if name in ("exists", "is_file", "is_dir"):
        return taints | {"exists"}
    return taints - {"path"} if name in ("read_text", "read_bytes") else taints


def _may_be_path(receiver: Value, name: str, node: ast.Call) -> bool:
    if receiver.kind != "unknown":
        return False
    if name in _ONLY_OF_PATHS:
        return True
    return "path" in receiver.taints and len(node.args) == 1 and not node.keywords


def _appends(node: ast.Call) -> bool:
    return any(
        each.arg == "mode"
        and isinstance(each.value, ast.Constant)
        and str(each.value.value).startswith("a")
        for each in node.keywords
    )


def _is_insert(node: ast.Call) -> bool:
    if not node.args:
        return False
    text = written(node.args[0]).lstrip("fbr'\"( \\n").upper()
    return text.startswith(("INSERT", "UPDATE", "DELETE"))
