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

from tests.launcher.running import run, running
from tests.support.stage import Stage, wait_until

pytestmark = pytest.mark.slow

NAME = "worker_3"


@dataclass
class Metadata:
    """A machine's metadata service, as AWS, GCP and Azure document theirs.

    Attributes:
        deadline: When the machine is taken away; None as long as it is not.
        num_broken: How many requests it fails to answer before it works.
    """

    url: str = ""
    deadline: float | None = None
    num_broken: int = 0
    answered: list[str] = field(default_factory=list)

    def answer(
        self, method: str, path: str, headers: dict[str, str]
    ) -> tuple[int, str]:
        if self.num_broken:
            self.num_broken -= 1
            return 503, ""
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
            self.end_headers()
            self.wfile.write(text.encode())
            known.answered.append(f"{code} {self.path}")

        do_PUT = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        known.url = f"http://127.0.0.1:{server.server_port}"
        yield known
        server.shutdown()
        thread.join()


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


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("aws", "AWS's notice to terminate this machine at 20"),
        ("gcp", "GCP's notice of preemption: saving"),
        ("azure", "Azure's notice, Preempt: saving"),
        ("url", "the notice at http://127.0.0.1"),
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


def test_metadata_that_fail_are_told_of_and_asked_again(
    stage: Stage, metadata: Metadata
) -> None:
    metadata.num_broken = 4
    options = ["--replicas", 1, "--notice", "gcp", "--", "--hold", "0:9"]
    with running(stage, *options, command=launcher(metadata)) as job:
        job.wait_until_said("cannot ask gcp for notices: HTTPError: HTTP Error 503")
        job.wait_until_held(0, 1)
        wait_until(lambda: "200" in "".join(metadata.answered), "an answer")
        metadata.deadline = time.time() + 600
        job.wait_until_said("GCP's notice of preemption: saving")
        stage.mark("stop-0")
        assert job.wait() == 75


def test_what_is_no_source_is_refused(stage: Stage) -> None:
    job = run(stage, "--notice", "amazon")
    assert job.process.returncode == 2
    assert "--notice amazon: give aws, gcp, azure, or a URL" in job.events
