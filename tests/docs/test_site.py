"""The site builds without a warning, its links lead somewhere, and browsers show it."""

from __future__ import annotations

import fcntl
import html
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin
from xml.etree import ElementTree

import pytest

import elasticrun
from tests.docs.documents import ROOT, blocks_of

sys.path.insert(0, str(ROOT / "docs" / "pictures"))
import costs
import life_of_a_job

PROBED = "probed-"  # What browsers look at, beside the page that it is made from.
CHROMIUM = shutil.which("chromium")


def on_the_site(test: Any) -> Any:
    """Mark a test that waits for the site to be built."""
    return pytest.mark.slow(20)(pytest.mark.wide(test))


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the site, which one process of the tests builds for all.

    Any warning fails the build.
    """
    pytest.importorskip("furo", reason="the extra `docs` installs it")
    base = tmp_path_factory.getbasetemp()
    out = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "site"
    out.mkdir(exist_ok=True)
    with (out / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (out / "built").exists():
            build(out)
            (out / "built").touch()
    return out / "html"


def build(out: Path) -> None:
    command = ["-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", "-d"]
    built = subprocess.run(
        [sys.executable, *command, str(out / "doctrees"), ".", str(out / "html")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert built.returncode == 0, built.stderr


class Page(HTMLParser):
    """What a page has that others link to, and what it links to itself."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, found: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in found}
        self.anchors |= {
            attributes[name] for name in ("id", "name") if name in attributes
        }
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])
        elif tag in ("img", "script", "link", "iframe", "object"):
            self.loaded.append(attributes.get("src") or attributes.get("href", ""))


def pages(site: Path) -> dict[Path, Page]:
    paths = [path for path in site.rglob("*.html") if not path.name.startswith(PROBED)]
    return {path: Page(path.read_text(encoding="utf-8")) for path in paths}


@on_the_site
def test_every_page_is_in_the_menu(site: Path) -> None:
    menu = Page((site / "docs" / "index.html").read_text(encoding="utf-8"))
    linked = {(site / "docs" / urldefrag(link).url).resolve() for link in menu.links}
    files = {p.relative_to(ROOT) for p in (ROOT / "docs").glob("*/*.md")}
    assert {(site / file).with_suffix(".html").resolve() for file in files} <= linked


@on_the_site
def test_links_and_anchors_lead_somewhere(site: Path) -> None:
    found = pages(site)
    broken = []
    for path, page in found.items():
        for link in [*page.links, *page.loaded]:
            if re.match(r"(https?|mailto|data):", link) or not link:
                continue
            address, anchor = urldefrag(urljoin(path.as_uri(), link))
            target = Path(unquote(address.removeprefix("file://").partition("?")[0]))
            has_anchor = target not in found or unquote(anchor) in found[target].anchors
            if not target.is_file() or (anchor and not has_anchor):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert not broken


@on_the_site
def test_the_reference_has_the_docstrings_of_all_names(site: Path) -> None:
    path = site / "docs" / "reference" / "api.html"
    anchors = Page(path.read_text(encoding="utf-8")).anchors
    members = {"AdaptiveDataLoader.batches", "AdaptiveDataParallel.weigh", "State.save"}
    names = {f"elasticrun.{name}" for name in {*elasticrun.__all__, *members}}
    assert names <= anchors
    assert "elasticrun.Streams.scan" not in anchors


@on_the_site
def test_pages_have_descriptions_and_rules_have_colours(site: Path) -> None:
    for path in pages(site):
        text = path.read_text(encoding="utf-8")
        if path.name not in ("genindex.html", "search.html"):
            (found,) = re.findall(r'<meta name="description" content="([^"]*)"', text)
            assert 20 <= len(html.unescape(found)) <= 160
        if path.name.startswith("ER") and 'class="highlight' in text:
            assert '<span class="k' in text


@on_the_site
def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    texts = [path.read_text(encoding="utf-8") for path in site.rglob("*.css")]
    assert not [
        link for text in texts for link in re.findall(r"url\(['\"]?https?:", text)
    ]
    assert not [
        link
        for page in pages(site).values()
        for link in page.loaded
        if re.match(r"(https?:)?//", link)
    ]


class Seen(NamedTuple):
    """What a browser made of a page."""

    width: int
    content: int
    background: str
    log: str


# Appended to a copy of a page: it writes what the page looks like where a dump has it.
PROBE = """<script>addEventListener("load", () => {
  const root = document.documentElement
  const loaded = performance.getEntriesByType("resource")
  const wrong = loaded.filter(e => !e.name.startsWith("file:"))
  root.dataset.seen = JSON.stringify([innerWidth, root.scrollWidth,
    getComputedStyle(document.body).backgroundColor, wrong.map(e => e.name)])
})</script>"""


def look(site: Path, page: str, width: int, *, is_dark: bool, folder: Path) -> Seen:
    """Open a page in a browser that can resolve no name of another machine."""
    path = site / page
    probed = path.with_name(f"{PROBED}{width}-{is_dark}-{path.name}")
    probed.write_text(path.read_text(encoding="utf-8") + PROBE, encoding="utf-8")
    scheme = "--blink-settings=preferredColorScheme=" + ("0" if is_dark else "1")
    try:
        dumped = subprocess.run(
            [
                *(str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu"),
                *("--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr"),
                *("--log-level=0", f"--window-size={width},1000", scheme),
                *(f"--user-data-dir={folder}", "--virtual-time-budget=3000"),
                *("--dump-dom", probed.as_uri()),
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
    finally:
        probed.unlink()
    (seen,) = re.findall(r'data-seen="([^"]+)"', dumped.stdout)
    inner, content, background, elsewhere = json.loads(html.unescape(seen))
    console = re.findall(r".*CONSOLE.*", dumped.stderr)
    return Seen(inner, content, background, "\n".join([*console, *elsewhere]))


@on_the_site
@pytest.mark.skipif(CHROMIUM is None, reason="apt-get install chromium")
@pytest.mark.parametrize("width", [500, 1280])
@pytest.mark.parametrize(
    "page", ["docs/index.html", "docs/reference/faults.html", "docs/reference/api.html"]
)
def test_a_browser_shows_a_page_light_and_dark(
    site: Path, page: str, width: int, tmp_path: Path
) -> None:
    light, dark = (
        look(site, page, width, is_dark=is_dark, folder=tmp_path / str(is_dark))
        for is_dark in (False, True)
    )
    for seen in (light, dark):
        assert seen.log == ""
        assert seen.content <= seen.width <= width
    assert sum(numbers(light.background)) > 600 > 300 > sum(numbers(dark.background))


def numbers(color: str) -> Iterator[int]:
    return (int(number) for number in re.findall(r"\d+", color)[:3])


def test_the_picture_of_costs_is_that_of_the_results() -> None:
    assert costs.draw() == (ROOT / "docs/pictures/costs.svg").read_text(
        encoding="utf-8"
    )


def test_the_picture_of_a_job_shows_what_its_trace_says() -> None:
    def line(generation: int, rank: int, size: int, batch: int) -> dict[str, int]:
        place = {"epoch": 0, "loop": 0, "batch": batch}
        return {"generation": generation, "rank": rank, "world_size": size, **place}

    trace = [line(0, rank, 2, batch) for rank in (0, 1) for batch in range(6)]
    trace += [line(1, 0, 1, batch) for batch in range(4, 9)]
    root = ElementTree.fromstring(life_of_a_job.draw(trace, ["kill -9"]))
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"generation 0", "2 replicas", "kill -9", "2 once more"} <= set(texts)
    assert "11 batches trained, in time" in texts
    assert len(list(root.iter("{http://www.w3.org/2000/svg}rect"))) == 1 + 2 + 1


def test_readme_fits_on_two_screens() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 900
    languages = [block.language for block in blocks_of(ROOT / "README.md")]
    assert languages == ["diff", "sh", "console"]
