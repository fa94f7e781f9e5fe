"""Run the fast tests on each Python, and on the oldest torch: `make matrix`.

Found are the versions that pyenv has installed, and every `python3.N` on the path. Each
gets an environment of its own, `.matrix/3.N`, by the rule that makes `.venv`; the first
gets another one, with the oldest torch that setup.py allows. A Python for which that
cannot be made, as where torch has no wheel for it, is skipped, with the last words of
the installer.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

OLDEST = (3, 10)
NEWEST = 20  # Of the names python3.N that are looked for.
FOLDER = Path(".matrix")
REQUIREMENTS = Path("requirements-dev.txt")

Version = tuple[int, ...]


def candidates() -> Iterator[str]:
    """Yield the interpreters that the machine may have."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from map(str, sorted(pyenv.glob("versions/*/bin/python")))
    for minor in range(OLDEST[1], NEWEST + 1):
        if (found := shutil.which(f"python3.{minor}")) is not None:
            yield found


def version_of(interpreter: str) -> Version | None:
    """Return the version of an interpreter; None if it does not run."""
    code = "import sys; print(*sys.version_info[:3])"
    try:
        said = subprocess.run(
            [interpreter, "-c", code], capture_output=True, text=True, check=True
        )
        return tuple(map(int, said.stdout.split()))
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None  # A name that pyenv has put on the path for a version not chosen.


def interpreters() -> dict[Version, str]:
    """Return the newest interpreter of each minor version that is supported."""
    newest: dict[Version, tuple[Version, str]] = {}
    for interpreter in candidates():
        version = version_of(interpreter)
        if version is not None and version >= OLDEST:
            minor = version[:2]
            newest[minor] = max(newest.get(minor, ((), "")), (version, interpreter))
    return {minor: interpreter for minor, (_, interpreter) in sorted(newest.items())}


def requirements_of_oldest_torch() -> tuple[str, Path]:
    """Return the oldest torch, and a file of what is installed with it."""
    stated = re.search(r'"torch>=([\d.]+)', Path("setup.py").read_text())
    assert stated is not None
    pinned, num_pins = re.subn(
        "(?m)^torch==.*", f"torch=={stated[1]}", REQUIREMENTS.read_text()
    )
    assert num_pins == 1
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"torch-{stated[1]}.txt"
    if not path.exists() or path.read_text() != pinned:
        path.write_text(pinned)  # A new one makes `make` install everything anew.
    return stated[1], path


def rows() -> Iterator[tuple[str, str, Path]]:
    """Yield the name of each environment, its interpreter, and what it needs."""
    found = interpreters()
    for (major, minor), interpreter in found.items():
        yield f"{major}.{minor}", interpreter, REQUIREMENTS
    for (major, minor), interpreter in list(found.items())[:1]:
        torch, requirements = requirements_of_oldest_torch()
        yield f"{major}.{minor}-torch-{torch}", interpreter, requirements


def run_tests_on(interpreter: str, venv: Path, requirements: Path) -> str:
    """Make the environment, run the fast tests, and return what came of it."""
    chosen = [f"VENV={venv}", f"PYTHON={interpreter}", f"REQUIREMENTS={requirements}"]
    made = subprocess.run(
        ["make", *chosen, "installed"],
        capture_output=True,
        text=True,
    )
    if made.returncode != 0:
        lines = made.stderr.strip().splitlines()
        errors = [line for line in lines if line.startswith("ERROR")]
        return f"skipped: {(errors or lines or ['it could not be installed'])[-1]}"
    tested = subprocess.run(["make", *chosen, "fast"])
    return "passed" if tested.returncode == 0 else "failed"


def main() -> int:
    """Return 1 if the tests failed on any Python, or ran on none."""
    results = {}
    for name, interpreter, requirements in rows():
        print(f"Python {name}: {interpreter}", flush=True)
        results[name] = run_tests_on(interpreter, FOLDER / name, requirements)
    for name, result in results.items():
        print(f"Python {name}: {result}")
    has_passed = "passed" in results.values()
    return 0 if has_passed and "failed" not in results.values() else 1


if __name__ == "__main__":
    sys.exit(main())
