"""Which modules a program imports, so that the forkserver can do it once for all."""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection
from importlib.machinery import PathFinder
from pathlib import Path

from elasticrun.launcher.options import Program


def imports_of(program: Program) -> list[str]:
    """Return the modules that a script imports before anything else, in its order.

    The forkserver imports them once, so that a restart need not. What stands below the
    first line that does something may depend on it, as on a variable that is set there;
    and so may what stands below the import of a module of the program's own.
    """
    path = _source(program)
    if path is None:
        return []
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, ValueError, SyntaxError):  # The script itself will say so.
        return []
    names: dict[str, None] = {}
    for node in tree.body:
        wanted = _imported(node)
        if wanted is None:
            break
        for name in wanted:
            if _is_own(name, program):
                return list(names)
            names[name] = None
    return list(names)


def installed_modules(*, but: Collection[str]) -> list[str]:
    """Return the modules of installed packages that this process has imported since.

    The program's own are left out: they may be changed between two generations.

    Args:
        but: What was imported before.
    """
    return [
        name
        for name, module in list(sys.modules.items())
        if name not in but and _is_installed(module)
    ]


def _is_installed(module: object) -> bool:
    """Return whether it comes from where packages are installed.

    Programs put stand-ins there that answer anything, or raise anything.
    """
    try:
        origin = module.__spec__.origin  # type: ignore[attr-defined]
    except Exception:
        return False
    is_path = isinstance(origin, str)
    return is_path and ("site-packages" in origin or "dist-packages" in origin)


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
    spec = PathFinder.find_spec(name.partition(".")[0], program.path)
    return spec is not None and spec.origin is not None


def _source(program: Program) -> Path | None:
    if program.kind == "script":
        return Path(program.target)
    return None
