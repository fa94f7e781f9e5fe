"""Exporting a state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from elasticrun import register, save_all_states
from tests.checkpoint.inspection.running import flip_byte, make_model, run, save_some
from tests.support.full_disk import limited_files
from tests.support.generations import run_once


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
    assert "out.pt exists; --force replaces it" in said.errors
    assert (tmp_path / "out.pt").read_bytes() == b"precious"


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    save_some(tmp_path / "job", 0.5)
    target = tmp_path / "out.safetensors"
    said = run(tmp_path / "job", "export", 1, target, "--state", "variables")
    assert said.code == 2
    assert "'variables' holds more than tensors by name" in said.errors
    flip_byte(tmp_path / "job" / "checkpoint-00000001" / "model")
    said = run(tmp_path / "job", "export", 1, target)
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


def test_a_full_disk_is_named_with_the_file(tmp_path: Path) -> None:
    save_some(tmp_path / "job", 0.5)
    target = tmp_path / "out.pt"
    with limited_files(100):
        said = run(tmp_path / "job", "export", 1, target)
    assert said.code != 0
    assert str(target) in said.errors
    assert not target.exists()


def test_a_name_does_nothing_to_a_terminal(tmp_path: Path) -> None:
    odd = tmp_path / "a\x1b]0;title\x07\udcff"
    save_some(tmp_path / "job", 0.5)
    (tmp_path / "job").rename(odd)
    for said in (run(odd), run(tmp_path / "b\x1b[2J")):
        assert "\x1b" not in said.output + said.errors
        (said.output + said.errors).encode()
