"""Machines that say they are about to be taken away: the job saves and leaves."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from elasticrun.launcher import notices
from elasticrun.launcher.event_loop import EventLoop
from tests.launcher.running import run, running
from tests.support.stage import Stage, wait_until

NAME = "worker_3"


@dataclass
class Metadata:
    """A machine's metadata service, as AWS, GCP and Azure document theirs.

    Attributes:
        deadline: When the machine is taken away; None as long as it is not.
        first: What it answers before it works.
    """

    url: str = ""
    deadline: float | None = None
    first: list[tuple[int, str]] = field(default_factory=list)
    answered: list[str] = field(default_factory=list)

    def answer(
        self, method: str, path: str, headers: dict[str, str]
    ) -> tuple[int, str]:
        if self.first:
            return self.first.pop(0)
        if path.startswith("/latest/"):
            return self._aws(method, path, headers)
        if path.startswith("/computeMetadata/"):
            if headers.get("metadata-flavor") != "Google":
                return 403, ""
            assert path == "/computeMetadata/v1/instance/preempted"
            return 200, "FALSE" if self.deadline is None else "TRUE"
        if path.startswith("/metadata/"):
            return (400, "") if headers.get("metadata") != "true" else self._azure(path)
        return (404, "") if self.deadline is None else (200, "")

    @property
    def _when(self) -> datetime:
        assert self.deadline is not None
        return datetime.fromtimestamp(self.deadline, timezone.utc)

    def _aws(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        if path == "/latest/api/token":
            has_time = "x-aws-ec2-metadata-token-ttl-seconds" in headers
            return (200, "token") if method == "PUT" and has_time else (400, "")
        if headers.get("x-aws-ec2-metadata-token") != "token":
            return 401, ""
        assert path == "/latest/meta-data/spot/instance-action"
        if self.deadline is None:
            return 404, "not found"
        when = self._when.strftime("%Y-%m-%dT%H:%M:%SZ")
        return 200, json.dumps({"action": "terminate", "time": when})

    def _azure(self, path: str) -> tuple[int, str]:
        if path.startswith("/metadata/instance/compute/name?api-version="):
            return 200, NAME
        assert path.startswith("/metadata/scheduledevents?api-version=")
        events = [("Freeze", [NAME], ""), ("Preempt", ["worker_4"], "")]
        if self.deadline is not None:
            when = format_datetime(self._when, usegmt=True)
            events.append(("Preempt", [NAME], when))
        listed = [
            {"EventType": kind, "Resources": names, "NotBefore": when}
            for kind, names, when in events
        ]
        return 200, json.dumps({"DocumentIncarnation": 1, "Events": listed})


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    known = Metadata()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            code, text = known.answer(self.command, self.path, headers)
            self.send_response(code)
            self.send_header("Location", f"{known.url}/login")
            self.end_headers()
            self.wfile.write(text.encode())
            known.answered.append(f"{code} {self.path}")

        do_PUT = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        known.url = f"http://127.0.0.1:{server.server_port}"
        yield known
        server.shutdown()
        thread.join()


ODD = (
    ("azure", "[]"),
    ("azure", "null"),
    ("azure", '{"Events": 7}'),
    ("azure", '{"Events": [{"EventType": "Preempt", "Resources": 7}]}'),
    ("aws", "[]"),
    ("aws", '{"action": null, "time": 7}'),
)
ODD_NONE = (
    ("azure", '{"Events": null}'),
    ("azure", '{"Events": [{"EventType": "Preempt", "Resources": null}]}'),
)


def look(
    monkeypatch: pytest.MonkeyPatch, metadata: Metadata, source: str
) -> tuple[list[str], str]:
    """Return what is said until there is a notice, and the notice."""
    monkeypatch.setattr(notices, "_METADATA", metadata.url)
    url = f"{metadata.url}/notice"
    how = {"url": lambda: notices._at(url)}.get(source) or notices._SOURCES[source][0]
    name = url if source == "url" else source
    monkeypatch.setitem(notices._SOURCES, name, (how, 0.01))
    loop = EventLoop()
    said: list[str] = []
    found: list[notices.Notice] = []
    looking = notices.Notices(name, loop, on_notice=found.append, say=said.append)
    while not found:
        loop.run_once()
    looking.close()
    return said, found[0].text


@pytest.mark.parametrize(("source", "answer"), ODD)
def test_an_answer_of_another_form_is_told_of_and_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, metadata: Metadata, source: str, answer: str
) -> None:
    before = [(200, "token")] if source == "aws" else []
    after = [(200, NAME)] if "Resources" in answer else []
    metadata.first = [*before, (200, answer), *after] * 5
    metadata.deadline = time.time() + 600
    said, text = look(monkeypatch, metadata, source)
    assert metadata.first == []
    assert len(said) == 1
    assert said[0].startswith(f"cannot ask {source} for notices: ")
    assert said[0].endswith("; looking on")
    assert "notice" in text


@pytest.mark.parametrize(("source", "answer"), ODD_NONE)
def test_null_is_no_notice(
    monkeypatch: pytest.MonkeyPatch, metadata: Metadata, source: str, answer: str
) -> None:
    metadata.first = [(200, answer), *([(200, NAME)] if "[" in answer else [])] * 5
    metadata.deadline = time.time() + 600
    assert look(monkeypatch, metadata, source) == ([], "Azure's notice, Preempt")


@pytest.mark.parametrize(("code", "num_said"), [(204, 0), (302, 1), (307, 1)])
def test_what_a_server_answers_but_200_is_no_notice(
    monkeypatch: pytest.MonkeyPatch, metadata: Metadata, code: int, num_said: int
) -> None:
    """A redirect leads to a page to log in at, which is there."""
    metadata.first = [(code, "")] * 5
    metadata.deadline = time.time() + 600
    said, _ = look(monkeypatch, metadata, "url")
    assert len(said) == num_said
    assert metadata.answered == [f"{code} /notice"] * 5 + ["200 /notice"]


def launcher(metadata: Metadata) -> list[str]:
    """Return an `elasticrun` on a machine with these metadata."""
    code = f"""
import sys
from elasticrun.__main__ import main
from elasticrun.launcher import notices
notices._METADATA = {metadata.url!r}
sys.exit(main())
"""
    return [sys.executable, "-c", code]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "said"),
    [
        pytest.param(
            "aws",
            "AWS's notice to terminate this machine at 20",
            marks=pytest.mark.wide,
        ),
        pytest.param(
            "gcp", "GCP's notice of preemption: saving", marks=pytest.mark.wide
        ),
        ("azure", "Azure's notice, Preempt: saving"),
        pytest.param("url", "the notice at http://127.0.0.1", marks=pytest.mark.wide),
    ],
)
def test_a_notice_saves_and_leaves(
    stage: Stage, metadata: Metadata, source: str, said: str
) -> None:
    """The signal with which the machine then ends hurries nobody."""
    source = f"{metadata.url}/notice" if source == "url" else source
    proxy = {"http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
    with running(
        stage,
        *("--replicas", 1, "--notice", source, "--", "--hold", "0:9"),
        command=launcher(metadata),
        **proxy,
    ) as job:
        job.wait_until_held(0, 1)
        seen = len(metadata.answered)
        wait_until(lambda: len(metadata.answered) > seen + 2, "looks")
        assert "saving" not in job.events
        metadata.deadline = time.time() + 600
        job.wait_until_said(said)
        job.process.terminate()
        stage.mark("stop-0")
        assert job.wait() == 75
    assert "stopped; checkpoint 1 is saved" in job.events
    assert "ending at once" not in job.events


@pytest.mark.slow
def test_no_more_time_is_taken_than_is_left(stage: Stage, metadata: Metadata) -> None:
    """Nobody lets the held replica come to a boundary."""
    options = ["--replicas", 1, "--notice", "aws", "--grace", 1000]
    with running(
        stage, *options, "--", "--hold", "0:9", command=launcher(metadata)
    ) as job:
        job.wait_until_held(0, 1)
        metadata.deadline = time.time() + 4
        assert job.wait() == 75
    assert "stopped without a new checkpoint: no boundary came within" in job.events


@pytest.mark.slow
def test_metadata_that_fail_are_told_of_and_asked_again(
    stage: Stage, metadata: Metadata
) -> None:
    metadata.first = [(503, "")] * 4
    options = ["--replicas", 1, "--notice", "gcp", "--", "--hold", "0:9"]
    with running(stage, *options, command=launcher(metadata)) as job:
        job.wait_until_said("cannot ask gcp for notices: HTTPError: HTTP Error 503")
        job.wait_until_held(0, 1)
        wait_until(lambda: "200" in "".join(metadata.answered), "an answer")
        metadata.deadline = time.time() + 600
        job.wait_until_said("GCP's notice of preemption: saving")
        stage.mark("stop-0")
        assert job.wait() == 75


@pytest.mark.slow
def test_what_is_no_source_is_refused(stage: Stage) -> None:
    job = run(stage, "--notice", "amazon")
    assert job.process.returncode == 2
    assert "--notice amazon: give aws, gcp, azure, or a URL" in job.events
