"""What a checkpoint directory may be: a path, or a URL that stays as it is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

import elasticrun
from elasticrun import AtomicDirectory, atomic_save
from elasticrun.checkpoint.storage.local import LocalStorage
from elasticrun.checkpoint.storage.place import RemotePath, parse_place
from elasticrun.checkpoint.storage.remote import RemoteStorage, storage_at
from elasticrun.errors import CheckpointError


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("a/b", os.path.abspath("a/b")),
        (Path("a/../b"), os.path.abspath("b")),
        ("/a/b/", "/a/b"),
        ("file:///a/b", "/a/b"),
        ("local:///a//b", "/a/b"),
        ("~/a", os.path.expanduser("~/a")),
        (Path("~"), os.path.expanduser("~")),
        ("./~/a", os.path.abspath("~/a")),
        ("./s3:/a", os.path.abspath("s3:/a")),
    ],
)
def test_a_path_is_made_absolute(given: str | Path, meant: str) -> None:
    assert parse_place(given) == Path(meant)
    assert isinstance(storage_at(given), LocalStorage)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("s3://bucket/job", "s3://bucket/job"),
        ("s3://bucket/job//", "s3://bucket/job"),
        ("memory://x", "memory://x"),
        ("memory:///x", "memory:///x"),
        (RemotePath("gs://b/x"), "gs://b/x"),
    ],
)
def test_a_url_keeps_its_slashes(given: str | RemotePath, meant: str) -> None:
    place = parse_place(given)
    assert place == RemotePath(meant)
    assert f"{place}" == os.fspath(place) == meant


def test_a_url_has_the_parts_of_a_path() -> None:
    place = RemotePath("s3://bucket/job")
    model = place / "checkpoint-00000001" / "model"
    assert str(model) == "s3://bucket/job/checkpoint-00000001/model"
    assert model.name == "model"
    assert model.parent.parent == place
    assert len({model, model.parent / "model"}) == 1


@pytest.mark.parametrize("url", ["s3://", "memory:///"])
def test_a_url_without_a_place_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=f"'{url}' names no place .* s3://bucket/job"):
        parse_place(url)


@pytest.mark.parametrize("given", [Path("s3://bucket/job"), "s3:/bucket/job"])
def test_a_url_that_lacks_a_slash_is_refused(given: str | Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'s3:/bucket/job' looks like a URL that la"):
        parse_place(given)
    with pytest.raises(ValueError, match="looks like a URL"):
        elasticrun.init(given)
    with pytest.raises(ValueError, match="looks like a URL"):
        atomic_save(1, given)


@pytest.mark.parametrize("url", ["file://rel/x", "file://", "local://x", "file://~/x"])
def test_a_path_by_url_must_be_absolute(url: str) -> None:
    with pytest.raises(ValueError, match=f"'{url}' names a host where .* three slash"):
        parse_place(url)


def test_an_unknown_protocol_is_named() -> None:
    with pytest.raises(CheckpointError) as caught:
        storage_at("nosuch://bucket/job")
    assert str(caught.value) == (
        "nosuch://bucket/job cannot be opened: Protocol not known: nosuch. Give a URL "
        "that fsspec knows, as s3://bucket/job, or the path of a directory."
    )


def test_a_store_whose_package_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(
        CheckpointError, match=r"the one for gs:// is not installed\. I"
    ):
        storage_at("gs://bucket/job")


def test_without_fsspec_it_is_said_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(CheckpointError, match=r"pip install elasticrun\[remote\]"):
        elasticrun.init("memory://bucket/job")
    assert isinstance(storage_at(tmp_path), LocalStorage)


def test_to_name_a_store_asks_nothing_of_it() -> None:
    assert isinstance(storage_at("s3://no-such-bucket/job"), RemoteStorage)


@pytest.mark.parametrize("given", ["s3://b/x", RemotePath("s3://b/x")])
def test_what_gives_out_paths_refuses_urls(given: str | RemotePath) -> None:
    with pytest.raises(ValueError, match=r"AtomicDirectory was given '.*x'\. It w"):
        AtomicDirectory(given)
    with pytest.raises(ValueError, match=r"atomic_save was given '.*x'\. It w"):
        atomic_save(1, given)


def test_what_gives_out_paths_takes_those_by_url(tmp_path: Path) -> None:
    atomic_save(1, f"file://{tmp_path}/saved.pt")
    assert torch.load(tmp_path / "saved.pt") == 1
    exports = AtomicDirectory(f"file://{tmp_path}/exports")
    assert exports.directory == tmp_path / "exports"


def test_a_path_that_is_given_out_leads_where_the_system_leads(tmp_path: Path) -> None:
    (tmp_path / "far" / "there").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "there")
    atomic_save(1, tmp_path / "link" / ".." / "saved.pt")
    assert (tmp_path / "far" / "saved.pt").is_file()
