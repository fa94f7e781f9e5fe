"""Keeping a checked program from the user's own files."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

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


class OutsideOfScratchError(PermissionError):
    """A checked program is about to change what it must not."""


def guard_folders(folders: Sequence[str], *, scratch: str) -> None:
    """Refuse to open files for writing below these folders, from now on.

    What Python itself opens is seen; what a library opens by itself is not.
    """

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            if _is_writing(mode, flags):
                _check(path)
        elif event in _PATHS:
            for number in _PATHS[event]:
                _check(arguments[number])

    def _check(path: Any) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return
        name = os.path.realpath(os.fsdecode(path))
        if _is_below(name, scratch) or "__pycache__" in name:
            return
        if any(_is_below(name, folder) for folder in folders):
            raise OutsideOfScratchError(
                f"the program would change {name}, which is outside of the copy that "
                "elasticrun check runs it in, and might be a file that you need. Name "
                "files relative to the working directory or to the script."
            )

    sys.addaudithook(refuse)


def _is_writing(mode: Any, flags: Any) -> bool:
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and bool(flags & _WRITING)


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + os.sep)
