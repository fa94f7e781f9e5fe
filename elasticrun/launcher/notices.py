"""Asks, while a job runs, whether this machine is about to be taken away.

aws     https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
gcp     https://cloud.google.com/compute/docs/instances/create-use-preemptible
azure   https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.error import HTTPError

from elasticrun.launcher.event_loop import EventLoop
from elasticrun.launcher.options import OptionError

_METADATA = "http://169.254.169.254"  # The same at all three.
_ANSWER_SECONDS = 10.0
_GCP_SECONDS = 30.0
_NUM_MISSES = 3  # In a row, before it is said.
_AZURE_ENDS = ("Preempt", "Terminate", "Redeploy", "Reboot")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Takes a redirect for a failure: a page to log in at says nothing of a machine."""

    def redirect_request(self, *_: Any) -> None:
        return None


# Such an address is no other machine's business.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)


@dataclass(frozen=True)
class Notice:
    """What was found.

    Attributes:
        text: What is to happen, for people.
        deadline: When, in seconds since 1970; None if that is not said.
    """

    text: str
    deadline: float | None


class Notices:
    """Looks for a notice in a thread, until there is one.

    Args:
        source: "aws", "gcp", "azure", or a URL, which answers with code 404 until a
            notice is there, and 200 then.
        on_notice: Called in the loop with the notice.
        say: Called in the loop with why nothing can be known for now.
    """

    def __init__(
        self,
        source: str,
        loop: EventLoop,
        *,
        on_notice: Callable[[Notice], None],
        say: Callable[[str], None],
    ) -> None:
        if source not in _SOURCES and not re.match("https?://", source):
            raise OptionError(
                f"--notice {source}: give {', '.join(_SOURCES)}, or a URL that answers "
                "with code 404 until this machine is to be taken away, and then 200."
            )
        self._source = source
        self._look, self._pause = _SOURCES.get(source, (lambda: _at(source), 5.0))
        self._loop = loop
        self._on_notice = on_notice
        self._say = say
        self._has_ended = threading.Event()
        self._reader, self._writer = os.pipe()
        loop.watch(self._reader, self._hear)
        threading.Thread(target=self._keep_looking, daemon=True).start()

    def close(self) -> None:
        self._has_ended.set()  # The pipe is left to the thread, which may write to it.

    def _hear(self) -> None:
        """Take what the thread has found: lines of JSON, less than a pipe holds."""
        for line in os.read(self._reader, 1 << 16).splitlines():
            message = json.loads(line)
            if "why" in message:
                why = f"cannot ask {self._source} for notices: {message['why']}"
                self._say(f"{why}; looking on")
            else:
                self._loop.forget(self._reader)
                self._on_notice(Notice(**message))

    def _keep_looking(self) -> None:
        misses = 0
        while not self._has_ended.is_set():
            try:
                notice = self._look()
                misses = 0
            except Exception as error:  # An answer may be of any form, and right later.
                notice = None
                misses += 1
                if misses == _NUM_MISSES:  # They fail now and then.
                    self._tell(why=f"{type(error).__name__}: {error}"[:500])
            if notice is not None:
                self._tell(text=notice.text[:500], deadline=notice.deadline)
                return
            self._has_ended.wait(self._pause)

    def _tell(self, **message: object) -> None:
        os.write(self._writer, json.dumps(message).encode() + b"\n")


def _get(path: str, *, method: str = "GET", **headers: str) -> str:
    url = path if "://" in path else _METADATA + path
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, method=method, headers=named)
    with _opener.open(request, timeout=_ANSWER_SECONDS) as answer:
        if answer.status != 200:
            raise HTTPError(url, answer.status, answer.reason, answer.headers, None)
        return str(answer.read(1 << 16).decode("utf-8", "replace"))


def _get_if_there(path: str, **headers: str) -> str | None:
    try:
        return _get(path, **headers)
    except HTTPError as error:
        if error.code in (204, 404):
            return None
        raise


def _aws() -> Notice | None:
    token = _get(
        "/latest/api/token", method="PUT", X_aws_ec2_metadata_token_ttl_seconds="60"
    )
    found = _get_if_there(
        "/latest/meta-data/spot/instance-action", X_aws_ec2_metadata_token=token
    )
    if found is None:
        return None
    action = json.loads(found)
    when = datetime.strptime(action["time"], "%Y-%m-%dT%H:%M:%SZ")
    text = f"AWS's notice to {action['action']} this machine at {action['time']}"
    return Notice(text, when.replace(tzinfo=timezone.utc).timestamp())


def _gcp() -> Notice | None:
    path = "/computeMetadata/v1/instance/preempted"
    if _get(path, Metadata_Flavor="Google").strip() != "TRUE":
        return None
    return Notice("GCP's notice of preemption", time.time() + _GCP_SECONDS)


def _azure() -> Notice | None:
    path = "/metadata/scheduledevents?api-version=2020-07-01"
    events = json.loads(_get(path, Metadata="true"))["Events"] or ()
    ends = [event for event in events if event["EventType"] in _AZURE_ENDS]
    if not ends:
        return None
    path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    own = _get(path, Metadata="true")
    for event in ends:
        if own in list(event["Resources"] or ()):
            when = None  # Empty once it has begun.
            with contextlib.suppress(ValueError, TypeError):
                when = parsedate_to_datetime(event["NotBefore"]).timestamp()
            return Notice(f"Azure's notice, {event['EventType']}", when)
    return None


def _at(url: str) -> Notice | None:
    return None if _get_if_there(url) is None else Notice(f"the notice at {url}", None)


# How to look, and seconds between two looks, as the providers recommend.
_SOURCES: dict[str, tuple[Callable[[], Notice | None], float]] = {
    "aws": (_aws, 5.0),
    "gcp": (_gcp, 1.0),
    "azure": (_azure, 1.0),
}
