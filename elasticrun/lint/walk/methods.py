"""Methods of objects that are known: what they change, write, draw or send."""

from __future__ import annotations

import ast
from collections.abc import Callable

from elasticrun.lint import catalog
from elasticrun.lint.graph import Sink
from elasticrun.lint.values import Value, constant, unknown
from elasticrun.lint.walk.calls import LOG, OPTIMIZER, SAVE, TRACK
from elasticrun.lint.walk.core import VALUE, Frame
from elasticrun.lint.walk.expressions import flow_to
from elasticrun.lint.walk.externals import Externals, is_model

GROWING = frozenset(("append", "extend", "insert", "appendleft", "extendleft"))
CHANGING = GROWING | frozenset(("add", "update", "setdefault", "pop", "popleft"))
EMPTYING = frozenset(("clear",))
_CHAINING = frozenset(
    [
        "to",
        "cuda",
        "cpu",
        "half",
        "float",
        "double",
        "bfloat16",
        "train",
        "eval",
        "requires_grad_",
        "detach",
        "contiguous",
        "share_memory",
        "compile",
        "type",
        "channels_last",
        "apply",
    ]
)
_PARAMETERS = frozenset(
    [
        "parameters",
        "named_parameters",
        "buffers",
        "named_buffers",
        "state_dict",
        "values",
        "items",
        "children",
        "modules",
        "named_modules",
        "keys",
    ]
)
_HARMLESS_IN_PLACE = frozenset(
    [
        "requires_grad_",
        "copy_",
        "detach_",
        "zero_grad",
        "retain_grad",
        "share_memory_",
        "register_",
    ]
)
_EMA_UPDATES = frozenset(("update", "update_parameters", "step", "update_average"))
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
_SENDING = frozenset(("post", "put", "patch", "sendmail", "send_message", "publish"))
_SENDERS = ("client", "session", "requests", "producer", "smtp", "server", "bot",
            "webhook", "slack", "notifier", "api", "sqs", "sns")  # fmt: skip


class Methods(Externals):
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
        return catalog.hint(value.name) if value.name else "unknown"

    # What is trained, and what trains it.

    def _scheduler_method(
        self, receiver: Value, name: str, node: ast.Call, frame: Frame
    ) -> Value | None:
        if name == "load_state_dict":
            return self._loaded(receiver, node, frame)
        if name not in ("step", "step_update"):
            return None
        args, keywords = self.arguments(node, frame, OPTIMIZER)
        values = [*args, *keywords.values()]
        self.note(
            "scheduler_step", node, receiver, (self.taints_of(values), len(values))
        )
        return constant(None)

    def _optimizer_method(
        self, receiver: Value, name: str, node: ast.Call, frame: Frame
    ) -> Value | None:
        if name == "load_state_dict":
            return self._loaded(receiver, node, frame)
        if name != "step":
            return None
        self.arguments(node, frame, OPTIMIZER)
        self.note("optimizer_step", node, receiver)
        return constant(None)

    def _scaler_method(
        self, receiver: Value, name: str, node: ast.Call, frame: Frame
    ) -> Value | None:
        if name == "load_state_dict":
            return self._loaded(receiver, node, frame)
        args, _ = self.arguments(node, frame, VALUE)
        if name == "step":
            self.note("optimizer_step", node, args[0] if args else receiver)
        elif name == "update":
            self.note("scaler_update", node, receiver)
        elif name == "scale" and args:
            return args[0]
        return constant(None)

    def _ema_method(
        self, receiver: Value, name: str, node: ast.Call, frame: Frame
    ) -> Value | None:
        if name == "load_state_dict":
            return self._loaded(receiver, node, frame)
        if name in _EMA_UPDATES:
            self.arguments(node, frame, OPTIMIZER)
            self.note("ema_update", node, receiver)
            return constant(None)
        return self._model_method(receiver, name, node, frame)

    def _loaded(self, receiver: Value, node: ast.Call, frame: Frame) -> Value:
        self.arguments(node, frame, OPTIMIZER)
        for each in (receiver, *receiver.parts, *receiver.also):
            each.loaded_by_hand = True
        self.note("loaded", node, receiver)
        return constant(None)

    def _model_method(
        self, receiver: Value, name: str, node: ast.Call, frame: Frame
    ) -> Value | None:
        if name == "load_state_dict":
            return self._loaded(receiver, node, frame)
        if name in ("apply", "reset_parameters", "init_weights"):
            args, _ = self.arguments(node, frame)
            self.note("weights", node, receiver, name)
            return receiver
        if name in _CHAINING:
            self.arguments(node, frame)
            return receiver
        if name in _PARAMETERS:
            part = Value("param", name, sure=receiver.sure)
            part.owner = receiver
            return part
        return None

    def _param_method(
        self, receiver: Value, name: str, node: ast.Call, frame: Frame
    ) -> Value | None:
        if name in ("apply", "reset_parameters"):
            return self._model_method(receiver.owner or receiver, name, node, frame)
        self.arguments(node, frame, OPTIMIZER)
        is_in_place = name.endswith("_") and not name.startswith("_")
        if is_in_place and name not in _HARMLESS_IN_PLACE:
            self.note("weights", node, receiver.owner or receiver, name)
        return receiver

    # Containers.

    def _list_method(
        self, receiver: Value, name: str, node: ast.Call, frame: Frame
    ) -> Value | None:
        if name in EMPTYING:
            self.write((receiver.uid, "[]"), node, "set", None, self._text(node))
            return constant(None)
        if name not in CHANGING:
            return self._read_container(receiver, name, node, frame)
        args, _ = self.arguments(node, frame, flow_to((receiver.uid, "[]")))
        how = "grow" if name in GROWING or receiver.kind == "set" else "weak"
        self.write_content(receiver, node, how, self._text(node))
        if name in GROWING:
            self.note("container_grows", node, receiver, name)
            if self.loop is None and self.epoch is None and name == "append":
                receiver.parts += args
            receiver.is_complete &= self.epoch is None and self.loop is None
        return unknown(taints=receiver.taints)

    _dict_method = _set_method = _list_method

    def write_content(self, value: Value, node: ast.AST, how: str, text: str) -> None:
        """Note a change of what a container holds, and so of what holds it."""
        self.write((value.uid, "[]"), node, how, value, text)
        owner, depth = value.owner, 0
        while owner is not None and depth < 4:
            self.bases[owner.uid] = owner
            value.registered |= owner.is_durable
            self.write((owner.uid, "[]"), node, how, owner, text)
            owner, depth = owner.owner, depth + 1

    def _text(self, node: ast.Call) -> str:
        assert isinstance(node.func, ast.Attribute)
        return ast.unparse(node.func.value)

    def _read_container(
        self, receiver: Value, name: str, node: ast.Call, frame: Frame
    ) -> Value | None:
        if receiver.kind != "dict" or name not in ("items", "values", "keys", "get"):
            return None
        args, _ = self.arguments(node, frame)
        if name == "get":
            return self.item(receiver, args[0], node) if args else None
        made = Value("list", taints=receiver.taints)
        made.is_complete = receiver.is_complete and bool(receiver.attrs)
        pairs = [(constant(k), v) for k, v in receiver.attrs.items()]
        if name == "items":
            made.parts = [Value("tuple", parts=pair) for pair in pairs]
        else:
            made.parts = [pair[name == "values"] for pair in pairs]
        return made

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

    # Loaders.

    def _loader_method(
        self, receiver: Value, name: str, node: ast.Call, frame: Frame
    ) -> Value | None:
        self.arguments(node, frame)
        if name == "enumerate":
            return Value("wrapped", "true_enumerate", parts=[receiver], node=node)
        if name == "__iter__":
            return self._iterator("iter", node, receiver)
        return unknown()

    # Anything.

    def _any_method(
        self, receiver: Value, name: str, node: ast.Call, frame: Frame
    ) -> Value:
        if is_model(receiver) and name not in ("step", "update", "fit"):
            found = self._model_method(receiver, name, node, frame)
            if found is not None:
                return found
        sink = self.sink
        is_log = name in catalog.LOG_METHODS
        is_save = name in catalog.SAVE_METHODS
        if is_log:
            sink = TRACK if name in catalog.TRACKER_METHODS else LOG
        elif is_save:
            sink = SAVE
        elif name in CHANGING and receiver.kind == "unknown":
            sink = Sink("flow", ((receiver.uid, "[]"),))
        if name == "open" and receiver.kind in ("unknown", "ext"):
            args, keywords = self.arguments(node, frame)
            assert isinstance(node.func, ast.Attribute)
            return self.open_file(node, args, keywords, ast.unparse(node.func.value))
        self._note_any(receiver, name, node)
        if is_log or is_save or name in CHANGING:
            args, keywords = self.arguments(node, frame, sink)
            if name in GROWING and receiver.kind == "unknown":
                self.write_content(receiver, node, "grow", self._text(node))
                self.note("container_grows", node, receiver, name)
            return unknown(taints=receiver.taints)
        result = self.call_unknown(receiver, name, node, frame)
        taints = receiver.taints | result.taints
        if name in ("exists", "is_file", "is_dir"):
            taints |= {"exists"}
        if result.kind == "wrapped":
            return result
        return unknown(taints=taints)

    def _note_any(self, receiver: Value, name: str, node: ast.Call) -> None:
        text = ast.unparse(node.func).lower()
        if name in catalog.LOG_METHODS:
            self.note("logged", node, receiver, name)
        elif name == "to_csv" and _appends(node):
            self.note("appended", node)
        elif name in catalog.SAVE_METHODS:
            self.note("saved", node, data=(name, [receiver]))
        elif name in _PATH_CHANGES and _looks_like_path(text, node):
            keywords = {each.arg: each.value for each in node.keywords if each.arg}
            data = (f"Path.{name}", set(keywords), self.catching)
            self.note("file_moved", node, data=data)
        elif name in _TENSOR_DRAWS:
            if not any(each.arg == "generator" for each in node.keywords):
                self.note("draw", node, data=(name, False, self._is_seeded("torch")))
        elif name in _SENDING and any(each in text for each in _SENDERS):
            self.note("outside", node, data=name)
        elif name in ("execute", "executemany") and _is_insert(node):
            self.note("outside", node, data="SQL")
        elif name in _FILE_WRITES and receiver.kind == "unknown":
            self.note("file_written", node, receiver, name)


def _looks_like_path(text: str, node: ast.Call) -> bool:
    owner = text.rpartition(".")[0]
    words = ("path", "file", "dir", "folder", "ckpt", "checkpoint", "lock", "marker")
    is_path = any(word in owner for word in words)
    return is_path and not (text.endswith("replace") and len(node.args) != 1)


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
    text = ast.unparse(node.args[0]).lstrip("fbr'\"( \\n").upper()
    return text.startswith(("INSERT", "UPDATE", "DELETE"))
