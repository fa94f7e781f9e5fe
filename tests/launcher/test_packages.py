"""The collector looks at what a program has made, not at the packages it imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.running import REPOSITORY
from tests.support.stage import DEADLINE

PACKAGE = """
import gc, sys

class Made:
    pass

made = Made()
was_collecting = gc.isenabled()
file = open(sys.argv[1], "w")
file.write("usage")
try:
    raise ValueError("is kept, with all frames that wait for this module")
except ValueError as error:
    kept = error
"""
BROKEN = """
raise OSError("no library")
"""
OLD = """
import warnings
warnings.warn("use another one", DeprecationWarning, stacklevel=2)
"""
PROGRAM = """
import gc, os, sys, threading, traceback, warnings, weakref
from elasticrun.launcher.replica.packages import freeze_packages
from elasticrun.replicas.process_end import flush_files

class Own:
    pass

def make():
    own = Own()
    own.itself = own  # Only the collector frees it.
    return own, weakref.ref(own)

freeze_packages({{"kind": {kind!r}, "target": "package.train"}})
before, before_ref = make()
{prelude}
import package
after, after_ref = make()

is_frozen = not any(each is package.made for each in gc.get_objects())
print("frozen" if is_frozen else "seen", gc.isenabled(), package.was_collecting)
flush_files()
with open(sys.argv[1]) as file:
    print(file.read())
package.file.close()
del before, after
gc.collect()
print("freed" if (before_ref(), after_ref()) == (None, None) else "kept")
"""
SEEN = """
try:
    import broken
except OSError:
    print(traceback.format_exc().count("File "))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import old
print(caught[0].filename == __file__)
"""


def said_by(
    folder: Path, prelude: str = "", *, kind: str = "script", more: str = ""
) -> list[str]:
    """Run the program beside its packages; return the lines that it prints."""
    packages = folder / "site-packages"
    packages.mkdir()
    for name, text in (("package", PACKAGE), ("broken", BROKEN), ("old", OLD)):
        (packages / f"{name}.py").write_text(text)
    script = folder / "script.py"
    script.write_text(PROGRAM.format(prelude=prelude, kind=kind) + more)
    done = subprocess.run(
        [sys.executable, script, folder / "usage"],
        env=os.environ | {"PYTHONPATH": f"{packages}{os.pathsep}{REPOSITORY}"},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert not done.stderr
    return done.stdout.splitlines()


def test_only_what_a_package_has_made_is_left_out(tmp_path: Path) -> None:
    """And a file that it has opened is flushed all the same."""
    assert said_by(tmp_path) == ["frozen True False", "usage", "freed"]


@pytest.mark.parametrize(
    "prelude",
    [
        "many = [[] for _ in range(30_000)]",
        "threading.Thread(target=threading.Event().wait, daemon=True).start()",
    ],
    ids=["many objects", "a thread"],
)
def test_where_that_would_take_long_all_is_as_python_does_it(
    tmp_path: Path, prelude: str
) -> None:
    assert said_by(tmp_path, prelude) == ["seen True True", "usage", "freed"]


def test_a_program_that_is_a_package_itself_is_not_left_out(tmp_path: Path) -> None:
    said = said_by(tmp_path, kind="module")
    assert said == ["seen True True", "usage", "freed"]


def test_a_program_that_has_turned_the_collector_off_finds_it_so(
    tmp_path: Path,
) -> None:
    said = said_by(tmp_path, "gc.disable()")
    assert said == ["seen False False", "usage", "freed"]


def test_nobody_sees_it_in_tracebacks_and_warnings(tmp_path: Path) -> None:
    """A traceback has the program's line and the package's, and no more."""
    assert said_by(tmp_path, more=SEEN)[-2:] == ["2", "True"]
