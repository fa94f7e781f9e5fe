"""The page of a report: one file, which a browser draws without asking for more."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from elasticrun.__main__ import main
from tests.report.made import ERROR, events, write

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    None,
)
# What the page is asked when it is drawn. What it refuses to load is counted from the
# first line on.
WATCH = """<script>
const refused = [];
addEventListener("securitypolicyviolation", event => refused.push(event.blockedURI));
addEventListener("error", event => refused.push(event.message));
</script>"""
ASK = """<script>
addEventListener("load", () => setTimeout(() => {
  const canvases = [...document.querySelectorAll("canvas")].map(canvas => {
    const context = canvas.getContext("2d"), colours = new Set();
    const {data} = context.getImageData(0, 0, canvas.width, canvas.height);
    for (let at = 0; at < data.length; at += 4)
      if (data[at + 3] > 40) colours.add(data.slice(at, at + 3).join());
    return colours.size;
  });
  const loaded = performance.getEntriesByType("resource").map(each => each.name);
  const rows = [...document.querySelectorAll("tr")].map(row => row.innerText);
  const keys = [...document.querySelectorAll(".heading i")].map(
    dot => [dot.parentNode.innerText, getComputedStyle(dot).color]);
  const lines = [...document.querySelectorAll(".keys i")].map(
    line => getComputedStyle(line).color);
  const wide = document.documentElement.scrollWidth;
  document.title = JSON.stringify({canvases, loaded, refused, rows, keys, lines, wide});
}, 200));
</script>"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    folder = tmp_path / "train-checkpoints"
    folder.mkdir()
    write(folder, events())
    out = tmp_path / "report.html"
    assert main(["report", str(folder), "--out", str(out)]) == 0
    return out


def test_the_page_has_all_it_needs(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "@@" not in text.replace("@@data@@ is nan", "")
    assert not re.search(r"(src|href)=\"(?!data:)|@import|url\(|fetch\(", text)
    (data,) = re.findall(r'id="data">(.*?)</script>', text, re.DOTALL)
    told = json.loads(data)
    assert told["crashes"][0]["error"] == ERROR
    assert told["state"] == {"text": "finished", "mood": "good"}
    assert told["job"] == "train.py"


def test_a_job_is_found_by_its_default_directory(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(page.parent)
    monkeypatch.setenv("TMPDIR", str(page.parent))
    page.unlink()
    assert main(["report", "train.py"]) == 0
    assert page.exists()
    assert main(["report", "other"]) == 3
    assert "no job 'other' of this user is running" in capsys.readouterr().err
    (page.parent / "other").mkdir()
    assert main(["report", "other"]) == 3
    assert "other has no events.jsonl" in capsys.readouterr().err


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1200, 1), (420, 0)])
def test_a_browser_draws_it_and_loads_nothing(
    page: Path, width: int, scheme: int
) -> None:
    assert CHROMIUM is not None
    text = page.read_text(encoding="utf-8")
    text = text.replace("<head>", f"<head>{WATCH}", 1) + ASK
    page.write_text(text, encoding="utf-8")
    browser = subprocess.run(
        [
            CHROMIUM,
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *("--enable-logging=stderr", "--virtual-time-budget=5000"),
            f"--user-data-dir={page.parent / 'browser'}",
            f"--blink-settings=preferredColorScheme={scheme}",
            f"--window-size={width},1000",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    (title,) = re.findall("<title>(.*?)</title>", browser.stdout)
    seen = json.loads(title.replace("&lt;", "<").replace("&gt;", ">"))
    assert (seen["loaded"], seen["refused"]) == ([], [])
    assert "CONSOLE" not in browser.stderr
    assert len(seen["canvases"]) == 5
    assert min(seen["canvases"]) > 5  # Lines, texts, and what is between them.
    assert seen["wide"] <= max(width, 500)  # As narrow as headless windows become.
    dots = dict(seen["keys"])
    assert [*dots] == [
        "a checkpoint",
        "time until it was written",
        "of that, training waited",
    ]
    assert len({*dots.values()}) == len(dots)
    assert dots["of that, training waited"] not in seen["lines"]  # Rescalings have one.
    assert any("</script><b>loss</b>" in row for row in seen["rows"])
