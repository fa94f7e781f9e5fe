"""The program's source: the scratch copy of its directory, and lines of its files."""

from __future__ import annotations

import ast
import linecache
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from elasticrun.launcher.options import OptionError
from elasticrun.lint.naming import named

_SKIPPED = named("""
    .git .hg .svn .venv node_modules __pycache__ .mypy_cache .pytest_cache .ruff_cache
    .hypothesis .tox
""")
_RUN = re.compile("elasticrun-run-[0-9]+")
WORK = "work"
_MOST_BYTES = 500 << 20
_MOST_FILES = 20_000


@dataclass(frozen=True)
class ProgramSource:
    """Where the program is, and what of it a scratch copy has.

    Attributes:
        linked: Folders and files, relative to the directory, that are linked in.
        writable: Folders outside of the copy in which the program may write.
    """

    directory: Path
    script: Path
    linked: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()

    @property
    def script_folder(self) -> Path:
        return self.script.parent

    @property
    def guarded(self) -> tuple[str, ...]:
        """The folders that a checked program must not change."""
        return tuple(sorted({str(self.directory), str(self.script_folder)}))

    @property
    def is_script_inside(self) -> bool:
        return self.script.is_relative_to(self.directory)


def find_source(
    script: str, *, directory: str, linked: Sequence[str], writable: Sequence[str] = ()
) -> ProgramSource:
    """Return what to copy, after a look at how much it is."""
    if not os.path.isfile(script):
        raise OptionError(f"{script}: there is no such script.")
    source = ProgramSource(
        Path(os.path.realpath(directory)),
        Path(os.path.realpath(script)),
        tuple(os.path.normpath(each) for each in linked),
        tuple(os.path.realpath(each) for each in writable),
    )
    for each in writable:
        if not os.path.isdir(each):
            raise OptionError(f"--writable {each}: there is no such folder.")
    for each in source.linked:
        if each.startswith("..") or not (source.directory / each).exists():
            raise OptionError(f"--link {each}: there is no such file or folder here.")
    roots = [source.directory]
    if not source.is_script_inside:
        roots.append(source.script_folder)
    _check_size(roots, source)
    return source


def _check_size(roots: Sequence[Path], source: ProgramSource) -> None:
    num_bytes, num_files = 0, 0
    largest: dict[str, int] = {}
    for root in roots:
        for path in _contents(root, source):
            size = path.lstat().st_size
            first = path.relative_to(root).parts[0]
            largest[first] = largest.get(first, 0) + size
            num_bytes, num_files = num_bytes + size, num_files + 1
            if num_files > _MOST_FILES or num_bytes > _MOST_BYTES:
                most = max(largest, key=lambda name: largest[name])
                raise OptionError(
                    f"{root} holds more than {_MOST_FILES} files or "
                    f"{_MOST_BYTES >> 20} MiB, most of it in {most!r}, and each run "
                    "gets a copy of it, so that the program cannot change your files. "
                    f"Add --link {most} for data that the program only reads, or start "
                    "in a smaller directory."
                )


def _contents(root: Path, source: ProgramSource) -> Iterator[Path]:
    """Yield the files below a folder, and links to folders, but not what is in those.

    A program's links to folders are likely to lead to data.
    """
    for folder, folders, names in os.walk(root):
        here = Path(folder)
        folders[:] = [name for name in folders if not _is_left_out(here / name, source)]
        yield from (here / name for name in folders if (here / name).is_symlink())
        for name in names:
            path = here / name
            if path.is_file() and not _is_left_out(path, source):
                yield path


def _is_left_out(path: Path, source: ProgramSource) -> bool:
    home = source.directory
    is_inside = path.is_relative_to(home)
    is_linked = is_inside and str(path.relative_to(home)) in source.linked
    if path.name in _SKIPPED or is_linked:
        return True
    if not path.is_dir():
        return False
    is_environment = (path / "pyvenv.cfg").exists()
    return is_environment or any(path.glob("checkpoint-*/manifest.json"))


def copy_source(source: ProgramSource, target: Path) -> Path:
    """Copy what the program needs; return the script in the copy."""
    _copy_tree(source.directory, target, source)
    for each in source.linked:
        link = target / each
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(source.directory / each)
    if source.is_script_inside:
        return target / source.script.relative_to(source.directory)
    folder = target.with_name(f"{target.name}-script")
    _copy_tree(source.script_folder, folder, source)
    return folder / source.script.name


def _copy_tree(root: Path, target: Path, source: ProgramSource) -> None:
    target.mkdir(parents=True)
    for path in _contents(root, source):
        copy = target / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            copy.symlink_to(os.path.realpath(path))
        else:
            shutil.copy2(path, copy)


def own_arguments(
    arguments: Sequence[str], source: ProgramSource, target: Path
) -> tuple[str, ...]:
    """Return the program's arguments with its own paths leading into the copy."""
    prefix = str(source.directory)

    def moved(text: str) -> str:
        head, equals, path = text.rpartition("=")
        if path == prefix or path.startswith(prefix + os.sep):
            return head + equals + str(target) + path.removeprefix(prefix)
        return text

    return tuple(map(moved, arguments))


def original_path(path: str, source: ProgramSource) -> str:
    """Return the user's file that a file in a scratch copy is a copy of."""
    parts = Path(path).parts
    for number, part in enumerate(parts[:-1]):
        if _RUN.fullmatch(part):
            kind, *inner = parts[number + 1 :]
            outside = kind != WORK
            root = source.script_folder if outside else source.directory
            return str(root.joinpath(*inner))
    return path


def end_of_block(path: str, line: int) -> int:
    """Return the last line of the `with` statement that begins at a line."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, ValueError, SyntaxError):
        return line
    ends = [
        node.end_lineno or line
        for node in ast.walk(tree)
        if isinstance(node, ast.With) and node.lineno == line
    ]
    return max(ends, default=line)


def source_line(path: str, line: int) -> str:
    """Return one line of a file; nothing if there is none."""
    return linecache.getline(path, line).rstrip("\n")
