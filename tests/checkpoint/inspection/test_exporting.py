"""Exporting a state, and pruning by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from elasticrun import (
    Variables,
    register,
    save_all_states,
)
from elasticrun.checkpoint.store import CheckpointStore
from tests.checkpoint.inspection.running import flip_byte, make_model, run, save_some
from tests.support.generations import generation, run_once


def test_a_model_is_exported_for_plain_torch(tmp_path: Path) -> None:
    save_some(tmp_path / "job", 0.5, 0.25)
    target = tmp_path / "out.pt"
    said = run(tmp_path / "job", "export", 1, target)
    assert said.code == 0
    assert said.lines == [f"{tmp_path}/job/checkpoint-00000001/model is now {target}"]
    model = make_model()
    model.load_state_dict(torch.load(target, weights_only=True))
    assert model.weight.unique().tolist() == [0.5]


@pytest.mark.parametrize("name", ["out.pt", "out.safetensors"])
def test_the_ending_says_which_kind_of_file(tmp_path: Path, name: str) -> None:
    save_some(tmp_path / "job", 0.5)
    target = tmp_path / name
    target.write_bytes(b"old")
    said = run(tmp_path / "job", "export", "newest", target, "--force")
    assert said.code == 0, said.errors
    values = torch.load(target) if name.endswith(".pt") else load_file(target)
    assert sorted(values) == ["bias", "weight"]
    assert values["weight"].tolist() == [[0.5] * 3] * 2


def test_a_file_that_is_there_is_replaced_only_by_force(tmp_path: Path) -> None:
    save_some(tmp_path / "job", 0.5)
    (tmp_path / "out.pt").write_bytes(b"precious")
    said = run(tmp_path / "job", "export", 1, tmp_path / "out.pt")
    assert said.code == 2
    assert "out.pt is there already; --force replaces it" in said.errors
    assert (tmp_path / "out.pt").read_bytes() == b"precious"


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    save_some(tmp_path / "job", 0.5)
    target = tmp_path / "out.safetensors"
    said = run(tmp_path / "job", "export", 1, target, "--state", "variables")
    assert said.code == 2
    assert "'variables' holds more than tensors by name" in said.errors
    flip_byte(tmp_path / "job" / "checkpoint-00000001" / "model")
    said = run(tmp_path / "job", "export", 1, target, "--json")
    assert (said.code, said.output) == (2, "")
    assert "has the checksum" in said.errors
    assert not target.exists()


@pytest.mark.parametrize(
    ("file", "reason"),
    [("s3://b/x.pt", "object store"), ("s3:/b/x.pt", "looks like a URL that lacks")],
)
def test_a_file_in_a_store_is_refused(tmp_path: Path, file: str, reason: str) -> None:
    save_some(tmp_path / "job", 0.5)
    said = run(tmp_path / "job", "export", "1", file)
    assert said.code == 2
    assert reason in said.errors


def test_a_file_may_be_named_by_url(tmp_path: Path) -> None:
    save_some(tmp_path / "job", 0.5)
    assert run(tmp_path / "job", "export", 1, f"file://{tmp_path}/x.pt").code == 0
    assert (tmp_path / "x.pt").is_file()


def test_any_layout_is_exported_to_safetensors(tmp_path: Path) -> None:
    net = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    assert not net.weight.is_contiguous()

    def script() -> None:
        register(model=net)
        save_all_states()

    run_once(script, tmp_path / "job")
    said = run(tmp_path / "job", "export", 1, tmp_path / "out.safetensors")
    assert said.code == 0, said.errors
    assert torch.equal(load_file(tmp_path / "out.safetensors")["weight"], net.weight)


# Pruning by hand


def numbers(directory: Path) -> list[int]:
    return [each["number"] for each in run(directory, "--json").values["checkpoints"]]


@pytest.fixture
def torn(tmp_path: Path) -> Path:
    """Return a directory with 1 to 4, of which 3 is damaged, and 5 not committed."""
    save_some(tmp_path, 1.0, 2.0, 3.0, 4.0)
    flip_byte(tmp_path / "checkpoint-00000003" / "model")
    store = CheckpointStore(tmp_path, job="test")
    store.begin(5).write("model", lambda file: file.write(b"half of it"))
    return tmp_path


def test_old_ones_are_removed_and_damaged_ones_do_not_count(torn: Path) -> None:
    said = run(torn, "prune", "--keep", 2, "--dry-run")
    assert said.code == 0
    assert said.lines[:-1] == [
        "would remove checkpoint-00000005",
        "would remove checkpoint-00000001",
    ]
    assert said.lines[-1].startswith("would free ")
    assert numbers(torn) == [5, 4, 3, 2, 1]
    values = run(torn, "prune", "--keep", 2, "--json").values
    assert values["removed"] == [5, 1]
    assert values["size"] > 0
    assert numbers(torn) == [4, 3, 2]
    assert run(torn, "prune", "--keep", 2).lines == ["nothing to remove"]


def test_what_is_only_named_like_a_checkpoint_is_no_checkpoint(torn: Path) -> None:
    mine = torn / "checkpoint-20261122" / "weights.pt"
    mine.parent.mkdir()
    mine.write_text("mine")
    file = torn / "checkpoint-00000009"
    file.write_text("mine")
    assert numbers(torn) == [5, 4, 3, 2, 1]
    assert run(torn, "verify").lines[0] == "4  good"
    assert run(torn, "prune", "--keep", 1, "--json").values["removed"] == [5, 3, 2, 1]
    assert mine.read_text() == file.read_text() == "mine"


@pytest.mark.parametrize("name", ["accuracy", "variables.accuracy"])
def test_the_best_and_every_nth_can_stay(tmp_path: Path, name: str) -> None:
    save_some(tmp_path, 5.0, 6.0, 4.0, 3.0, 2.0, 1.0, keep_best="accuracy:max")
    assert "2 has variables.accuracy 6" in run(tmp_path).lines
    words = ("prune", "--keep", 1, "--keep-every", 4, "--keep-best")
    assert run(tmp_path, *words, "accuracy:most").code == 2
    assert run(tmp_path, *words, f"{name}:max").code == 0
    assert numbers(tmp_path) == [6, 4, 2]


def test_a_value_that_no_checkpoint_has_is_refused(tmp_path: Path) -> None:
    words = ("prune", "--keep", 1, "--keep-best")
    assert run(tmp_path, *words, "acuracy:max").lines == ["nothing to remove"]
    save_some(tmp_path, 5.0, 6.0, 4.0)
    said = run(tmp_path, *words, "accuracy:max")
    assert said.code == 2
    assert "no checkpoint here has a value 'accuracy'" in said.errors
    assert "(they have none)" in said.errors
    save_some(tmp_path, 7.0, keep_best="accuracy:max")
    said = run(tmp_path, *words, "acuracy:max")
    assert said.code == 2
    assert "(they have variables.accuracy), so the best would be" in said.errors
    assert numbers(tmp_path) == [4, 3, 2, 1]


def test_a_name_that_means_values_of_several_states_is_refused(tmp_path: Path) -> None:
    def script() -> None:
        for name in ("train", "valid"):
            Variables(name=name, accuracy=0.5)
        save_all_states()

    for name in ("train", "valid"):
        run_once(script, tmp_path, keep_best=f"{name}.accuracy:max")
    words = ("prune", "--keep", 1, "--keep-best")
    said = run(tmp_path, *words, "accuracy:max")
    assert said.code == 2
    assert "is train.accuracy and valid.accuracy. Give one of them" in said.errors
    assert run(tmp_path, *words, "train.accuracy:max").code == 0


def test_a_job_at_work_keeps_its_draft_and_its_newest(torn: Path) -> None:
    with generation(torn) as job:
        draft = CheckpointStore(torn, job="test").begin(5)
        draft.write("model", lambda file: file.write(b"half of it"))
        assert run(torn, "prune", "--keep", 1).code == 0
        assert numbers(torn) == [5, 4]
        draft.abandon()
        assert job.save() is not None
    assert run(torn, "verify").code == 0


def test_something_must_stay(torn: Path) -> None:
    assert run(torn, "prune", "--keep", 0).code == 2
    for number in (1, 2, 4):
        flip_byte(torn / f"checkpoint-0000000{number}" / "model")
    assert run(torn, "prune", "--keep", 1, "--json").values["removed"] == [5]
