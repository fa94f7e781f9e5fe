"""Copies the small values of a state, tells what has changed of them, restores them.

For a rescue and the end of a replay a copy knows the objects that it is of. For anchors
it has a *form* that is saved: plain values, and for all else a pair of a class's name
and parts, which have forms themselves. An empty set stands for what is not copied.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import math
import pathlib
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import suppress
from operator import is_
from typing import Any

import numpy as np
import torch

from elasticrun.checkpoint.states.anchor_notes import exact
from elasticrun.checkpoint.states.module_watch import first_of
from elasticrun.checkpoint.states.nested import decode_scalar, encode_scalar
from elasticrun.checkpoint.states.stateful import local_shard
from elasticrun.checkpoint.states.values import SHARDED_KINDS

_MOST_COPIED = 1 << 10  # Elements of a tensor or an array; most that count are small.
_MOST_VALUES = 1 << 14  # In one container, if not all of them are plain,
_MOST_PLAIN = 1 << 16  # or if they are: at once, or in all of a state at a boundary.
# That takes milliseconds. A plain value counts as one there, or as so many more
_FOR_MIXED = 3  # where others are beside it,
_FOR_OTHER = 32  # each of which counts as this, a tensor or a container, too.
_FEW = 64  # Values of a container, so few that looking at all of them takes no time.
_LARGEST_INT = 1 << 2000  # In a form: unpicklers that execute nothing refuse others.
_DEEPEST = 32  # Deeper values may contain themselves.
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
_DICTIONARIES = frozenset({dict, OrderedDict, defaultdict, Counter})
_ROWS = frozenset({list, tuple, deque, set, frozenset})
_CONTAINERS = _DICTIONARIES | _ROWS
_SIZED: tuple[type[Any], ...] = (dict, *_ROWS)
# What else never changes in place, with subclasses: made of its class and arguments,
_MADE = (
    *(bytes, enum.Enum, pathlib.PurePath, range, torch.Size, torch.device),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
)
# or not.
_FIXED = (
    *(*_MADE, np.generic, type, types.FunctionType, types.BuiltinFunctionType),
    *(torch.dtype, datetime.tzinfo),
)
_MISSING: Any = object()
# What the makers of all these raise if they are given something else.
_ERRORS = (
    *(TypeError, ValueError, LookupError, ArithmeticError, RuntimeError),
    *(AttributeError, MemoryError),
)


class Change(enum.IntEnum):
    """What has changed: nothing, what is remembered, or more."""

    NOTHING = 0
    REMEMBERED = 1
    MORE = 2  # It has to be loaded again.


class RememberedValues:
    """Nested values as they were at one moment.

    Numbers, text, and small tensors and arrays are copied, in any of Python's
    containers and in dataclasses. Of large tensors only the storage, torch's count of
    changes in place and, on CPUs, the first elements are remembered, which see every
    change but one of other elements through `tensor.data`. Anything else counts as
    changed; `unknown` tells what that is.

    Args:
        is_short: Whether to copy no more than takes two milliseconds.
    """

    def __init__(self, values: Any, *, is_short: bool = False) -> None:
        walk = _Walk(left=_MOST_PLAIN if is_short else math.inf)
        self._content = _remember(values, 0, walk)
        self._has_unknown = walk.has_unknown

    @classmethod
    def of_form(cls, form: Any) -> RememberedValues:
        """Return what has a form; nothing is known of what is none."""
        made = cls.__new__(cls)
        made._content = _read(form, 0)
        made._has_unknown = True  # Or it may have.
        return made

    def compare(self, values: Any) -> Change:
        """Return what has changed, given the values as they are now."""
        return _compare(self._content, values)

    def put_back(self, values: Any, *, is_free: bool = True) -> Any:
        """Return the values with everything that is remembered as it was.

        Containers, dataclasses and small tensors are changed in place, so that whoever
        has one by another name still has it.

        Args:
            values: As they are now, with what is not remembered.
            is_free: Whether keys, lengths, shapes and kinds may change, too. If not,
                what does not fit stays as it is.
        """
        return _put_back(self._content, values, is_free=is_free)

    def unknown(self) -> Iterator[tuple[str, type[Any] | None]]:
        """Yield paths, such as `a.0.b`, and kinds of values that are not remembered.

        A kind is None where there were too many values up to there.
        """
        return _unknown_in(self._content, ()) if self._has_unknown else iter(())


def form_of(values: Any) -> Any:
    """Return the form of values as they are now."""
    tensors: list[_Tensor] = []
    content = _remember(values, 0, _Walk(tensors))
    _fetch(tensors)
    return _form(content)


def without(form: Any, before: Any, after: Any) -> Any:
    """Return a form with `()`, which puts nothing back, where two others differ."""
    if exact(before) == exact(after):
        return form
    if type(form) is type(before) is type(after) is dict:
        keys = [*form, *(key for key in after if key not in before)]
        forms = (form, before, after)
        return {k: without(*(each.get(k, ()) for each in forms)) for k in keys}
    is_row = type(form) is type(before) is type(after) is tuple
    if not is_row or not len(form) == len(before) == len(after):
        return ()
    made = tuple(map(without, form, before, after))
    # A container's parts, which it would lose.
    return () if len(made) == 2 and made[1] == () != form[1] else made


def is_whole(form: Any) -> bool:
    """Return whether all is copied of what has a form."""
    if type(form) is dict:
        return all(map(is_whole, form.values()))
    return type(form) is not set and (
        type(form) is not tuple or all(map(is_whole, form))
    )


class _Node:
    """A value that may change in place, or that is not known; with its content."""

    def form(self) -> Any:
        raise NotImplementedError

    def compare(self, value: Any) -> Change:
        raise NotImplementedError

    def put_back(self, value: Any, *, is_free: bool) -> Any:
        raise NotImplementedError


class _Unknown(_Node):
    """A value of which nothing tells how it was."""

    def __init__(self, kind: type[Any] | None) -> None:
        self.kind = kind

    def form(self) -> Any:
        return set()

    def compare(self, value: Any) -> Change:
        del value  # Whatever it is.
        return Change.MORE

    def put_back(self, value: Any, *, is_free: bool) -> Any:
        del is_free
        return value


_TOO_MANY = _Unknown(None)


class _Array(_Node):
    """A small NumPy array."""

    def __init__(self, copy: Any, own: Any = _MISSING) -> None:
        self._copy, self._own = copy, own

    def form(self) -> Any:
        copy = self._copy
        if copy.dtype.fields is not None:
            return set()
        return _pair(np.ndarray, (copy.dtype.str, copy.shape, copy.tobytes() or ""))

    def compare(self, value: Any) -> Change:
        is_same = value is self._own and _has(value, self._copy)
        return Change.NOTHING if is_same else Change.REMEMBERED

    def put_back(self, value: Any, *, is_free: bool) -> Any:
        own, copy = self._own, self._copy
        if own is _MISSING:
            own = value
            if type(own) is not np.ndarray or not _is_like(own, copy):
                return copy.copy() if is_free else value
        if own.shape != copy.shape:
            own.resize(copy.shape, refcheck=False)
        own[...] = copy
        return own


class _Tensor(_Node):
    """A tensor; `state_dict` hands on another object of the same storage each time."""

    def __init__(self, copy: torch.Tensor | None, own: Any = _MISSING) -> None:
        self.copy: Any = copy
        self._own = own
        self._place = None if own is _MISSING else _place_of(own)
        self._first = None if copy is not None else _first_of(own)
        self.data = b""  # For the form.

    def form(self) -> Any:
        parts = str(self.copy.dtype), tuple(self.copy.shape), self.data or ""
        return _pair(torch.Tensor, parts)

    def compare(self, value: Any) -> Change:
        is_same = _is_counted(value) and _place_of(value) == self._place
        if self.copy is not None:
            is_same = is_same and _has(value, self.copy)
            return Change.NOTHING if is_same else Change.REMEMBERED
        is_same = is_same and _first_of(value) == self._first
        return Change.NOTHING if is_same else Change.MORE

    def put_back(self, value: Any, *, is_free: bool) -> Any:
        own, copy = self._own, self.copy
        if copy is None:
            return value
        if own is _MISSING:
            own = value
            if _is_sharded(own):
                return value
            if not _is_counted(own) or not _is_like(own, copy):
                there = own.device if isinstance(own, torch.Tensor) else copy.device
                return copy.to(there, copy=True) if is_free else value
        if not _has(own, copy.to(own.device)):  # Else it would count as changed.
            with torch.no_grad():
                if own.shape == copy.shape:
                    own.copy_(copy)
                else:  # It was resized in place.
                    own.data = copy.clone()
        self._place = _place_of(own)
        return own


class _Container(_Node):
    """A dictionary in its order, a list, a tuple, a set, or a dataclass's object.

    Args:
        parts: What is remembered of its parts: a list, or a dictionary by their keys.
            The elements of a set, which do not change.
    """

    def __init__(self, kind: Any, parts: Any, own: Any = _MISSING) -> None:
        self._kind, self._parts, self._own = kind, parts, own

    def form(self) -> Any:
        if len(self._parts) > _MOST_VALUES:  # Which takes long, for nothing.
            return set()
        if type(self._parts) is list:
            forms = [*map(_form, self._parts)]
            if self._kind not in (set, frozenset):
                return _pair(self._kind, forms)
            forms.sort(key=exact)  # They come in any order.
            return _pair(self._kind, forms) if is_whole((*forms,)) else set()
        keys = [*map(_form, self._parts)]
        if not is_whole((*keys,)):
            return set()
        values = map(_form, self._parts.values())
        return _pair(self._kind, dict(zip(keys, values, strict=True)))

    def compare(self, value: Any) -> Change:
        is_alike, parts = type(value) is self._kind, self._parts
        now = _parts_of(value) if is_alike else []
        if self._kind in (set, frozenset):
            is_same = is_alike and value == set(parts)
            return Change.NOTHING if is_same else Change.REMEMBERED
        if type(parts) is list and is_alike and _PLAIN.issuperset(map(type, parts)):
            kinds = map(type, now), map(type, parts)  # It may be long.
            if now == parts and all(map(is_, *kinds)):
                return Change.NOTHING
        now, parts = _by_key(now), _by_key(parts)
        changes = [_compare(v, now.get(key, _MISSING)) for key, v in parts.items()]
        if not is_alike or [*now] != [*parts]:
            changes.append(Change.REMEMBERED)
        return max(changes, default=Change.NOTHING)

    def put_back(self, value: Any, *, is_free: bool) -> Any:
        is_alike, own, parts = type(value) is self._kind, self._own, self._parts
        if own is _MISSING:
            if not is_alike and not (is_free and _can_be_made(self._kind)):
                return value
            own = value if is_alike else _MISSING
        is_free |= self._kind in (set, frozenset)
        is_row = type(parts) is list
        now, parts = _by_key(_parts_of(value) if is_alike else []), _by_key(parts)
        if not is_free:
            if is_row and len(now) != len(parts):
                return value
            parts = {key: parts.get(key, each) for key, each in now.items()}
        before = {
            key: _put_back(each, now.get(key, _MISSING), is_free=is_free)
            for key, each in parts.items()
        }
        before = {key: each for key, each in before.items() if each is not _MISSING}
        if issubclass(self._kind, (tuple, frozenset)):
            return _new_row(self._kind, [*before.values()], own)
        return _fill(self._kind.__new__(self._kind) if own is _MISSING else own, before)


class _Walk:
    """One walk through values.

    Args:
        tensors: Takes the tensors where only a form is wanted.
        left: How much it may still copy.

    Attributes:
        has_unknown: Whether it has met what is not known.
    """

    def __init__(
        self, tensors: list[_Tensor] | None = None, left: float = math.inf
    ) -> None:
        self.tensors, self._left, self.has_unknown = tensors, left, False

    def may_enter(self, num_values: int) -> bool:
        return num_values <= _MOST_PLAIN and self.may_copy(num_values)

    def may_copy(self, num: int) -> bool:
        self._left -= num
        return self._left >= 0

    def note_unknown(self, kind: type[Any] | None) -> _Unknown:
        self.has_unknown = True
        return _TOO_MANY if kind is None else _Unknown(kind)


def _remember(value: Any, depth: int, walk: _Walk) -> Any:
    """Return a value that never changes in place as it is, else a node."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    # Before its values are looked at: there may be millions.
    if isinstance(value, _SIZED) and not walk.may_enter(len(value)):
        return walk.note_unknown(None)
    if kind is dict and len(value) <= _FEW:
        found = _remember_flat(value, walk)
        if found is not None:
            return found
    if depth < _DEEPEST and _is_container(kind):
        found = _remember_container(value, depth, walk)
        if found is not None:
            return found
    if _is_counted(value):
        return _remember_tensor(value, walk)
    if kind is np.ndarray and value.size <= _MOST_COPIED and not value.dtype.hasobject:
        return _Array(value.copy(), value)
    return value if _is_fixed(value) else walk.note_unknown(kind)


def _remember_flat(value: dict[Any, Any], walk: _Walk) -> _Node | None:
    """Remember plain values and short lists of them; None if there is anything else.

    So are most states, and each boundary comes through here.
    """
    parts, num_copied = value.copy(), 0
    for key, each in value.items():
        if type(each) in _PLAIN:
            continue
        if type(each) is not list or len(each) > _FEW:
            return None
        if not _PLAIN.issuperset(map(type, each)):
            return None
        parts[key] = _Container(list, each.copy(), each)
        num_copied += _FOR_OTHER + len(each)
    if not walk.may_copy(num_copied):
        return walk.note_unknown(None)
    return _Container(dict, parts, value)


def _remember_container(value: Any, depth: int, walk: _Walk) -> _Node | None:
    kind, parts = type(value), _parts_of(value)
    kinds = [*map(type, parts.values() if isinstance(parts, dict) else parts)]
    if _are_fixed({*kinds}):
        return _Container(kind, parts.copy(), value)
    num_others = len(kinds) - sum(map(_PLAIN.__contains__, kinds))
    if not walk.may_copy(_FOR_MIXED * len(kinds) + _FOR_OTHER * num_others):
        return walk.note_unknown(None)
    if kind in (set, frozenset):
        return _Container(kind, parts, value) if all(map(_is_fixed, parts)) else None
    if len(kinds) > _MOST_VALUES:
        return None
    return _Container(kind, _remember_all(parts, depth + 1, walk), value)


def _are_fixed(kinds: set[type[Any]]) -> bool:
    others = kinds - _PLAIN
    return others.isdisjoint(_CONTAINERS) and all(
        issubclass(kind, _FIXED) and not issubclass(kind, np.void) for kind in others
    )


def _remember_tensor(value: torch.Tensor, walk: _Walk) -> _Node:
    is_small = not _is_sharded(value) and value.numel() <= _MOST_COPIED
    is_lazy = value.is_conj() or value.is_neg()  # Its bytes are not its values.
    if not is_small and (is_lazy or walk.tensors is not None):
        return walk.note_unknown(type(value))
    if walk.tensors is None:
        return _Tensor(value.detach().clone() if is_small else None, value)
    walk.tensors.append(_Tensor(value.detach()))
    return walk.tensors[-1]


def _remember_all(parts: Any, depth: int, walk: _Walk) -> Any:
    if type(parts) is list:
        return [_remember(each, depth, walk) for each in parts]
    return {
        key: each if type(each) in _PLAIN else _remember(each, depth, walk)
        for key, each in parts.items()
    }


def _is_fixed(value: Any) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_fixed, value))
    is_record = isinstance(value, np.void)
    return type(value) in _PLAIN or (isinstance(value, _FIXED) and not is_record)


def _compare(before: Any, now: Any) -> Change:
    if isinstance(before, _Node):
        return before.compare(now)
    if type(now) is type(before) and (
        now is before or now == before or (now != now and before != before)
    ):
        return Change.NOTHING
    return Change.REMEMBERED


def _put_back(before: Any, now: Any, *, is_free: bool) -> Any:
    if isinstance(before, _Node):
        return before.put_back(now, is_free=is_free)
    kinds = {type(before), type(now)}
    return before if is_free or len(kinds) == 1 or kinds <= {int, float} else now


def _unknown_in(
    content: Any, path: tuple[str, ...]
) -> Iterator[tuple[str, type[Any] | None]]:
    if isinstance(content, _Unknown):
        yield ".".join(path), content.kind
    elif isinstance(content, _Container):
        for key, part in _by_key(content._parts).items():
            yield from _unknown_in(part, (*path, str(key)))


# Containers, and objects of dataclasses, as their parts.


def _is_container(kind: type[Any]) -> bool:
    is_known = kind in _CONTAINERS or dataclasses.is_dataclass(kind)
    return is_known or (issubclass(kind, tuple) and hasattr(kind, "_make"))


def _parts_of(own: Any) -> Any:
    """Return a container's parts: a list, or a dictionary by their keys."""
    if isinstance(own, dict):
        return own
    if type(own) in _ROWS or not dataclasses.is_dataclass(own):
        return [*own]
    names = [each.name for each in dataclasses.fields(own)]
    fields = {name: getattr(own, name) for name in names if hasattr(own, name)}
    return fields | getattr(own, "__dict__", {})  # With other attributes of it.


def _by_key(parts: Any) -> Any:
    return dict(enumerate(parts)) if type(parts) is list else parts


def _can_be_made(kind: type[Any]) -> bool:
    """Return whether a container can be made of its parts alone."""
    if dataclasses.is_dataclass(kind):
        return kind.__new__ is object.__new__
    return kind not in (deque, defaultdict)  # Which have a length, and a default.


def _new_row(kind: Any, row: list[Any], own: Any) -> Any:
    """Return a tuple or a frozen set of these values: its own, if it has them."""
    if own is not _MISSING and len(row) == len(own) and all(map(is_, row, own)):
        return own
    if not hasattr(kind, "_make"):
        return kind(row)
    return kind._make(row) if len(row) == len(kind._fields) else own


def _fill(own: Any, parts: dict[Any, Any]) -> Any:
    """Let a container have these parts, and return it."""
    if isinstance(own, dict):
        if [*own] != [*parts]:
            own.clear()
        for key, each in parts.items():  # `Counter.update` would add.
            own[key] = each
    elif isinstance(own, (list, deque, set)):
        own.clear()
        own.update(parts.values()) if isinstance(own, set) else own.extend(
            parts.values()
        )
    else:
        for key in dict.fromkeys([*parts, *_parts_of(own)]):
            with suppress(AttributeError):  # As where slots have lost one since.
                if key in parts:
                    object.__setattr__(own, key, parts[key])  # It may be frozen.
                else:
                    object.__delattr__(own, key)
    return own


# Forms.


def _fetch(tensors: list[_Tensor]) -> None:
    """Read tensors, those of a kind together, since each read waits for a GPU."""
    by_kind = defaultdict(list)
    for tensor in tensors:
        by_kind[tensor.copy.device, tensor.copy.dtype].append(tensor)
    for alike in by_kind.values():
        together = torch.cat([tensor.copy.reshape(-1) for tensor in alike]).cpu()
        data, end = together.view(torch.uint8).numpy().tobytes(), 0
        for tensor in alike:
            begin, end = end, end + tensor.copy.nbytes
            tensor.data = data[begin:end]


def _form(content: Any) -> Any:
    kind = type(content)
    if kind in (tuple, frozenset):  # Of a set's elements, or a key.
        content = _remember(content, 0, _Walk())
    if isinstance(content, _Node):
        return content.form()
    if kind is int and not -_LARGEST_INT < content < _LARGEST_INT:
        return set()
    if kind is bytes and not content:  # Of which torch's unpickler has no notion.
        return _pair(bytes, ())
    if kind in _PLAIN or isinstance(content, np.generic):
        return encode_scalar(content)
    made = content.__reduce_ex__(2) if isinstance(content, _MADE) else ()
    if type(made) is not tuple or len(made) != 2 or made[0] is not kind:
        return set()
    form = _pair(kind, [form_of(each) for each in made[1]])
    return form if is_whole(form) else set()


def _pair(kind: Any, forms: Any) -> Any:
    """Return the form of what has parts of these forms."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    if len(forms) > _MOST_VALUES or _find(name) is not kind:
        return set()
    return name, forms if type(forms) is dict else tuple(forms)


def _find(name: str) -> Any:
    """Return the class of a name in a module that is imported; nothing is executed."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found


def _read(form: Any, depth: int) -> Any:
    """Return what has a form; of what is none, that it is not known."""
    is_pair = type(form) is tuple and len(form) == 2 and type(form[0]) is str
    # As of an Enum that has lost a member since; or somebody has changed the file.
    with suppress(*_ERRORS):
        if type(form) in _PLAIN or isinstance(form, np.generic):
            return decode_scalar(form)
        if is_pair and depth < 2 * _DEEPEST:
            return _made_of(_find(form[0]), form[1], depth + 1)
    return _Unknown(type(form))


def _made_of(kind: Any, forms: Any, depth: int) -> Any:
    """Return what is of a class, and has parts of these forms."""
    if kind in (np.ndarray, torch.Tensor):
        return _of_bytes(kind, *forms)
    if type(forms) is dict:
        keys = [_value(_read(key, depth)) for key in forms]
        parts = [_read(each, depth) for each in forms.values()]
        if kind in _DICTIONARIES or dataclasses.is_dataclass(kind):
            return _Container(kind, dict(zip(keys, parts, strict=True)))
        raise TypeError
    row = [_read(each, depth) for each in forms]
    if issubclass(kind, _MADE):
        return kind(*map(_value, row))
    if not _is_container(kind) or kind in _DICTIONARIES:
        raise TypeError
    is_set = kind in (set, frozenset)
    return _Container(kind, [*frozenset(map(_value, row))] if is_set else row)


def _of_bytes(kind: Any, dtype: str, shape: tuple[int, ...], data: Any) -> _Node:
    data = bytearray(data or b"")
    if kind is np.ndarray:
        return _Array(np.frombuffer(data, np.dtype(dtype)).reshape(shape))
    known = getattr(torch, dtype.removeprefix("torch."))
    flat = torch.frombuffer(data, dtype=known) if data else torch.empty(0)
    return _Tensor(flat.to(known).reshape(shape))


def _value(content: Any) -> Any:
    value = _put_back(content, _MISSING, is_free=True)
    if value is _MISSING:
        raise ValueError
    return value


# Tensors and arrays.


def _is_like(one: Any, other: Any) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def _has(value: Any, copy: Any) -> bool:
    """Return whether a tensor or an array has the values of a copy, bit for bit."""
    if not _is_like(value, copy):
        return False
    if isinstance(copy, np.ndarray):
        return bool(value.tobytes() == copy.tobytes())
    return torch.equal(value, copy)


def _is_counted(value: Any) -> bool:
    """Return whether it is a tensor of which torch counts the changes in place."""
    is_known = type(value) in (torch.Tensor, torch.nn.Parameter) or _is_sharded(value)
    return (
        is_known
        and value.layout == torch.strided
        and not (value.is_meta or value.is_inference())
    )


def _is_sharded(value: Any) -> bool:
    return type(value).__name__ in SHARDED_KINDS


def _first_of(tensor: torch.Tensor) -> bytes | None:
    """Return the first elements; None on a GPU, which it would wait for."""
    local = local_shard(tensor.detach())
    return bytes(first_of(local).numpy()) if local.device.type == "cpu" else None


def _place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that changes when the tensor, or a value in it, does."""
    local = local_shard(tensor.detach())
    return tensor._version, local.data_ptr(), local.shape, local.dtype
