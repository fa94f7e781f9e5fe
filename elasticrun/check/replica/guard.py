"""Keeping a checked program from the user's own files.

Two nets. What Python opens, and what `torch.save` writes, is refused in words. Beneath,
Linux refuses what libraries in C and other programs would write, where it has Landlock.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import sys
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

import torch

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PATHS = {
    "os.remove": (0,),
    "os.rename": (0, 1),
    "os.rmdir": (0,),
    "os.mkdir": (0,),
    "os.truncate": (0,),
    "os.link": (1,),
    "os.symlink": (1,),
    "shutil.rmtree": (0,),
}
# Memory that processes share, which Python's own `open` has nothing to do with. What is
# below a folder that Landlock allows cannot be taken out of it.
_SHARED_MEMORY = "/dev/shm"
_DEVICES = ("/dev", "/proc")
# What libraries fill by themselves and could fill again, or where they are told to.
_CACHES = (
    *("~/.cache", "~/.config/matplotlib", "~/.triton", "~/.nv", "$XDG_CACHE_HOME"),
    *("$HF_HOME", "$TORCH_HOME", "$TRITON_CACHE_DIR", "$MPLCONFIGDIR"),
    *("$CUDA_CACHE_PATH", "$NUMBA_CACHE_DIR", "$TORCHINDUCTOR_CACHE_DIR"),
)
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


class OutsideOfScratchError(PermissionError):
    """A checked program is about to change what it must not."""


def what_is_not_guarded(guarded: Sequence[str]) -> str:
    """Return what a program could write in spite of the guard; empty if nothing."""
    by_itself = "what Python opens and torch.save writes outside of the copy is refused"
    if not can_restrict():
        return (
            f"{by_itself}; what libraries in C (h5py, sqlite) and other programs "
            "write is not, since this system has no Landlock (Linux 5.19)"
        )
    for folder in guarded:
        if around := [each for each in _writable_anyway() if _is_below(folder, each)]:
            return (
                f"{folder} is in {around[0]}, where libraries must be able to write: "
                f"{by_itself}; what libraries in C (h5py, sqlite) and other programs "
                "write there is not"
            )
    return ""


def guard_files(writable: Sequence[str], guarded: Sequence[str]) -> None:
    """Refuse to change files but those below some folders, from now on.

    Args:
        writable: The folders, besides devices and caches.
        guarded: Folders in which nothing is to change, also if a cache is around them.
    """
    tempfile.tempdir = None  # It is another one now.
    anyway = _writable_anyway()
    # Of a file that several hold, the deepest folder decides.
    rules = dict.fromkeys(anyway, True)
    rules |= dict.fromkeys([_SHARED_MEMORY, *guarded], False)
    rules |= dict.fromkeys(writable, True)

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            if _is_writing(mode, flags):
                _check(path, rules)
        elif event in _PATHS:
            for number in _PATHS[event]:
                _check(arguments[number], rules)

    sys.addaudithook(refuse)
    _tell_of_torchs_files()
    if can_restrict():
        write_only_below([*anyway, *writable])


def _check(path: Any, rules: dict[str, bool]) -> None:
    if not isinstance(path, str | bytes | os.PathLike):
        return
    given = os.fsdecode(path)
    name = os.path.realpath(given)
    around = [folder for folder in rules if _is_below(name, folder)]
    if around and rules[max(around, key=len)]:
        return
    link = "" if os.path.isabs(given) else f" ({given!r} leads there, through a link)"
    raise OutsideOfScratchError(
        f"the program would change {name}{link}, which is outside of the copy that "
        "elasticrun check runs it in, and might be a file that you need. Name files "
        "relative to the working directory or to the script; or allow it to change "
        f"what is there: --writable {os.path.dirname(name)}"
    )


def _writable_anyway() -> list[str]:
    caches = [os.path.expandvars(os.path.expanduser(each)) for each in _CACHES]
    known = [os.path.realpath(each) for each in caches if each[:1] not in ("", "$")]
    return [*_DEVICES, *known]


def _tell_of_torchs_files() -> None:
    """Let `torch.save` say what it opens as Python does; it does so in C++."""
    really_save = torch.save

    @functools.wraps(really_save)
    def save(obj: Any, f: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(f, str | os.PathLike):
            sys.audit("open", f, "wb", 0)
        return really_save(obj, f, *arguments, **options)

    torch.save = torch.serialization.save = save


def _is_writing(mode: Any, flags: Any) -> bool:
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and bool(flags & _WRITING)


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


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
