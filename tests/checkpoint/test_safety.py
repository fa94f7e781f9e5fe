"""Nothing in a checkpoint executes, leads elsewhere, or is open to all by accident."""

from __future__ import annotations

import collections
import importlib
import io
import os
import re
import stat
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elasticrun import (
    AtomicDirectory,
    CheckpointError,
    CheckpointWarning,
    Variables,
    atomic_save,
    current_job,
    init,
    register,
    save_all_states,
)
from elasticrun.checkpoint.states.values import (
    check_loads_safely,
    load_values,
    save_values,
)
from elasticrun.checkpoint.store import CheckpointStore
from tests.support.generations import run_once
from tests.support.stores import Surprise, forge


class Custom:
    """Something that only a full unpickler could rebuild."""

    def __init__(self, value: int) -> None:
        self.value = value


class Own(torch.Tensor):
    """A tensor of a class that torch does not know."""


def noted(tensor: Any, value: Any) -> Any:
    """Give a tensor an attribute, which is saved with it."""
    tensor.note = value
    return tensor


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "weight": torch.ones(2)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


# What executes


def script(value: Any) -> Any:
    """Return what a holder and variables have got back, or keep `value` in both."""
    holder = Holder(value)
    register(holder=holder)
    kept = Variables(thing=value)
    save_all_states()
    return holder.value, kept.thing


def with_attribute(value: Any) -> Any:
    """Return what a module's state dictionary is, which has its versions beside it."""
    values: Any = collections.OrderedDict(weight=torch.ones(2))
    values.versions = value
    return values


@pytest.mark.parametrize(
    "wrap",
    [
        lambda value: value,
        lambda value: [1, (2.0, None, value), {"a": True}],
        lambda value: {"a": {3: [value, "text", torch.ones(2)]}},
        with_attribute,
        lambda value: {value: 1} if value.__hash__ else [value],
        lambda value: {1, "a", value} if value.__hash__ else [value],
        lambda value: [{"a": 1}, {(1, value): 2}] if value.__hash__ else [value],
    ],
)
@pytest.mark.parametrize(
    "value",
    [
        *(
            7,
            True,
            None,
            2.5,
            "text",
            "\ud800",
            -(2**1990),
            2**2038,
            2**2100,
            -(2**2100),
        ),
        *(
            b"",
            b"bytes",
            bytearray(b"x"),
            1j,
            {1},
            {2**2100},
            frozenset({1}),
            (1, (2,)),
        ),
        *(range(3), slice(1), int, Path("x"), Custom(3), np.float64(2), np.ones(2)),
        *(torch.float32, torch.Size([2]), torch.ones(2), collections.Counter("aab")),
        *(collections.defaultdict(list), stat.S_IFMT, [Custom(3)], {"a": np.int64(2)}),
        *(
            nn.Parameter(torch.ones(2)),
            nn.Buffer(torch.ones(2)),
            torch.ones(2).to("meta"),
        ),
        *(nn.parameter.UninitializedParameter(), nn.parameter.UninitializedBuffer()),
        *(Own(), noted(torch.ones(2), "text"), noted(torch.ones(2), Custom(3))),
        *(noted(nn.Parameter(torch.ones(2)), Custom(3)), noted(Own(), Custom(3))),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_refused_is_what_could_not_be_loaded(value: Any, wrap: Any) -> None:
    values, file = wrap(value), io.BytesIO()
    try:
        save_values(values, file)
        file.seek(0)
        load_values(file)
    except Exception:
        with pytest.raises(CheckpointError, match="cannot be loaded safely"):
            check_loads_safely(values, name="values")
    else:
        check_loads_safely(values, name="values")


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"a": 1, "b": [2, {"c": Custom(3)}]}, "(it is 'b.1.c', a Custom)"),
        ({"a": np.ones(2)}, "(it is 'a', a ndarray)"),
        ({"a": {1: {b"x", 1}}, "b": [Own()]}, "(it is 'b.0', a Own)"),
    ],
)
def test_a_value_that_is_refused_is_named(values: Any, where: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(where)):
        check_loads_safely(values, name="values")


@pytest.mark.parametrize("value", [Custom(3), collections.deque(), Own()])
def test_torchs_advice_is_left_out_of_a_refusal(value: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_loads_safely({"a": value}, name="values")
    reason = str(caught.value).splitlines()[0]
    assert type(value).__name__ in reason
    assert "safe_globals" not in reason
    assert "Please" not in reason


@pytest.fixture
def own_is_known() -> Iterator[None]:
    """Let torch load tensors of the class."""
    with torch.serialization.safe_globals([Own]):
        yield


@pytest.mark.usefixtures("own_is_known")
@pytest.mark.parametrize("is_first", [True, False])
def test_each_tensor_with_something_beside_it_is_looked_at(is_first: bool) -> None:
    values = [noted(Own(), {"x": 1}), noted(Own([1.0, 2.0]), {"x": Custom(3)})]
    with pytest.raises(CheckpointError, match="cannot be loaded safely"):
        check_loads_safely(values if is_first else values[::-1], name="values")


@pytest.mark.usefixtures("own_is_known")
def test_of_tensors_that_load_alike_only_the_smallest_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved: list[Any] = []
    save = torch.save
    monkeypatch.setattr(
        torch,
        "save",
        lambda values, *a, **b: saved.append(values) or save(values, *a, **b),
    )
    values = {size: noted(Own(torch.ones(size)), {"x": 1}) for size in (3, 1, 2)}
    check_loads_safely(values, name="values")
    assert [each.numel() for each in saved[0]] == [1]


def test_numbers_and_text_are_not_read_back_while_training_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = {"losses": [0.5] * 10, "steps": [1, 2], "note": "x", "seen": {1, 2}}
    unpickled = []
    load = torch.load
    monkeypatch.setattr(
        torch, "load", lambda *a, **b: unpickled.append(1) or load(*a, **b)
    )
    check_loads_safely({**values, "weight": torch.ones(2)}, name="values")
    assert unpickled == []
    check_loads_safely({**values, "bytes": b"x"}, name="values")
    assert unpickled == [1]


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_what_the_program_lets_torch_load_stays_so() -> None:
    torch.serialization.add_safe_globals([nn.parameter.UninitializedParameter])
    lazy, plain = io.BytesIO(), io.BytesIO()
    torch.save(nn.LazyLinear(3).state_dict(), lazy)
    save_values({"a": 1}, plain)
    for file in (plain, lazy):
        file.seek(0)
    load_values(plain)
    assert "weight" in torch.load(lazy, weights_only=True)
    assert nn.parameter.UninitializedParameter in torch.serialization.get_safe_globals()


def holding_itself(value: Any) -> Any:
    """Put it into itself, or what is beside it."""
    if isinstance(value, torch.Tensor):
        return noted(value, [value])
    value.append(value) if isinstance(value, list) else value.update(a=value)
    return value


@pytest.mark.parametrize(
    ("value", "trusted"),
    [
        *((holding_itself([]), []), (holding_itself({}), [])),
        *((holding_itself(torch.ones(1)), []), (holding_itself([]), ["holder"])),
    ],
    ids=str,
)
def test_what_holds_itself_is_refused(tmp_path: Path, value: Any, trusted: Any) -> None:
    def script() -> None:
        register(holder=Holder(value))
        save_all_states()

    with pytest.raises(CheckpointError, match="'holder' holds an object that contains"):
        run_once(script, tmp_path, trust_pickle=trusted)


@pytest.mark.parametrize("trusted", [["holder", "variables"], ("variables", "holder")])
def test_named_states_take_any_object(tmp_path: Path, trusted: Any) -> None:
    run_once(lambda: script(Custom(3)), tmp_path, trust_pickle=trusted)
    held, kept = run_once(lambda: script(None), tmp_path, trust_pickle=trusted)
    assert held.value == kept.value == 3


def test_what_is_defined_in_a_function_comes_back_too(tmp_path: Path) -> None:
    run_once(
        lambda: script(lambda x: x + 1), tmp_path, trust_pickle=["holder", "variables"]
    )
    held, _ = run_once(
        lambda: script(None), tmp_path, trust_pickle=["holder", "variables"]
    )
    assert held(2) == 3


@pytest.mark.parametrize("given", [True, 5, [5], [None, "variables"], b"x"])
def test_trust_is_in_names_alone(given: Any) -> None:
    with pytest.raises(ValueError, match=r"trust_pickle is .*; give the names of the"):
        init(trust_pickle=given)


@pytest.mark.parametrize("is_module_left", [True, False])
def test_a_class_that_has_moved_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_module_left: bool
) -> None:
    (tmp_path / "moving.py").write_text("class Thing:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)

    def alone() -> None:
        Variables(thing=importlib.import_module("moving").Thing())
        save_all_states()

    run_once(alone, tmp_path / "job", trust_pickle="variables")
    if is_module_left:
        monkeypatch.delattr(importlib.import_module("moving"), "Thing")
        missing = "AttributeError: .*Thing"
    else:
        monkeypatch.delitem(sys.modules, "moving")
        (tmp_path / "moving.py").unlink()
        importlib.invalidate_caches()
        missing = "ModuleNotFoundError: No module named 'moving'"
    with pytest.raises(
        CheckpointError,
        match=rf"checkpoint-00000001/variables: the saved state 'variables' could not "
        rf"be unpickled: {missing}.*\nIt holds .* \(an alias under the old name",
    ):
        run_once(
            lambda: Variables(thing=None), tmp_path / "job", trust_pickle="variables"
        )


def test_one_name_may_be_given_as_it_is(tmp_path: Path) -> None:
    def alone() -> Any:
        kept = Variables(thing=Custom(3))
        save_all_states()
        assert current_job().settings.trust_pickle == {"variables"}
        return kept.thing.value

    assert run_once(alone, tmp_path, trust_pickle="variables") == 3


def test_what_was_saved_by_trust_is_not_loaded_without(tmp_path: Path) -> None:
    def only_holder(value: Any) -> Any:
        holder = Holder(value)
        register(holder=holder)
        save_all_states()
        return holder.value

    run_once(lambda: only_holder(Custom(3)), tmp_path, trust_pickle=["holder"])
    with pytest.raises(
        CheckpointError,
        match=r"(?s)the saved state 'holder' holds objects that only a full "
        r"unpickler could load: .*Custom.*name the state in "
        r"init\(trust_pickle=\['holder'\]\); else",
    ):
        run_once(lambda: only_holder(None), tmp_path)


def test_trust_in_one_state_is_no_trust_in_another(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"init\(trust_pickle=\['variables'\]\)"):
        run_once(lambda: script(Custom(3)), tmp_path, trust_pickle=["holder"])


@pytest.mark.parametrize("name", ["model", "variables", "random.ranks-0"])
def test_a_crafted_file_executes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Somebody puts a file that executes into a checkpoint, and a manifest to fit."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")

    def train() -> None:
        register(model=nn.Linear(1, 1))
        Variables(a=1)
        save_all_states()

    run_once(train, tmp_path / "job")
    path = tmp_path / "job" / "checkpoint-00000001"
    torch.save(Surprise(tmp_path / "executed"), path / name)
    data = (path / name).read_bytes()
    store = CheckpointStore(tmp_path / "job", job="test")
    forge(path, name, size=len(data), crc32=f"{zlib.crc32(data):08x}")
    found = store.find_newest()
    assert found is not None  # The manifest fits: nothing but the loading is left.
    with pytest.raises(CheckpointError):
        run_once(train, tmp_path / "job")
    assert not (tmp_path / "executed").exists()


# What leads elsewhere


@pytest.mark.parametrize("name", ["../model", "/etc/passwd", "..", "a/b"])
def test_a_manifest_cannot_point_outside(tmp_path: Path, name: str) -> None:
    def train() -> None:
        Variables(a=1)
        save_all_states()

    run_once(train, tmp_path / "job")
    run_once(train, tmp_path / "job")
    path = tmp_path / "job" / "checkpoint-00000002"
    forge(path, "variables", name=name)
    store = CheckpointStore(tmp_path / "job", job="test")
    with pytest.warns(CheckpointWarning, match="00000002 is skipped: .*is no manifest"):
        found = store.find_newest()
    assert found is not None
    assert found.number == 1


# Who can read and write


@pytest.fixture
def umask() -> Any:
    """Return what sets the umask for the rest of the test."""
    old = os.umask(0o022)
    yield os.umask
    os.umask(old)


def modes(path: Path) -> dict[int, set[bool]]:
    """Return the modes of all below, and whether directories have them."""
    found = collections.defaultdict(set)
    for each in (path, *path.rglob("*")):
        found[stat.S_IMODE(each.stat().st_mode)].add(each.is_dir())
    return dict(found)


@pytest.mark.parametrize("mask", [0o077, 0o022, 0o007])
def test_modes_follow_the_umask(tmp_path: Path, umask: Any, mask: int) -> None:
    umask(mask)
    run_once(save_all_states, tmp_path / "job")
    with AtomicDirectory(tmp_path / "exports").prepare() as version:
        (version / "text").touch()
    (tmp_path / "saved").mkdir()
    atomic_save(1, tmp_path / "saved" / "model.pt")
    expected = {0o777 & ~mask: {True}, 0o666 & ~mask: {False}}
    for name in ("job", "exports", "saved"):
        assert modes(tmp_path / name) == expected


def test_a_directory_open_to_all_is_warned_of(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.warns(CheckpointWarning) as caught:
        run_once(save_all_states, tmp_path)
    assert [str(warning.message) for warning in caught] == [
        (
            f"{tmp_path} can be written to by everybody (mode 777). Remove that right: "
            f"chmod o-w {tmp_path}. Whoever can change a checkpoint decides what the "
            "job computes."
        )
    ]
    tmp_path.chmod(0o775)
    run_once(save_all_states, tmp_path)  # The group is this user's own.


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory to another group")
@pytest.mark.filterwarnings("error")
def test_a_directory_open_to_a_group_is_warned_of_before_anything_is_written(
    tmp_path: Path,
) -> None:
    os.chown(tmp_path, -1, 12345)
    tmp_path.chmod(0o775)
    with pytest.raises(CheckpointWarning, match="by the group 12345 .*chmod g-w"):
        run_once(save_all_states, tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_module_comes_back_as_it_was(tmp_path: Path) -> None:
    """Before its first batch it has a dtype and a device, but no shape."""

    def script(*, runs: bool) -> bool:
        net = nn.Sequential(nn.LazyLinear(3))
        register(net=net)
        has_shape = not nn.parameter.is_lazy(net[0].weight)
        if runs:
            net(torch.ones(2, 5))
        save_all_states()
        return has_shape

    assert not run_once(lambda: script(runs=False), tmp_path)
    assert not run_once(lambda: script(runs=True), tmp_path)
    assert run_once(lambda: script(runs=False), tmp_path)


def test_what_a_state_dictionary_has_beside_it_stays(tmp_path: Path) -> None:
    values = with_attribute(2)
    values["number"] = np.float64(3.0)  # So that the dictionary is made anew.
    save_values(values, file := io.BytesIO())
    file.seek(0)
    assert vars(load_values(file)) == {"versions": 2}
