"""Run the fast tests on each Python that this machine has: `make matrix`.

Found are the versions that pyenv has installed, and every `python3.N` on the path. Each
gets an environment of its own, `.matrix/3.N`, by the rule that makes `.venv`. A Python
for which that cannot be made, as where torch has no wheel for it, is skipped, with the
last words of the installer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

OLDEST = (3, 10)
NEWEST = 20  # Of the names python3.N that are looked for.
FOLDER = Path(".matrix")

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


def run_tests_on(interpreter: str, venv: Path) -> str:
    """Make the environment, run the fast tests, and return what came of it."""
    made = subprocess.run(
        ["make", f"VENV={venv}", f"PYTHON={interpreter}", "installed"],
        capture_output=True,
        text=True,
    )
    if made.returncode != 0:
        lines = made.stderr.strip().splitlines()
        errors = [line for line in lines if line.startswith("ERROR")]
        return f"skipped: {(errors or lines or ['it could not be installed'])[-1]}"
    tested = subprocess.run(["make", f"VENV={venv}", "fast"])
    return "passed" if tested.returncode == 0 else "failed"


def main() -> int:
    """Return 1 if the tests failed on any Python, or ran on none."""
    results = {}
    for (major, minor), interpreter in interpreters().items():
        name = f"{major}.{minor}"
        print(f"Python {name}: {interpreter}", flush=True)
        results[name] = run_tests_on(interpreter, FOLDER / name)
    for name, result in results.items():
        print(f"Python {name}: {result}")
    has_passed = "passed" in results.values()
    return 0 if has_passed and "failed" not in results.values() else 1


if __name__ == "__main__":
    sys.exit(main())
