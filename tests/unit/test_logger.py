"""Messages of elasticrun in scripts that set up `logging` for their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SETUPS = {
    "none": "",
    "a file of the script's": "logging.basicConfig(filename='own.log', level='DEBUG')",
    "stderr, too": "logging.basicConfig(level=logging.INFO)",
    "a level": "logging.getLogger().setLevel(logging.CRITICAL)",
    "no messages": "logging.disable(logging.CRITICAL)",
    "others disabled": """
logging.config.dictConfig({
    "version": 1, "disable_existing_loggers": True,
    "handlers": {"file": {"class": "logging.FileHandler", "filename": "own.log"}},
    "root": {"handlers": ["file"], "level": "ERROR"},
})""",
    "other handlers": """
logging.basicConfig()
logging.getLogger().handlers[:] = [logging.FileHandler("own.log")]""",
    "none at all": "logging.lastResort = None",
}


def said(script: str, folder: Path) -> str:
    """Return what a script prints that lets elasticrun say something."""
    program = f"""
import logging.config, sys
from elasticrun.checkpoint.events import logger
{script}
logger.info("a detail")
logger.warning("no rescue: %s", "too short")
"""
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        check=True,
        stderr=subprocess.PIPE,
        text=True,
    ).stderr


@pytest.mark.parametrize("name", SETUPS)
def test_they_are_on_stderr_once_and_nowhere_else(name: str, tmp_path: Path) -> None:
    assert said(SETUPS[name], tmp_path) == "no rescue: too short\n"
    own = tmp_path / "own.log"
    assert not own.exists() or own.read_text() == ""


def test_a_script_chooses_by_level_and_handlers(tmp_path: Path) -> None:
    named = "own = logging.getLogger('elasticrun')\n"
    assert said(f"{named}own.setLevel('INFO')", tmp_path).startswith("a detail\nno ")
    assert said(f"{named}own.setLevel('ERROR')", tmp_path) == ""
    to_file = f"{named}own.addHandler(logging.FileHandler('own.log'))"
    assert said(to_file, tmp_path) == ""
    assert (tmp_path / "own.log").read_text() == "no rescue: too short\n"


def test_they_go_to_what_stderr_is_now(tmp_path: Path) -> None:
    assert said("sys.stderr = open('err', 'w')", tmp_path) == ""
    assert (tmp_path / "err").read_text() == "no rescue: too short\n"
