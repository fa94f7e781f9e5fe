"""A folder imports only folders of lower floors, and no import goes in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import elasticrun

ROOT = Path(elasticrun.__file__).parent

# From the ground up. What stands on one floor does not know of each other.
FLOORS = [
    {"errors", "logger", "lint"},
    {"adaptive", "replicas"},
    {"checkpoint"},
    {"saving"},
    {"job"},
    {"data", "launcher"},
    {"parallel", "check", "report", "__main__"},
    {"integrations", "__init__", "testing"},
]
FLOOR = {entry: number for number, floor in enumerate(FLOORS) for entry in floor}


def name_of(path: Path) -> str:
    """Return a module's name below `elasticrun`; a folder's is that of its __init__."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[1:] and parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}


def imported(path: Path) -> Iterator[str]:
    """Yield the modules of the package that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # `from elasticrun.data import order` may name a module or what one holds.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [n if below(n) in MODULES else str(node.module) for n in names]
        else:
            continue
        yield from (below(name) for name in names if name.split(".")[0] == "elasticrun")


def below(name: str) -> str:
    return name.removeprefix("elasticrun").removeprefix(".") or "__init__"


IMPORTS = {name: set(imported(path)) for name, path in MODULES.items()}


def entry_of(module: str) -> str:
    return module.split(".")[0]


def test_every_entry_of_the_package_stands_on_a_floor() -> None:
    assert {entry_of(module) for module in MODULES} == FLOOR.keys()


@pytest.mark.parametrize("entry", sorted(FLOOR))
def test_a_folder_imports_only_folders_of_lower_floors(entry: str) -> None:
    wrong = {
        f"{module} imports {other}"
        for module, others in IMPORTS.items()
        for other in others
        if entry_of(module) == entry != entry_of(other)
        if FLOOR[entry_of(other)] >= FLOOR[entry]
    }
    assert wrong == set()


def test_no_import_goes_in_a_circle() -> None:
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        circle = error.args[1]
        pytest.fail(" <- ".join(circle))


def test_no_chain_of_imports_is_longer_than_20() -> None:
    chains: dict[str, list[str]] = {}
    for module in TopologicalSorter(IMPORTS).static_order():
        below = [chains[other] for other in IMPORTS.get(module, ())]
        chains[module] = [module, *max(below, key=len, default=[])]
    longest = max(chains.values(), key=len)
    assert len(longest) <= 20, " -> ".join(longest)


def test_one_folder_writes_files_and_one_reads_the_environment() -> None:
    def using(*texts: str) -> set[str]:
        return {
            name
            for name, path in MODULES.items()
            if any(text in path.read_text(encoding="utf-8") for text in texts)
        }

    # Who starts replicas gives them variables; in them, one module reads these.
    starters = {"testing.replicas", "launcher.environment"}
    namers = {"lint.naming", "lint.walk.table"}  # know the name, and import no os
    readers = using("os.environ") - starters - namers
    assert readers == {"replicas.environment"}
    binders = {"launcher.control.sockets"}  # renames a socket, not a file
    writers = using("os.fsync(", "os.rename(", "os.replace(") - binders
    assert writers == {"checkpoint.files.durable", "checkpoint.files.replacing"}
    assert using("    global ") == {"job.current", "replicas.signals"}
