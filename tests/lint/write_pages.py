"""Write docs/rules from what the rules say: `python -m tests.lint.write_pages`."""

from __future__ import annotations

from pathlib import Path

from elasticrun.lint.rules.pages import pages

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "rules"

if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
