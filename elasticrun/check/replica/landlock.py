"""Landlock: Linux lets a process give up writing outside of some folders, for good.

Unlike anything in Python it holds for libraries in C and for other programs, too. There
is no way back, and what the process starts is bound by it as well.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # The same on each machine.
_VERSION = 1  # In place of flags: asks for it.
_BENEATH = 1  # The kind of a rule.
_NO_NEW_PRIVILEGES = 38
# With the first version nothing can be moved from one folder to another.
_LEAST_VERSION = 2
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_OF_FILES = _WRITE_FILE | _TRUNCATE
# Removing and making of all kinds, and moving; all that is not reading or executing.
_OF_FOLDERS = sum(1 << bit for bit in range(4, 14))


def can_restrict() -> bool:
    """Return whether this system has it."""
    try:
        return _call(_CREATE_RULESET, None, 0, _VERSION) >= _LEAST_VERSION
    except (OSError, AttributeError):  # No such call, or forbidden; no Linux.
        return False


def write_only_below(paths: Iterable[str]) -> None:
    """Let this thread, and what it starts, write below these paths alone."""
    of_files = _OF_FILES
    if _call(_CREATE_RULESET, None, 0, _VERSION) < 3:
        of_files = _WRITE_FILE
    rights = struct.pack("=Q", of_files | _OF_FOLDERS)
    ruleset = _call(_CREATE_RULESET, rights, len(rights), 0)
    try:
        for path in paths:
            if not os.path.exists(path):
                continue
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                allowed = of_files | (_OF_FOLDERS if os.path.isdir(path) else 0)
                rule = struct.pack("=Qi", allowed, folder)
                _call(_ADD_RULE, ruleset, _BENEATH, rule, 0)
            finally:
                os.close(folder)
        libc = ctypes.CDLL(None)
        libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)  # Else only root may restrict.
        _call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _call(number: int, *arguments: int | bytes | None) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    words = (
        ctypes.c_long(each) if isinstance(each, int) else each for each in arguments
    )
    result: int = libc.syscall(ctypes.c_long(number), *words)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
