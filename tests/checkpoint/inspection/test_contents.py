"""Showing a checkpoint: names, shapes, dtypes and small values."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch

from elasticrun import State, Variables, save_all_states
from elasticrun.checkpoint.inspection.contents import leaves
from tests.checkpoint.inspection.running import flip_byte, run, save_some
from tests.support.generations import run_once


def test_a_state_is_shown_by_names_shapes_and_small_values(tmp_path: Path) -> None:
    save_some(tmp_path, 0.25)
    said = run(tmp_path, "show", 1, "model")
    assert said.code == 0
    assert said.lines[0].startswith("model  ")
    assert [line.split(maxsplit=1) for line in said.lines[1:]] == [
        ["weight", "float32 [2, 3]  [[0.25, 0.25, 0.25], [0.25, 0.25, 0.25]]"],
        ["bias", "float32 [2]     [-0.25, -0.25]"],
    ]
    assert run(tmp_path, "show", "newest", "variables").lines[1:] == [
        "  accuracy  float  0.25",
        "  note      str    'start'",
    ]


def test_a_whole_checkpoint_is_shown(tmp_path: Path) -> None:
    save_some(tmp_path, 0.25)
    lines = run(tmp_path, "show", "newest").lines
    assert lines[0] == str(tmp_path / "checkpoint-00000001")
    assert "  job         test" in lines
    assert "  position    the beginning" in lines
    assert [line.split()[0] for line in lines if not line.startswith(" ")][1:] == [
        *("random.ranks-0", "model", "variables"),
    ]
    assert len(lines) < 30  # The words of generators are not shown one by one.
    states = run(tmp_path, "show", 1, "--json").values["states"]
    assert states["model"][1] == {
        "path": "bias",
        "dtype": "float32",
        "shape": [2],
        "value": [-0.25, -0.25],
    }
    assert states["variables"][1]["value"] == "start"


def test_states_of_other_formats_are_shown_as_far_as_they_go(tmp_path: Path) -> None:
    class Own(State):
        def save(self, fileobj: BinaryIO) -> None:
            fileobj.write(b"\x80\x04 not for anybody else")

        def load(self, fileobj: BinaryIO) -> None:
            raise AssertionError

    def script() -> None:
        Own("own")
        save_all_states()

    run_once(script, tmp_path)
    said = run(tmp_path, "show", 1, "own")
    assert said.lines == [
        "own  23 B",
        "    23 bytes  b'\\x80\\x04 not for anybody else'",
    ]


class Table(State):
    """Writes what `torch.load` cannot read, though it is a zip file as well."""

    def save(self, fileobj: BinaryIO) -> None:
        np.savez(fileobj, a=np.arange(3))

    def load(self, fileobj: BinaryIO) -> None:
        raise AssertionError


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:Sparse invariant checks")
def test_other_archives_and_sparse_tensors_are_shown(tmp_path: Path) -> None:
    def script() -> None:
        Table("table")
        Variables(sparse=torch.eye(2).to_sparse(), z=torch.zeros(2) + 1j)
        Variables(
            name="rows", csr=torch.tensor([[0.0, 3.0], [0.0, 0.0]]).to_sparse_csr()
        )
        save_all_states()

    run_once(script, tmp_path)
    said = run(tmp_path, "show", 1)
    assert said.code == 0
    assert f"{(tmp_path / 'checkpoint-00000001/table').stat().st_size} bytes" in (
        said.output
    )
    assert "sparse  float32 [2, 2]  [[1, 0], [0, 1]]" in said.output
    assert "csr  float32 [2, 2]  [[0, 3], [0, 0]]" in said.output
    assert run(tmp_path, "show", 1, "--json").values["states"]["variables"][0] == {
        "path": "sparse",
        "dtype": "float32",
        "shape": [2, 2],
        "value": [[1.0, 0.0], [0.0, 1.0]],
    }


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:Sparse invariant checks")
def test_a_sparse_tensor_that_leads_out_of_memory_is_refused(tmp_path: Path) -> None:
    class Astray(Table):
        def save(self, fileobj: BinaryIO) -> None:
            sparse = torch.eye(2).to_sparse_csr()
            sparse.col_indices()[0] = 1 << 30
            torch.save(sparse, fileobj)

    def script() -> None:
        Astray("astray")
        save_all_states()

    run_once(script, tmp_path)
    said = run(tmp_path, "show", 1, "astray")
    assert said.code == 2
    assert "astray cannot be read" in said.errors


def test_nothing_is_executed(tmp_path: Path) -> None:
    class Surprise:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "executed",))

    class Pickled(State):
        def save(self, fileobj: BinaryIO) -> None:
            torch.save({"weight": Surprise()}, fileobj)

        def load(self, fileobj: BinaryIO) -> None:
            raise AssertionError

    def script() -> None:
        Pickled("own")
        save_all_states()

    run_once(script, tmp_path / "job")
    for words in (("show", 1), ("verify",)):
        assert run(tmp_path / "job", *words).code == 0
    assert (
        "only a full unpickler could read them"
        in run(tmp_path / "job", "show", 1, "own").output
    )
    assert run(tmp_path / "job", "export", 1, tmp_path / "x", "--state=own").code == 2
    assert not (tmp_path / "executed").exists()


def test_damage_is_named_instead_of_shown(tmp_path: Path) -> None:
    save_some(tmp_path, 0.25)
    path = tmp_path / "checkpoint-00000001" / "model"
    flip_byte(path)
    said = run(tmp_path, "show", 1, "model")
    assert (said.code, said.output) == (2, "")
    assert f"{path} has the checksum " in said.errors
    assert run(tmp_path, "show", 1, "variables").code == 0


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    save_some(tmp_path, 1.0, 2.0)
    said = run(tmp_path, "show", 7)
    assert said.code == 2
    assert f"there is no checkpoint {tmp_path}/checkpoint-00000007. " in said.errors
    assert said.errors.endswith(f"{tmp_path} has 1, 2.\n")
    assert "'best' is no checkpoint" in run(tmp_path, "show", "best").errors
    said = run(tmp_path, "show", 1, "ema")
    assert "there is no state 'ema' in " in said.errors
    assert said.errors.endswith("only: model, random, variables\n")


@pytest.mark.filterwarnings("ignore")  # Torch's, of what is a prototype or deprecated.
def test_tensors_without_plain_values_are_shown(tmp_path: Path) -> None:
    full = torch.ones(2, 3)
    rows = [torch.ones(length) for length in (2, 3)]
    values = {
        "bits": full.to(torch.uint8).view(torch.bits8),
        "jagged": torch.nested.nested_tensor(rows, layout=torch.jagged),
        "meta": torch.empty(2, device="meta"),
        "nested": torch.nested.nested_tensor(rows),
        "quantized": torch.quantize_per_tensor(full, 0.5, 0, torch.qint8),
    }

    def script() -> None:
        Variables(**dict.fromkeys(values)).__dict__.update(values)
        save_all_states()

    run_once(script, tmp_path)
    lines = run(tmp_path, "show", 1, "variables").lines[1:]
    assert [" ".join(line.split()) for line in lines] == [
        "bits bits8 [2, 3]",
        "jagged float32 [2]",
        "meta float32 [2]",
        "nested float32 [2]",
        "quantized qint8 [2, 3]",
    ]
    shown = run(tmp_path, "show", 1, "--json").values["states"]["variables"]
    assert [(each["shape"], each["value"]) for each in shown[:3]] == [
        ([2, 3], None),
        ([2], None),
        ([2], None),
    ]


def test_paths_are_like_those_of_state_dictionaries() -> None:
    values = {"state": {0: {"step": 1}}, "groups": [{"lr": 0.1}], "x.y": (2,)}
    assert dict(leaves(values)) == {
        "state.0.step": 1,
        "groups[0].lr": 0.1,
        "x.y[0]": 2,
    }
