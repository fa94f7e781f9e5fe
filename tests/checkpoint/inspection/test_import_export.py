"""Exporting and importing a state, and pruning by hand."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from elasticrun import (
    AdaptiveDataLoader,
    State,
    Variables,
    register,
    remaining_epochs_until,
    save_all_states,
)
from elasticrun.checkpoint.inspection.import_export import set_prefix
from elasticrun.checkpoint.store import CheckpointStore
from tests.checkpoint.inspection.running import flip_byte, make_model, run, save_some
from tests.support.data import Numbers
from tests.support.generations import generation, run_once
from tests.support.stores import Surprise


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
def test_keys_get_a_prefix_or_lose_it(tmp_path: Path, name: str) -> None:
    save_some(tmp_path / "job", 0.5)
    target = tmp_path / name

    def exported(*words: object) -> list[str]:
        said = run(tmp_path / "job", "export", "newest", target, "--force", *words)
        assert said.code == 0, said.errors
        is_torchs = name.endswith(".pt")
        values = torch.load(target) if is_torchs else load_file(target)
        assert values[next(iter(values))].tolist() in ([[0.5] * 3] * 2, [-0.5] * 2)
        return sorted(values)

    assert exported() == exported("--no-prefix") == ["bias", "weight"]
    assert exported("--prefix") == ["module.bias", "module.weight"]


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
    for words in (["export", "1", file], ["import", file]):
        said = run(tmp_path / "job", *words)
        assert said.code == 2
        assert reason in said.errors


def test_a_file_may_be_named_by_url(tmp_path: Path) -> None:
    save_some(tmp_path / "job", 0.5)
    assert run(tmp_path / "job", "export", 1, f"file://{tmp_path}/x.pt").code == 0
    assert (tmp_path / "x.pt").is_file()
    assert run(tmp_path / "job", "import", f"file://{tmp_path}/x.pt").code == 0


def test_a_prefix_must_not_merge_names() -> None:
    values: dict[str, Any] = {"module.a": 1, "a": 2}
    with pytest.raises(Exception, match="two names would be the same"):
        set_prefix(values, False)
    assert set_prefix({"module.module.a": 1}, True) == {"module.module.a": 1}
    assert set_prefix(values, None) is values


# Import


def train() -> Any:
    """Load what is there, take an epoch's steps, save."""
    model = make_model()
    register(model=model)
    before = model.weight[0, 0].item()
    best = Variables(accuracy=0.0)
    epochs, batches = [], 0
    loader = AdaptiveDataLoader(Numbers(8), 4)
    for epoch in remaining_epochs_until(2):
        epochs.append(epoch)
        batches += sum(1 for _ in loader)
    return before, best.accuracy, epochs, batches


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_job_begins_with_an_imported_model(
    tmp_path: Path, ending: str, prefix: str
) -> None:
    source = tmp_path / f"pretrained.{ending}"
    values = {f"{prefix}{k}": v for k, v in make_model(0.75).state_dict().items()}
    (save_file if ending == "safetensors" else torch.save)(values, source)
    said = run(tmp_path / "job", "import", source, "--job", "test")
    assert said.code == 0, said.errors
    assert run_once(train, tmp_path / "job") == (0.75, 0.0, [0, 1], 4)
    generations = [
        each["generation"]
        for each in run(tmp_path / "job", "--json").values["checkpoints"]
    ]
    assert generations == [1, 0]


def test_an_imported_model_replaces_that_of_the_newest(tmp_path: Path) -> None:
    def script() -> None:
        register(model=make_model(0.5))
        Variables(accuracy=0.0).accuracy = 0.9
        for _ in remaining_epochs_until(1):
            pass

    run_once(script, tmp_path / "job")
    torch.save(make_model(0.75).state_dict(), tmp_path / "better.pt")
    said = run(tmp_path / "job", "import", tmp_path / "better.pt", "--json")
    assert said.values == {"path": str(tmp_path / "job" / "checkpoint-00000002")}
    assert run_once(train, tmp_path / "job") == (0.75, 0.9, [1], 2)


@pytest.mark.parametrize("depth", [1, 2])
def test_keys_that_have_the_prefix_by_right_keep_it(tmp_path: Path, depth: int) -> None:
    def wrapped() -> float:
        net: nn.Module = make_model(0.5)
        for _ in range(depth):
            outer = nn.Module()
            outer.add_module("module", net)
            net = outer
        register(model=net)
        save_all_states()
        return next(net.parameters())[0, 0].item()

    run_once(wrapped, tmp_path / "job")
    source = tmp_path / "model.pt"
    assert run(tmp_path / "job", "export", 1, source).code == 0
    saved = torch.load(source)
    for number in range(-1, depth + 1):  # How often the file's keys have it.
        values = {
            f"{'module.' * (number + 1)}{key.removeprefix('module.' * depth)}": value
            for key, value in saved.items()
        }
        values = {key: torch.full_like(value, number) for key, value in values.items()}
        torch.save(values, source)
        said = run(tmp_path / "job", "import", source)
        if abs(number + 1 - depth) > 1:
            assert (said.code, "is not like" in said.errors) == (2, True)
        else:
            assert said.code == 0, said.errors
            assert run_once(wrapped, tmp_path / "job") == number


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


def test_an_import_that_nobody_would_load_is_refused(tmp_path: Path) -> None:
    save_some(tmp_path / "job", 0.5)
    source = tmp_path / "model.pt"
    torch.save(make_model(0.75).state_dict(), source)

    def imported(*words: object) -> Any:
        return run(tmp_path / "job", "import", source, *words)

    said = imported("--state", "net")
    assert said.code == 2
    assert "00000001 has no state 'net', only: model, random, var" in said.errors
    assert "each rank has a 'random' of its own" in imported("--state=random").errors
    for name in ("a b", "a/b", "model.rank-0"):
        said = imported("--state", name, "--new")
        assert said.code == 2
        assert f"{name!r} cannot name a state: it becomes a file name" in said.errors
    for words in (["--state=Model", "--new"], ["--state=Model"]):
        said = imported(*words)
        assert said.code == 2
        assert "00000001 has a state 'model'. A program cannot have one" in said.errors
    assert numbers(tmp_path / "job") == [1]
    assert imported("--state", "net", "--new").code == 0
    assert imported("--state", "net").code == 0
    assert numbers(tmp_path / "job") == [3, 2, 1]


@pytest.mark.parametrize("name", ["random", "Random"])
def test_no_import_takes_the_place_of_the_random_generators(
    tmp_path: Path, name: str
) -> None:
    save_some(tmp_path / "job", 0.5)
    source = tmp_path / "model.pt"
    torch.save({"a": torch.ones(1)}, source)
    for directory, words in (("job", ["--new"]), ("none", ["--job", "test"])):
        said = run(tmp_path / directory, "import", source, "--state", name, *words)
        assert said.code == 2
        assert "each rank has a 'random' of its own" in said.errors
    assert numbers(tmp_path / "job") == [1]
    assert not (tmp_path / "none").exists()


def test_no_import_takes_the_place_of_what_each_rank_has(tmp_path: Path) -> None:
    class Own(State):
        is_per_replica = True

        def save(self, fileobj: BinaryIO) -> None:
            fileobj.write(b"1")

        def load(self, fileobj: BinaryIO) -> None:
            assert fileobj.read() == b"1"

    def script() -> None:
        Own("own")
        save_all_states()

    run_once(script, tmp_path / "job")
    torch.save({"a": 1}, tmp_path / "own.pt")
    said = run(tmp_path / "job", "import", tmp_path / "own.pt", "--state=own", "--new")
    assert said.code == 2
    assert "00000001 each rank has a 'own' of its own, which one file" in said.errors
    run_once(script, tmp_path / "job")


def test_an_import_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    save_some(tmp_path / "job", 0.5)
    source = tmp_path / "other.pt"
    torch.save({"weight": torch.zeros(2, 4), "scale": 1}, source)
    said = run(tmp_path / "job", "import", source)
    assert said.code == 2
    model = tmp_path / "job" / "checkpoint-00000001" / "model"
    assert said.errors.splitlines()[:4] == [
        f"elasticrun: {source} is not like {model}:",
        "  weight is float32 [2, 4]; it was float32 [2, 3]",
        "  bias is missing; it was float32 [2]",
        "  scale is more than there was",
    ]
    assert numbers(tmp_path / "job") == [1]
    half = {key: each.half() for key, each in make_model().state_dict().items()}
    torch.save(half, tmp_path / "half.pt")
    assert run(tmp_path / "job", "import", tmp_path / "half.pt").code == 0
    assert run(tmp_path / "job", "import", source, "--force").code == 0
    assert numbers(tmp_path / "job") == [3, 2, 1]


def test_an_import_needs_a_job_and_no_live_one(tmp_path: Path) -> None:
    source = tmp_path / "model.pt"
    torch.save(make_model(0.75).state_dict(), source)
    said = run(tmp_path / "job", "import", source)
    assert said.code == 2
    assert "has no checkpoint that could say what the job is called" in said.errors
    assert not (tmp_path / "job").exists()
    with generation(tmp_path / "job"):
        save_all_states()
        said = run(tmp_path / "job", "import", source)
    assert said.code == 2
    assert "is in use by a live job" in said.errors


def test_an_import_executes_nothing(tmp_path: Path) -> None:
    source = tmp_path / "model.pt"
    torch.save({"weight": Surprise(tmp_path / "executed")}, source)
    said = run(tmp_path / "job", "import", source, "--job", "test")
    assert said.code == 2
    assert "cannot be read as values that execute nothing" in said.errors
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (pickle.dumps(Surprise(Path("x"))), "Unsupported operand 149"),
        (pickle.dumps(Surprise(Path("x")), 2), "Unsupported global: GLOBAL "),
        (b"hello world", "KeyError: "),
        (b"", "EOFError"),
    ],
    ids=["new", "old", "text", "empty"],
)
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_only_advice_that_an_import_can_take_is_given(
    tmp_path: Path, data: bytes, reason: str
) -> None:
    (tmp_path / "model.pt").write_bytes(data)
    said = run(tmp_path / "job", "import", tmp_path / "model.pt", "--job", "test")
    assert said.code == 2
    assert f"when they are loaded: {reason}" in said.errors
    assert "\nGive a file of safetensors, or one in which torch.save" in said.errors
    assert "weights_only" not in said.errors
    assert "safe_globals" not in said.errors


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
