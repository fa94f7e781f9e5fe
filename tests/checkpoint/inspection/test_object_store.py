"""The commands that look into checkpoints, given a URL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elasticrun.checkpoint.storage.place import DRAFT_NAME
from elasticrun.checkpoint.store import CheckpointStore
from tests.checkpoint.inspection.running import run, save_some
from tests.crash import test_remote_crashes as failures
from tests.support.generations import generation
from tests.support.places import Content, make_place


@pytest.fixture
def url(tmp_path: Path) -> str:
    return make_place("memory", tmp_path)


def test_checkpoints_are_listed_and_verified(url: str) -> None:
    save_some(url, 1.0, 2.0, 3.0)
    Content(url).truncate("checkpoint-00000001/model")
    Content(url).flip("checkpoint-00000002/model", 100)
    said = run(url)
    assert said.code == 0
    assert said.lines[0] == url
    assert [line.split()[-1] for line in said.lines[2:5]] == ["good", "good", "bad"]
    assert f"1 is bad: {url}/checkpoint-00000001/model has " in said.output
    values = run(url, "--json").values
    assert values["directory"] == url
    assert values["in_use_by"] is None
    assert values["checkpoints"][0]["path"] == f"{url}/checkpoint-00000003"
    said = run(url, "verify")
    assert said.code == 1
    assert [line for line in said.lines if not line.startswith(" ")] == [
        *("3  good", "2  bad", "1  bad"),
    ]
    assert f"{url}/checkpoint-00000002/model has the checksum" in said.output


def test_one_is_shown(url: str) -> None:
    save_some(url, 1.0, 2.0)
    assert "weight  float32 [2, 3]" in run(url, "show", 1, "model").output
    said = run(url, "show", 7)
    assert said.code == 2
    assert f"there is no checkpoint {url}/checkpoint-00000007. {url} has 1, 2." in (
        said.errors
    )


def test_the_model_is_exported(url: str, tmp_path: Path) -> None:
    save_some(url, 1.0)
    file = tmp_path / "model.pt"
    said = run(url, "export", "newest", file)
    assert said.output == f"{url}/checkpoint-00000001/model is now {file}\n"
    assert torch.load(file, weights_only=True)["bias"].tolist() == [-1, -1]


def test_what_a_job_at_work_writes_is_shown_so(url: str) -> None:
    save_some(url, 1.0, 2.0, 3.0)
    with generation(url):
        draft = CheckpointStore(url, job="test").storage
        for name in (DRAFT_NAME, "model"):
            draft.write("checkpoint-00000004", name, lambda file: file.write(b"half"))
        assert ", in use by process " in run(url).lines[0]
        assert run(url).lines[2].endswith("being written")


def test_a_store_that_fails_is_no_damage(tmp_path: Path) -> None:
    place = f"failing://{tmp_path.name}/job"
    failures.prepare(place)
    for words in (["list"], ["verify"], ["show", "newest"]):
        with failures.failing(0, is_lasting=True):
            said = run(place, *words)
        assert said.code == 2
        assert "503 Slow Down" in said.errors
    assert run(place, "verify").lines == ["2  good", "1  good"]


def test_where_nothing_was_saved_nothing_is_listed(url: str) -> None:
    said = run(url)
    assert said.code == 0
    assert said.lines == [url, "no checkpoints"]
    said = run("nosuch://x/y")
    assert said.code == 2
    assert "Protocol not known: nosuch" in said.errors
