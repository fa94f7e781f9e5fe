"""States: when they load, what they refuse, and how unclaimed ones are carried over."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from torch import nn

from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    CheckpointError,
    State,
    StateNameError,
    Variables,
    load_state,
    register,
    save_all_states,
)
from elasticrun.testing import Job
from tests.support.data import Numbers
from tests.support.generations import run_once


class Tokens(State):
    """A state of the user's own, with values set after `super().__init__`."""

    def __init__(self, name: str = "tokens") -> None:
        super().__init__(name)
        self.seen = 0
        self.num_syncs = 0

    def sync(self) -> None:
        self.num_syncs += 1

    def save(self, fileobj: BinaryIO) -> None:
        fileobj.write(str(self.seen).encode())

    def load(self, fileobj: BinaryIO) -> None:
        self.seen = int(fileobj.read())


def test_a_state_loads_once_its_constructor_has_returned(tmp_path: Path) -> None:
    def first() -> None:
        tokens = Tokens()
        tokens.seen = 42
        save_all_states()
        assert tokens.num_syncs == 1

    run_once(first, tmp_path)
    assert run_once(lambda: Tokens().seen, tmp_path) == 42


def test_a_state_can_be_loaded_again(tmp_path: Path) -> None:
    def script() -> None:
        tokens = Tokens()
        assert not load_state(tokens)
        tokens.seen = 3
        save_all_states()
        tokens.seen = 4
        assert load_state(tokens)
        assert tokens.seen == 3

    run_once(script, tmp_path)


def test_variables_keep_plain_values(tmp_path: Path) -> None:
    values = {
        "number": 1,
        "real": 0.5,
        "text": "best",
        "nothing": None,
        "flag": True,
        "pair": (1, [2, {3}]),
        "table": {"a": 1, (1, 2): OrderedDict(b=2)},
        "data": b"\x00",
        "tensor": torch.arange(3),
    }

    def first() -> None:
        kept = Variables(**dict.fromkeys(values))
        for name, value in values.items():
            setattr(kept, name, value)
        save_all_states()

    def second() -> dict[str, Any]:
        return dict(vars(Variables(**dict.fromkeys(values))))

    run_once(first, tmp_path)
    loaded = run_once(second, tmp_path)
    assert torch.equal(loaded.pop("tensor"), values.pop("tensor"))
    assert loaded == values
    assert type(loaded["pair"]) is tuple


SCALARS = [
    *(np.float16(0.1), np.float32(0.1), np.float64(0.1), np.longdouble(0.1)),
    *(np.int8(-3), np.uint64(2**64 - 1), np.bool_(True), np.complex64(1 + 2j)),
    *(np.datetime64("2026-01-02T03:04:05.678901234"), np.timedelta64(5, "m")),
    *(np.str_("text"), np.str_(""), np.bytes_(b"bytes"), np.float32("nan")),
]


@pytest.mark.parametrize("trusts", [False, True])
def test_numpys_scalars_come_back_as_they_were(tmp_path: Path, trusts: bool) -> None:
    def script(values: list[Any]) -> Any:
        kept = Variables(row=values)
        holder = Holder({"row": values})
        register(holder=holder)
        save_all_states()
        return [*kept.row, *holder.value["row"]]

    trusted = {"trust_pickle": ["variables", "holder"]} if trusts else {}
    run_once(lambda: script(SCALARS), tmp_path, **trusted)
    loaded = run_once(lambda: script([]), tmp_path, **trusted)
    for before, now in zip(SCALARS * 2, loaded, strict=True):
        assert type(now) is type(before)
        assert now.dtype == before.dtype
        assert now.tobytes() == before.tobytes()


def test_a_sum_in_single_precision_goes_on_in_it(tmp_path: Path) -> None:
    def script() -> Any:
        kept = Variables(sum=np.float32(0))
        for _ in range(100):
            kept.sum += np.float32(0.1)
        save_all_states()
        return kept.sum

    run_once(script, tmp_path)
    calm = np.float32(0)
    for _ in range(200):
        calm += np.float32(0.1)
    assert run_once(script, tmp_path) == calm


def test_a_record_of_numpy_is_refused(job: Job) -> None:
    record = np.zeros(1, [("a", "i4")])[0]
    with pytest.raises(CheckpointError, match="it is 'value', a void"):
        Variables(value=record)


def test_variables_set_later_come_back_too_and_others_of_two_names_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def first() -> None:
        kept = Variables(a=1)
        kept.b = 2
        save_all_states()

    run_once(first, tmp_path)
    assert run_once(lambda: repr(Variables(a=0)), tmp_path) == "Variables(a=1, b=2)"
    assert not caplog.text
    run_once(lambda: Variables(a=0, best=0), tmp_path)
    assert "nothing for best in the checkpoint" in caplog.text
    assert "nobody has asked for its b." in caplog.text


def test_two_sets_of_variables_need_two_names(job: Job) -> None:
    Variables(a=1)
    Variables(a=1, name="others")
    with pytest.raises(
        StateNameError,
        match=r"the name 'variables' is taken by another one, made before\. Two "
        r"states of one name would overwrite each other in each checkpoint\. Give one "
        r"of them another name \(name=, or another keyword of register\); or, if "
        r"this is one that is made again in each epoch or batch, make it once, before "
        r"the epoch loop\. An Accumulator without a name may be made in each epoch\.",
    ):
        Variables(a=1)


class Custom:
    """Something that only a full unpickler could rebuild."""


@pytest.mark.parametrize("value", [Custom(), Custom, np.arange(3), print])
def test_an_unsafe_value_is_refused_when_it_is_given(job: Job, value: Any) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"the state 'variables' holds something that cannot be loaded safely: ",
    ):
        Variables(thing=value)
    Variables(thing=1)  # The name is still free.


def test_an_unsafe_value_that_comes_later_is_refused_when_it_is_saved(
    tmp_path: Path,
) -> None:
    def script() -> None:
        kept = Variables(a=1)
        save_all_states()
        kept.a = Custom()
        with pytest.raises(
            CheckpointError,
            match=r"(?s)'variables' holds something that cannot be loaded safely: "
            r".*Custom.*A checkpoint executes nothing when it is loaded, so it takes "
            r"tensors, numbers, text, and lists, tuples, sets and dictionaries of "
            r"them\. Convert the rest \(arrays with torch\.as_tensor\), or write a "
            r"State with save and load\.",
        ):
            save_all_states()

    run_once(script, tmp_path)
    assert run_once(lambda: Variables(a=0).a, tmp_path) == 1


class Holder:
    """A `Stateful` around any value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


def test_an_unsafe_value_in_a_registered_object_is_refused_at_any_save(
    tmp_path: Path,
) -> None:
    def script() -> None:
        holder = Holder(1)
        register(holder=holder)
        save_all_states()
        holder.value = Custom()
        with pytest.raises(CheckpointError, match="'holder' holds something that"):
            save_all_states()

    def check() -> Any:
        holder = Holder(0)
        register(holder=holder)
        return holder.value

    run_once(script, tmp_path)
    assert run_once(check, tmp_path) == 1


def test_anything_stateful_is_kept(tmp_path: Path) -> None:
    def script(value: float) -> Any:
        model = nn.Linear(2, 1)
        nn.init.constant_(model.weight, value)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        average = torch.optim.swa_utils.AveragedModel(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        holder = Holder(value)
        register(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            average=average,
            scaler=scaler,
            holder=holder,
        )
        if value:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            scheduler.step()
            average.update_parameters(model)
            save_all_states()
        return (
            model.weight.tolist(),
            optimizer.state_dict()["state"][0]["exp_avg"].tolist(),
            optimizer.param_groups[0]["lr"],
            scheduler.last_epoch,
            average.module.weight.tolist(),
            int(average.n_averaged),
            scaler.get_scale(),
            holder.value,
        )

    saved = run_once(lambda: script(3.0), tmp_path)
    loaded = run_once(lambda: script(0.0), tmp_path)
    assert loaded == saved
    assert saved[2] == 0.05


def test_a_class_is_refused(job: Job) -> None:
    with pytest.raises(TypeError, match=r"register\(net=Linear\): it is a class"):
        register(net=nn.Linear)


def test_what_is_not_stateful_is_refused(job: Job) -> None:
    with pytest.raises(
        TypeError,
        match=r"register\(net=dict\): it has no state_dict\(\) and "
        r"load_state_dict\(\)\. Give it both, use Variables for plain values, or "
        r"write a State with save and load\.",
    ):
        register(net={})


def test_all_objects_are_looked_at_before_any_is_registered(job: Job) -> None:
    with pytest.raises(TypeError, match=r"register\(second=int\)"):
        register(first=nn.Linear(1, 1), second=1)
    register(first=nn.Linear(1, 1))


def test_a_state_that_does_not_fit_says_what_differs(tmp_path: Path) -> None:
    def script(width: int) -> None:
        register(model=nn.Linear(2, width))
        save_all_states()

    run_once(lambda: script(3), tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"(?s)the saved state 'model' does not fit the Linear of this program: "
        r".*size mismatch for weight.*Build the object as it was when it was saved",
    ):
        run_once(lambda: script(4), tmp_path)


def test_a_name_is_taken_once(job: Job) -> None:
    Tokens("tokens")
    with pytest.raises(StateNameError, match="name 'tokens' is taken by the Tokens"):
        register(tokens=nn.Linear(1, 1))
    net = nn.Linear(1, 1)
    AdaptiveDataParallel(net)
    with pytest.raises(StateNameError, match="name 'model' is taken by the [A-Z]"):
        register(model=net)
    # Some file systems would not tell these apart.
    with pytest.raises(StateNameError, match="name 'Tokens' is taken by the Tokens"):
        Tokens("Tokens")


@pytest.mark.parametrize(
    "name",
    ["", "a/b", "../a", ".hidden", "a b", "ä", "x" * 101, "random.rank-3", "a\n"],
)
def test_a_name_must_be_a_plain_file_name(job: Job, name: str) -> None:
    text = re.escape(f"{name!r} cannot name a state: it becomes a file name in each")
    with pytest.raises(StateNameError, match=text):
        Tokens(name)


@pytest.mark.parametrize("name", ["random", "manifest.json", "Manifest.json.tmp"])
def test_names_of_the_jobs_own_files_are_taken(tmp_path: Path, name: str) -> None:
    def script() -> None:
        with pytest.raises(StateNameError):
            Tokens(name)
        assert save_all_states()

    run_once(script, tmp_path)


def test_a_state_claimed_only_in_a_later_phase_is_carried_over(tmp_path: Path) -> None:
    def first_phase() -> None:
        tokens = Tokens()
        tokens.seen = 42
        save_all_states()

    def phase_without_it() -> None:
        for _ in range(5):  # More than are kept: that of the first phase is gone.
            save_all_states()

    run_once(first_phase, tmp_path)
    run_once(phase_without_it, tmp_path)
    run_once(phase_without_it, tmp_path, keep=1)
    assert not (tmp_path / "checkpoint-00000001").exists()
    assert run_once(lambda: Tokens().seen, tmp_path) == 42


def test_a_state_claimed_after_a_save_in_the_same_generation_is_loaded(
    tmp_path: Path,
) -> None:
    def first() -> None:
        Tokens().seen = 42
        save_all_states()

    def second() -> int:
        save_all_states()
        save_all_states()
        tokens = Tokens()
        seen, tokens.seen = tokens.seen, 43
        save_all_states()
        return seen

    run_once(first, tmp_path)
    assert run_once(second, tmp_path) == 42
    assert run_once(lambda: Tokens().seen, tmp_path) == 43


def test_a_named_loader_of_a_later_phase_keeps_its_fingerprint(tmp_path: Path) -> None:
    def script(num_samples: int) -> None:
        AdaptiveDataLoader(Numbers(num_samples), 2, name="finetune")
        save_all_states()

    run_once(lambda: script(10), tmp_path)
    run_once(save_all_states, tmp_path)
    with pytest.raises(CheckpointError, match="had 10 samples in the data set"):
        run_once(lambda: script(11), tmp_path)


def test_a_state_that_fails_to_save_fails_the_job_and_keeps_the_checkpoint(
    tmp_path: Path,
) -> None:
    class Failing(Tokens):
        def save(self, fileobj: BinaryIO) -> None:
            if self.seen:
                raise KeyError("seen")
            super().save(fileobj)

    def script() -> None:
        failing = Failing()
        save_all_states()
        failing.seen = 1
        save_all_states()

    with pytest.raises(KeyError, match="seen"):
        run_once(script, tmp_path)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [
        "checkpoint-00000001"
    ]
    assert run_once(lambda: Tokens().seen, tmp_path) == 0


def test_what_is_per_replica_has_a_file_for_each(tmp_path: Path) -> None:
    class Own(Tokens):
        is_per_replica = True

    def first() -> list[str]:
        Own().seen = 5
        path = save_all_states()
        assert path
        return sorted(file.name for file in path.iterdir())

    assert run_once(first, tmp_path) == [
        "manifest.json",
        "random.ranks-0",
        "tokens.rank-0",
    ]
    assert run_once(lambda: Own().seen, tmp_path) == 5


@pytest.mark.parametrize("before", [True, False])
def test_a_state_that_gets_files_of_the_other_kind_is_told(
    tmp_path: Path, before: bool
) -> None:
    class Own(Tokens):
        is_per_replica = True

    def script(kind: type[Tokens], name: str = "tokens") -> int:
        tokens = kind(name)
        tokens.seen += 5
        save_all_states()
        return tokens.seen

    first, second = (Own, Tokens) if before else (Tokens, Own)
    kinds = ["a file of its own for each rank", "one file for all ranks"]
    was, now = kinds if before else kinds[::-1]
    run_once(lambda: script(first), tmp_path)
    with pytest.raises(
        CheckpointError,
        match=rf"checkpoint-00000001 has {was} of 'tokens', but in this program it "
        rf"has {now} \(is_per_replica = {not before}\).*Set is_per_replica = {before}",
    ):
        run_once(lambda: script(second), tmp_path)
    assert run_once(lambda: script(first), tmp_path) == 10


def test_a_scheduler_that_is_made_late_does_not_set_the_rate_back(
    tmp_path: Path,
) -> None:
    def script(*, is_late: bool) -> tuple[float, int]:
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), 1.0, momentum=0.9)
        if is_late:
            register(optimizer=optimizer)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.1**n)
        if not is_late:
            register(optimizer=optimizer)
        register(scheduler=scheduler)
        if scheduler.last_epoch == 0:
            optimizer.step()
            scheduler.step()
            save_all_states()
        return optimizer.param_groups[0]["lr"], scheduler.last_epoch

    for is_late in (False, True):
        assert run_once(lambda: script(is_late=is_late), tmp_path) == (0.1, 1)  # noqa: B023


class WarmUp:
    """A scheduler that is not torch's: it writes its first rate when it is made."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.num_steps = 0
        self._set_rate()

    def _set_rate(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 * (1 + self.num_steps)

    def step(self) -> None:
        self.num_steps += 1
        self._set_rate()

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps = state["num_steps"]


@pytest.mark.parametrize("way", ["wrapped", "registered before", "registered behind"])
def test_a_scheduler_of_the_programs_own_does_not_set_the_rate_back(
    tmp_path: Path, way: str
) -> None:
    def script() -> float:
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), 1.0, momentum=0.9)
        if way == "registered behind":
            AdaptiveDataParallel(net, optimizer)
        scheduler = WarmUp(optimizer)
        if way == "wrapped":
            AdaptiveDataParallel(net, optimizer, scheduler)
        elif way == "registered before":
            AdaptiveDataParallel(net, optimizer)
        if way != "wrapped":
            register(scheduler=scheduler)
        loaded: float = optimizer.param_groups[0]["lr"]
        scheduler.step()
        save_all_states()
        return loaded

    rates = [run_once(script, tmp_path) for _ in range(3)]
    assert rates == pytest.approx([0.1, 0.2, 0.3])


def test_a_rate_that_the_script_had_set_is_kept_behind_a_late_scheduler(
    tmp_path: Path,
) -> None:
    def script() -> float:
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), 1.0)
        AdaptiveDataParallel(net, optimizer)
        register(scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 10))
        loaded: float = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = 0.5
        save_all_states()
        return loaded

    assert [run_once(script, tmp_path) for _ in range(2)] == [1.0, 0.5]


def test_options_that_the_script_sets_stay_behind_a_scheduler_that_keeps_the_rate(
    tmp_path: Path,
) -> None:
    def script(weight_decay: float) -> float:
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), 1.0)
        AdaptiveDataParallel(net, optimizer)
        optimizer.param_groups[0]["weight_decay"] = weight_decay
        register(scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 10))
        save_all_states()
        kept: float = optimizer.param_groups[0]["weight_decay"]
        return kept

    assert run_once(lambda: script(0.1), tmp_path) == 0.1
    assert run_once(lambda: script(0.2), tmp_path) == 0.2


@pytest.mark.parametrize("is_within", [False, True])
def test_another_kind_of_scheduler_is_refused_and_another_plan_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_within: bool
) -> None:
    of = torch.optim.lr_scheduler

    def script(make: Callable[[Any], Any]) -> None:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
        scheduler = make(optimizer)
        if is_within:
            warm_up = of.LinearLR(optimizer)
            scheduler = of.SequentialLR(optimizer, [warm_up, scheduler], [3])
        register(scheduler=scheduler)
        save_all_states()

    def cosine(num_steps: int) -> Callable[[], None]:
        return lambda: script(lambda own: of.CosineAnnealingLR(own, num_steps))

    run_once(cosine(10), tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"is not that of a StepLR: it has T_max, eta_min, and lacks gamma, s",
    ):
        run_once(lambda: script(lambda own: of.StepLR(own, 10)), tmp_path)
    run_once(cosine(10), tmp_path)
    assert "goes on with" not in caplog.text
    run_once(cosine(20), tmp_path)
    assert caplog.text.count("goes on with") == 1
    assert "goes on with T_max = 10, as it was saved, not with 20" in caplog.text


@pytest.mark.parametrize("is_within", [False, True])
def test_another_plan_of_one_cycle_is_refused_and_another_rate_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_within: bool
) -> None:
    of = torch.optim.lr_scheduler

    def script(num_steps: int = 40, max_lr: float = 0.1, pct_start: float = 0.3) -> Any:
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        made = of.OneCycleLR(
            optimizer, max_lr, num_steps, div_factor=2, pct_start=pct_start
        )
        scheduler: Any = made
        if is_within:
            scheduler = of.SequentialLR(
                optimizer, [of.ConstantLR(optimizer), made], [3]
            )
        AdaptiveDataParallel(net, optimizer, scheduler)
        save_all_states()
        return optimizer.param_groups[0]["max_lr"]

    run_once(script, tmp_path)
    for changed in ({"num_steps": 50}, {"num_steps": 35}, {"pct_start": 0.5}):
        here = changed.get("num_steps", 40)
        with pytest.raises(
            CheckpointError,
            match=rf"that of a OneCycleLR with total_steps = 40, .* with {here} here",
        ):
            run_once(lambda changed=changed: script(**changed), tmp_path)
    assert "goes on" not in caplog.text
    assert run_once(lambda: script(max_lr=0.4), tmp_path) == 0.1
    assert "max_lr / div_factor = [0.05], as it was saved, not with [0.2]" in (
        caplog.text
    )


class Keeping(nn.Module):
    """Keeps the very tensors that it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("values", torch.ones(1 << 16))

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any
    ) -> None:
        self.values = state_dict[f"{prefix}values"]


@pytest.mark.parametrize("kind", [Keeping, lambda: nn.BatchNorm1d(1 << 16)])
def test_what_a_module_has_loaded_needs_the_file_no_more(
    tmp_path: Path, kind: Callable[[], nn.Module]
) -> None:
    def first() -> dict[str, Any]:
        module = kind()
        for tensor in module.state_dict().values():
            tensor.fill_(3)
        register(module=module)
        save_all_states()
        return module.state_dict()

    def second() -> dict[str, Any]:
        module = kind()
        register(module=module)
        for file in tmp_path.glob("checkpoint-*/*"):
            file.write_bytes(b"")  # What was mapped would be a bus error from here on.
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()
        return module.state_dict()

    saved, loaded = run_once(first, tmp_path), run_once(second, tmp_path)
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.spectral_norm(nn.Linear(2, 2))
        self.register_buffer("kept", torch.zeros(2))
        self.bias, self.center = torch.zeros(2), torch.zeros(2)
        self.fixed = torch.zeros(2)
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.bias += 0.1
        self.kept += 1
        self.center = 0.9 * self.center + x
        self.last = x + self.fixed
        return self.inner(x)


@pytest.mark.parametrize("is_parallel", [False, True])
def test_what_a_module_changes_and_no_checkpoint_has_is_named_once(
    job: Job, is_parallel: bool, caplog: pytest.LogCaptureFixture
) -> None:
    net: nn.Module = nn.Sequential(Router())
    if is_parallel:
        net = AdaptiveDataParallel(net)
    else:
        register(model=net)
    save_all_states()
    assert not caplog.messages
    for _ in range(2):
        net(torch.ones(2)).sum().backward()
        save_all_states()
    [said] = caplog.messages
    inner = "module." * is_parallel
    assert f"no checkpoint: {inner}0.bias, {inner}0.center. After" in said
