"""Which modules a program imports, so that the forkserver can do it once for all."""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection
from pathlib import Path

from elasticrun.launcher.options import Program


def imports_of(program: Program) -> list[str]:
    """Return the modules that a script imports before anything else, in its order.

    The forkserver imports them once, so that a restart need not. Only what stands at
    the top of the script counts; the rest may depend on what the script does.
    """
    path = _source(program)
    if path is None:
        return []
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, ValueError, SyntaxError):  # The script itself will say so.
        return []
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names += [node.module]
    return list(dict.fromkeys(name for name in names if name != "__future__"))


def installed_modules(*, but: Collection[str]) -> list[str]:
    """Return the modules of installed packages that this process has imported since.

    The program's own are left out: they may be changed between two generations.

    Args:
        but: What was imported before.
    """
    found = []
    for name, module in list(sys.modules.items()):
        origin = getattr(getattr(module, "__spec__", None), "origin", None) or ""
        if name not in but and ("site-packages" in origin or "dist-packages" in origin):
            found.append(name)
    return found


def _source(program: Program) -> Path | None:
    if program.kind == "script":
        return Path(program.target)
    return None
