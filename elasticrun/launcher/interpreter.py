"""Functions of this package in a new interpreter, whatever its working directory."""

from __future__ import annotations

import sys
from pathlib import Path

# As with `python FILE`, modules that lie in the working directory are not found.
_BOOT = """
import sys
if sys.path and sys.path[0] == "":
    del sys.path[0]
parent = sys.argv.pop(1)
if parent not in sys.path:
    sys.path.append(parent)
from elasticrun.{module} import {function}
sys.exit({function}())
"""
_PACKAGE_PARENT = str(Path(__file__).parents[2])


def command(module: str, function: str, *arguments: object) -> list[str]:
    """Return the command that calls a function, which finds `arguments` in sys.argv.

    Args:
        module: Below `elasticrun`.
    """
    code = _BOOT.format(module=module, function=function)
    return [sys.executable, "-c", code, _PACKAGE_PARENT, *map(str, arguments)]
