"""The folder in which nodes look for who serves."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from elasticrun.checkpoint.storage.claim import ClaimTiming
from elasticrun.launcher.nodes import endpoint
from elasticrun.launcher.nodes.endpoint import Endpoint, EndpointDirectory
from tests.support.stage import wait_until


@pytest.fixture(params=["directory", "store"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    monkeypatch.setattr(endpoint, "_TIMING", ClaimTiming(renewal=0.05, look=0.01))
    monkeypatch.setattr(endpoint, "_WATCH_SECONDS", 0.01)
    if request.param == "directory":
        return str(tmp_path)
    return f"memory://{uuid.uuid4().hex}/job"


def test_one_serves_until_it_is_released(place: str) -> None:
    first, second = EndpointDirectory(place, "job"), EndpointDirectory(place, "job")
    assert first.take()
    assert not second.take()
    with pytest.raises(OSError, match="has not written its address yet"):
        second.find()
    first.announce("10.0.0.1", 4000, "token")
    assert second.find() == Endpoint("10.0.0.1", 4000, "token", "job")
    first.release()
    assert second.take()
    second.announce("10.0.0.2", 4001, "other")
    assert first.find().host == "10.0.0.2"
    second.release()


def test_who_is_overruled_hears_of_it(place: str) -> None:
    serves = EndpointDirectory(place, "job")
    assert serves.take()
    serves.announce("10.0.0.1", 4000, "token")
    assert not serves.is_overruled
    EndpointDirectory(place, "job").announce("10.0.0.2", 4000, "other")
    wait_until(lambda: serves.is_overruled)
    serves.release()


def test_what_is_no_endpoint_of_this_job_is_refused(tmp_path: Path) -> None:
    place = EndpointDirectory(str(tmp_path), "job")
    (tmp_path / "rendezvous").mkdir()
    EndpointDirectory(str(tmp_path), "digits").announce("10.0.0.1", 4000, "token")
    with pytest.raises(OSError, match="another job, digits, meets there"):
        place.find()
    for text in ("{", "[]", '{"host": "a"}'):
        (tmp_path / "rendezvous" / "endpoint.json").write_text(text)
        with pytest.raises(OSError, match="cannot be read"):
            place.find()


def test_what_cannot_be_locked_is_told(tmp_path: Path) -> None:
    (tmp_path / "rendezvous").write_text("")
    with pytest.raises(OSError, match="cannot hold"):
        EndpointDirectory(str(tmp_path), "job").take()
