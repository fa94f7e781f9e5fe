"""Showing and comparing: names, shapes, dtypes, small values, and what differs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch

from elasticrun import State, Variables, save_all_states
from elasticrun.checkpoint.inspection.contents import leaves
from elasticrun.checkpoint.inspection.difference import compare
from elasticrun.checkpoint.storage.remote import storage_at
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
    assert run(tmp_path, "diff", 1, 1).code == 0


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
    for words in (("show", 1), ("diff", 1, 1), ("verify",)):
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


# Differences


def test_changed_tensors_are_measured(tmp_path: Path) -> None:
    save_some(tmp_path, 1.0, 1.5)
    said = run(tmp_path, "diff", 1, 2)
    assert said.code == 1
    assert said.lines == [
        "random.ranks-0  same",
        "model",
        "  changed  weight  float32 [2, 3], 6 of 6, at most 0.5, 50.00% of the norm",
        "  changed  bias    float32 [2], 2 of 2, at most 0.5, 50.00% of the norm",
        "variables",
        "  changed  accuracy  1.0 to 1.5",
    ]
    changes = run(tmp_path, "diff", 1, 2, "model", "--json").values["changes"]
    assert [each["path"] for each in changes] == ["weight", "bias"]
    assert changes[0]["num_changed"] == 6
    assert changes[0]["num_no_longer_finite"] == 0
    assert changes[0]["largest"] == 0.5
    assert changes[0]["relative"] == pytest.approx(0.5)


def test_a_checkpoint_is_the_same_as_itself(tmp_path: Path) -> None:
    save_some(tmp_path, math.nan)
    said = run(tmp_path, "diff", 1, "newest")
    assert said.code == 0
    assert all(line.endswith("  same") for line in said.lines)


def test_checkpoints_of_other_directories_can_be_compared(tmp_path: Path) -> None:
    save_some(tmp_path / "a", 1.0)
    save_some(tmp_path / "b", 2.0)
    other = tmp_path / "b" / "checkpoint-00000001"
    assert run(tmp_path / "a", "diff", 1, other, "model").code == 1
    assert run(tmp_path / "a", "diff", other, other, "model").code == 0


def compared(tmp_path: Path, old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return what is said of two sets of variables, without spaces for columns."""

    def save(values: dict[str, Any]) -> None:
        Variables(**dict.fromkeys(values)).__dict__.update(values)
        save_all_states()

    run_once(lambda: save(old), tmp_path / "old")
    run_once(lambda: save(new), tmp_path / "new")
    lines = run(
        tmp_path / "old", "diff", 1, tmp_path / "new" / "checkpoint-00000001"
    ).lines
    first = [line.split()[0] for line in lines].index("variables")
    return [" ".join(line.split()) for line in lines[first + 1 :]]


def test_all_kinds_of_changes_are_told(tmp_path: Path) -> None:
    big = 2**60
    assert compared(
        tmp_path,
        {
            "gone": 1,
            "other_shape": torch.zeros(2),
            "other_dtype": torch.zeros(2),
            "other_type": 1,
            "same": [1, {"a": torch.ones(3)}],
            "nan": torch.tensor([1.0, math.nan]),
            "infinite": torch.tensor([1.0, math.inf]),
            "lost": torch.zeros(1),
            "lost_some": torch.tensor([1.0, 1.0, 1.0, math.nan]),
            "from_nothing": torch.zeros(2),
            "flags": torch.tensor([True, False]),
            "large": torch.tensor([big]),
            "larger": torch.tensor([8 * big], dtype=torch.uint64),
            "largest": torch.tensor([-8 * big]),
            "half": torch.ones(2, dtype=torch.bfloat16),
            "complex": torch.ones(2, dtype=torch.complex64),
            "empty": [],
        },
        {
            "other_shape": torch.zeros(3),
            "other_dtype": torch.zeros(2, dtype=torch.float64),
            "other_type": "1",
            "same": [1, {"a": torch.ones(3)}],
            "nan": torch.tensor([2.0, math.nan]),
            "infinite": torch.tensor([1.0, -math.inf]),
            "lost": torch.tensor([math.inf]),
            "lost_some": torch.tensor([2.0, math.inf, math.nan, 1.0]),
            "from_nothing": torch.ones(2),
            "flags": torch.tensor([True, True]),
            "large": torch.tensor([big + 1]),
            "larger": torch.tensor([8 * big + 1], dtype=torch.uint64),
            "largest": torch.tensor([8 * big - 1]),
            "half": torch.ones(2, dtype=torch.bfloat16) * 2,
            "complex": torch.ones(2, dtype=torch.complex64) * 2,
            "empty": [1],
            "come": 2,
        },
    ) == [
        "removed gone int",
        "changed other_shape float32 [2] to float32 [3]",
        "changed other_dtype float32 [2] to float64 [2]",
        "changed other_type int to str",
        "changed nan float32 [2], 1 of 2, at most 1, 100.00% of the norm",
        "changed infinite float32 [2], 1 of 2, 1 still not finite",
        "changed lost float32 [1], 1 of 1, 1 no longer finite",
        (
            "changed lost_some float32 [4], 4 of 4, 2 no longer finite, 1 finite "
            "again, at most 1, 100.00% of the norm"
        ),
        "changed from_nothing float32 [2], 2 of 2, at most 1",
        "changed flags bool [2], 1 of 2, at most 1, 100.00% of the norm",
        "changed large int64 [1], 1 of 1, at most 0, 0.00% of the norm",
        "changed larger uint64 [1], 1 of 1, at most 0, 0.00% of the norm",
        "changed largest int64 [1], 1 of 1, at most 1.84e+19, 200.00% of the norm",
        "changed half bfloat16 [2], 2 of 2, at most 1, 100.00% of the norm",
        "changed complex complex64 [2], 2 of 2, at most 1, 100.00% of the norm",
        "removed empty list",
        "added empty[0] int",
        "added come int",
    ]


@pytest.mark.filterwarnings("ignore")  # Torch's, of what is a prototype or deprecated.
def test_tensors_without_plain_values_are_shown_and_compared(tmp_path: Path) -> None:
    def values(number: int) -> dict[str, Any]:
        full = torch.full((2, 3), float(number))
        rows = [torch.full((length,), float(number)) for length in (2, 3)]
        scales = torch.tensor([0.5, 0.25])
        return {
            "bits": full.to(torch.uint8).view(torch.bits8),
            "jagged": torch.nested.nested_tensor(rows, layout=torch.jagged),
            "meta": torch.empty(2, device="meta"),
            "nested": torch.nested.nested_tensor(rows),
            "quantized": torch.quantize_per_tensor(full, 0.5, 0, torch.qint8),
            "scaled": torch.quantize_per_channel(
                full, scales, torch.tensor([0, 0]), 0, torch.qint8
            ),
        }

    assert compared(tmp_path, values(1), values(2)) == [
        "changed bits bits8 [2, 3], bytes differ",
        "changed jagged float32 [2, *], bytes differ",
        "changed nested float32 [2, *], bytes differ",
        "changed quantized qint8 [2, 3], 6 of 6, at most 1, 100.00% of the norm",
        "changed scaled qint8 [2, 3], 6 of 6, at most 1, 100.00% of the norm",
    ]
    assert run(tmp_path / "old", "diff", 1, 1).code == 0
    lines = run(tmp_path / "old", "show", 1, "variables").lines[1:]
    assert [" ".join(line.split()) for line in lines] == [
        "bits bits8 [2, 3]",
        "jagged float32 [2, *]",
        "meta float32 [2]",
        "nested float32 [2, *]",
        "quantized qint8 [2, 3] [[1, 1, 1], [1, 1, 1]]",
        "scaled qint8 [2, 3] [[1, 1, 1], [1, 1, 1]]",
    ]
    shown = run(tmp_path / "old", "show", 1, "--json").values["states"]["variables"]
    assert [(each["shape"], each["value"]) for each in shown[:3]] == [
        ([2, 3], None),
        ([2, None], None),
        ([2], None),
    ]


def test_what_shows_no_difference_is_told_to_differ(tmp_path: Path) -> None:
    """Two values of one path, containers of two kinds, long texts of one beginning."""
    assert compared(
        tmp_path,
        {"m": {"a.b": 1, "a": {"b": 5}}, "text": "x" * 200},
        {"m": {"a.b": 2, "a": {"b": 5}}, "text": "x" * 199 + "y"},
    ) == ["changed m.a.b 1 to 2", "changed text str, not the same"]
    assert compared(tmp_path / "2", {"m": [1, 2]}, {"m": (1, 2)}) == [
        "changed bytes differ, though no value shown does"
    ]


def test_files_that_are_not_read_are_compared_by_their_checksums(
    tmp_path: Path,
) -> None:
    def script() -> None:
        history = Variables(name="history", table=Unknown(3))
        save_all_states()
        history.table = Unknown(4)
        save_all_states()

    run_once(script, tmp_path, trust_pickle=["history"])
    sizes = [(tmp_path / f"checkpoint-{n:08d}/history").stat().st_size for n in (1, 2)]
    assert sizes[0] == sizes[1]
    said = run(tmp_path, "diff", 1, 2, "history")
    assert said.code == 1
    assert "a full unpickler could read them, not the same" in said.output


class Unknown:
    def __init__(self, value: int) -> None:
        self.value = value


def test_paths_are_like_those_of_state_dictionaries() -> None:
    values = {"state": {0: {"step": 1}}, "groups": [{"lr": 0.1}], "x.y": (2,)}
    assert dict(leaves(values)) == {
        "state.0.step": 1,
        "groups[0].lr": 0.1,
        "x.y[0]": 2,
    }


def test_a_comparison_counts(tmp_path: Path) -> None:
    from elasticrun.checkpoint.inspection.entries import choose_checkpoint

    save_some(tmp_path, 1.0, 2.0)
    old, new = (choose_checkpoint(storage_at(tmp_path), word) for word in ("1", "2"))
    counts: list[int] = []

    def lines() -> Iterator[str]:
        counts.append((yield from compare(old, new, "variables", as_json=False)))

    assert len(list(lines())) == 2
    assert counts == [1]
