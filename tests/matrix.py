"""Run the fast tests on each Python, and on what is oldest: `make matrix`.

With names, as `python tests/matrix.py 3.10-torch-2.7`, only those of them.

Found are the versions that pyenv has installed, and every `python3.N` on the path. Each
gets an environment of its own, `.matrix/3.N`, by the rule that makes `.venv`; the first
gets others, with the oldest torch that setup.py allows, with the newest that there is,
and with the oldest Lightning, on which its own tests run. A Python for which that
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
    return stated[1], _written(f"torch-{stated[1]}.txt", pinned)


def requirements_of_newest_torch() -> Path:
    """Return a file of what is installed with the torch that people get today."""
    free, num_pins = re.subn("(?m)^torch==.*", "torch", REQUIREMENTS.read_text())
    assert num_pins == 1
    return _written("torch-newest.txt", free)


def requirements_of_oldest_lightning() -> tuple[str, Path]:
    """Return the oldest Lightning, and a file of what its tests need.

    It excludes what other tests need.
    """
    stated = re.search(r'"lightning>=([\d.]+)', Path("setup.py").read_text())
    torch = re.search("(?m)^torch==.*", REQUIREMENTS.read_text())
    assert stated is not None
    assert torch is not None
    extras = "--editable .[progress,test]"
    # It imports pkg_resources, which newer ones do not have.
    needed = [torch[0], extras, f"lightning=={stated[1]}.0", "setuptools<81"]
    return stated[1], _written(f"lightning-{stated[1]}.txt", "\n".join(needed) + "\n")


def _written(name: str, text: str) -> Path:
    """Write a file; a new one makes `make` install everything anew."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / name
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return path


def rows() -> Iterator[tuple[str, str, Path, str | None]]:
    """Yield the name of each environment, its interpreter, needs, and tests if few."""
    found = interpreters()
    for (major, minor), interpreter in found.items():
        yield f"{major}.{minor}", interpreter, REQUIREMENTS, None
    for (major, minor), interpreter in list(found.items())[:1]:
        torch, requirements = requirements_of_oldest_torch()
        yield f"{major}.{minor}-torch-{torch}", interpreter, requirements, None
        newest = requirements_of_newest_torch()
        yield f"{major}.{minor}-torch-newest", interpreter, newest, None
        version, requirements = requirements_of_oldest_lightning()
        name = f"{major}.{minor}-lightning-{version}"
        yield name, interpreter, requirements, "tests/integrations/lightning"


def run_tests_on(
    interpreter: str, venv: Path, requirements: Path, tests: str | None
) -> str:
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
    command = ["make", *chosen, "fast"]
    if tests is not None:
        command = [
            f"{venv}/bin/python",
            "-m",
            "pytest",
            "-m",
            "not slow and not soak",
            tests,
        ]
    tested = subprocess.run(command)
    return "passed" if tested.returncode == 0 else "failed"


def main() -> int:
    """Return 1 if the tests failed on any Python, or ran on none."""
    results = {}
    for name, interpreter, requirements, tests in rows():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        print(f"Python {name}: {interpreter}", flush=True)
        venv = FOLDER / name
        results[name] = run_tests_on(interpreter, venv, requirements, tests)
    for name, result in results.items():
        print(f"Python {name}: {result}")
    has_passed = "passed" in results.values()
    return 0 if has_passed and "failed" not in results.values() else 1


if __name__ == "__main__":
    sys.exit(main())
