"""Tells whether `break` or an exception has left the `for` around a generator.

In both cases Python closes the generator with GeneratorExit when the loop drops its
iterator. What differs is the current instruction of the loop's frame: after `break` or
`return` the one that pops the iterator, after an exception the one that raised it. This
holds in CPython only, which also closes the generator at once. Any other end (a call of
`close()`) counts as an exception: the loop stays unfinished until another one begins.
"""

from __future__ import annotations

import dis
import inspect
import os
from types import FrameType


def _codes(names: str) -> frozenset[int]:
    """Return the instructions of these names that this version of Python has."""
    return frozenset(dis.opmap[name] for name in names.split() if name in dis.opmap)


_POPPING = _codes("POP_TOP POP_ITER END_FOR POP_BLOCK")
_DROPPING = _codes(
    "DELETE_FAST DELETE_NAME DELETE_GLOBAL STORE_FAST STORE_NAME STORE_GLOBAL "
    "RETURN_VALUE RETURN_CONST"
)
_ITERATING = _codes("FOR_ITER SEND YIELD_FROM")
_CACHE = dis.opmap.get("CACHE")


def is_left_by_break(frame: FrameType | None) -> bool:
    """Return whether the `for` that closes its iterator from `frame` was left freely.

    Wrapping generators (tqdm, a logging generator) are closed where they stand, at
    their `yield` or in a `finally` around it; the frame that closes them decides.

    Args:
        frame: The frame below the generator that receives GeneratorExit; None when the
            interpreter ends and closes what a variable of a module still holds.
    """
    if frame is None:
        return False
    while frame is not None:
        opcode = _opcode_at(frame)
        if opcode in _POPPING or opcode in _DROPPING:
            return True
        if not frame.f_code.co_flags & inspect.CO_GENERATOR:
            return False
        frame = frame.f_back
    return True


def is_called_by_for_loop(frame: FrameType) -> bool:
    """Return whether a generator is asked by a `for` (or `yield from`), not `next`."""
    return _opcode_at(frame) in _ITERATING


def _opcode_at(frame: FrameType) -> int:
    """Return the instruction at which a frame stands; -1 before its first.

    CPython 3.12 stands behind the caches of a FOR_ITER or SEND that it has specialized
    for generators, which happens when such a loop begins for the second time.
    """
    code, at = frame.f_code.co_code, frame.f_lasti
    while at >= 0 and code[at] == _CACHE:
        at -= 2
    return code[at] if at >= 0 else -1


def line_of(frame: FrameType) -> str:
    """Return where a program stands, as "file.py:line"."""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
