"""Finds which modules a program imports, so that the forkserver imports them once."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.machinery import PathFinder

from elasticrun.launcher.options import Program

_OF_OPTIMIZERS = "torch._dynamo"  # It takes over a second.
_MAKES_OPTIMIZERS = re.compile(rb"\boptim\b")
_READS_VARIABLES = re.compile(rb"environ|getenv|putenv")


def imports_of(program: Program) -> list[str]:
    """Return the modules that a program imports before anything else, in its order.

    The forkserver imports them once, so that a restart need not. What stands below the
    first line that does something may depend on it, as on a variable that is set there;
    and so may what stands below the import of a module of the program's own.

    For a script that makes optimizers this has also what torch imports for the first
    one of a process. That depends on variables, so not where the script, or a module
    of its own, might set one.
    """
    if program.file is None:
        return []
    try:
        source = program.file.read_bytes()
        tree = ast.parse(source)
    except (OSError, ValueError, SyntaxError):  # The script itself will say so.
        return []
    names = dict.fromkeys(_first_imports(tree, program))
    might_set = _imports_own(tree, program) or _READS_VARIABLES.search(source)
    if _MAKES_OPTIMIZERS.search(source) and not might_set:
        names[_OF_OPTIMIZERS] = None
    return list(names)


def _first_imports(tree: ast.Module, program: Program) -> Iterator[str]:
    for node in tree.body:
        wanted = _imported(node)
        if wanted is None:
            return
        for name in wanted:
            if _is_own(name, program):
                return
            yield name


def _imports_own(tree: ast.Module, program: Program) -> bool:
    """Return whether a module of the program's own is imported anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            return True
        names = _imported(node) if isinstance(node, ast.stmt) else None
        if any(_is_own(name, program) for name in names or ()):
            return True
    return False


def _imported(node: ast.stmt) -> list[str] | None:
    """Return what a statement imports, or None if it does anything else."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return [] if node.module == "__future__" else [node.module]
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return [] if is_text else None


def _is_own(name: str, program: Program) -> bool:
    """Return whether the program would find a module beside itself.

    Not where no file says so: any folder could be a package, but gives way to others.
    """
    first = name.partition(".")[0]
    if program.kind == "module" and first == program.target.partition(".")[0]:
        return True
    spec = PathFinder.find_spec(first, program.path)
    return spec is not None and spec.origin is not None
