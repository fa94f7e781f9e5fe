"""Scratch copies of the program."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticrun.check.source import (
    copy_source,
    find_source,
    original_path,
    own_arguments,
)
from elasticrun.launcher.options import OptionError


def test_a_scratch_copy_has_what_the_program_needs(tmp_path: Path) -> None:
    home, target = tmp_path / "home", tmp_path / "elasticrun-run-0" / "work"
    for name in ("train.py", "lib/part.py", ".git/HEAD", "data/big.bin"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(name)
    (home / "job/checkpoint-00000001").mkdir(parents=True)
    (home / "job/checkpoint-00000001/manifest.json").touch()
    (tmp_path / "elsewhere").mkdir()
    (home / "images").symlink_to(tmp_path / "elsewhere")
    script = str(home / "train.py")
    source = find_source(script, directory=str(home), linked=["data"])
    copied = copy_source(source, target)
    assert copied == target / "train.py"
    names = sorted(str(path.relative_to(target)) for path in target.rglob("*"))
    assert names == ["data", "images", "lib", "lib/part.py", "train.py"]
    assert (target / "data").is_symlink()
    assert original_path(str(copied), source) == script
    assert original_path("/usr/lib/other.py", source) == "/usr/lib/other.py"
    arguments = ["--out", f"{home}/x.pt", f"--log={home}/y", "/else"]
    assert own_arguments(arguments, source, target) == (
        "--out", f"{target}/x.pt", f"--log={target}/y", "/else",
    )  # fmt: skip


def test_a_directory_that_is_too_large_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "big").write_bytes(b"x" * 4096)
    monkeypatch.setattr("elasticrun.check.source._MOST_BYTES", 1024)
    with pytest.raises(OptionError, match=r"--link data"):
        find_source(str(tmp_path / "train.py"), directory=str(tmp_path), linked=[])
    find_source(str(tmp_path / "train.py"), directory=str(tmp_path), linked=["data"])
