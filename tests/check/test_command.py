"""What `elasticrun check` says of wrong usage."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticrun.__main__ import main


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--at", "first"), "EPOCH:LOOP:BATCH"),
        (("--at", "0:0:0"), "counted from 1"),
        (("--replicas", "none"), "numbers from 1 up"),
        (("--replicas", "1,2,3", "--at", "0:0:1"), "2 generations"),
        (("--max-batches", "-1"), "or 0 for all"),
        (("--link", "data"), "there is no such file or folder"),
        (("--hang-timeout", "soon"), "give seconds above 0"),
    ],
)
def test_wrong_usage_says_what_is_right(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(["check", *options, "train.py"]) == 2
    assert text in capsys.readouterr().out


def test_a_script_that_is_not_elastic_is_refused_before_it_is_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nopen('began', 'w')\nfor epoch in range(3):\n"
        "    for x in loader:\n        net(x).backward()\n"
    )
    assert main(["check", str(script)]) == 2
    said = capsys.readouterr().out
    assert f"`elasticrun lint {script}` says what to change" in said
    assert "0 runs" in said
