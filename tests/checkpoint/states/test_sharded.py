"""States that replicas share out, with one replica: its shard is the whole."""

from __future__ import annotations

import errno
import io
import mmap
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, distribute_module

from elasticrun import (
    CheckpointError,
    Variables,
    register,
    save_all_states,
)
from elasticrun.check.replica.fields import fields_of_state
from elasticrun.checkpoint.states.dtensors import (
    ShardedModuleState,
    ShardedOptimizerState,
)
from elasticrun.checkpoint.states.shards import SavedState
from elasticrun.checkpoint.states.stateful import StatefulState, local_shard
from elasticrun.checkpoint.states.values import load_values
from elasticrun.job.current import current_job
from elasticrun.testing import Job
from tests.checkpoint.inspection.running import run
from tests.support.generations import run_once
from tests.support.one_shard import FILES, build, make_adam, script, train
from tests.support.sharding import whole

pytestmark = pytest.mark.usefixtures("group")


def same(first: Any, second: Any) -> None:
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_states_come_back_sharded_or_not(
    tmp_path: Path, before: bool, after: bool
) -> None:
    saved = run_once(lambda: script(3, is_sharded=before), tmp_path)
    same(run_once(lambda: script(0, is_sharded=after), tmp_path), saved)
    end = run_once(lambda: script(2, is_sharded=after), tmp_path)

    def through() -> Any:
        net = build(is_sharded=after)
        optimizer = make_adam(net)
        train(net, optimizer, 3)
        train(net, optimizer, 2)
        return whole(dict(net.state_dict())), whole(optimizer.state_dict())

    torch.testing.assert_close(end, through())


def test_the_shards_are_raw_bytes_in_files_of_their_own(tmp_path: Path) -> None:
    saved, _ = run_once(lambda: script(1), tmp_path)
    path = tmp_path / "checkpoint-00000001"
    names = {each.name for each in path.iterdir()}
    assert names == {"manifest.json", "random.ranks-0", *FILES}
    with open(path / "model", "rb") as file:
        state = SavedState.decode(load_values(file))
    assert state is not None
    assert list(state.values) == list(saved)
    assert state.values._metadata == build().state_dict()._metadata
    data = (path / "model.rank-0").read_bytes()
    for name, tensor in state.tensors.items():
        (chunk,) = tensor.chunks
        assert chunk.start % 64 == 0
        raw = data[chunk.start :][: saved[name].numel() * 4]
        read = torch.frombuffer(bytearray(raw), dtype=tensor.dtype)
        same(read.view(tensor.shape), saved[name])
    assert state.tensors.keys() == {n for n, _ in build().named_parameters()}


def test_a_save_before_the_first_step_changes_nothing(tmp_path: Path) -> None:
    """Torch's own helper would step the optimizer with gradients of zero."""

    def begin(num_steps: int) -> Any:
        net = build()
        optimizer = make_adam(net)
        register(model=net, optimizer=optimizer)
        save_all_states()
        assert not optimizer.state
        train(net, optimizer, num_steps)
        return whole(optimizer.state_dict())

    def never_saved() -> Any:
        net = build()
        optimizer = make_adam(net)
        train(net, optimizer, 2)
        return whole(optimizer.state_dict())

    run_once(lambda: begin(0), tmp_path)
    same(run_once(lambda: begin(2), tmp_path), never_saved())


def test_the_module_may_come_after_its_optimizer_in_one_call(job: Job) -> None:
    net = build()
    register(optimizer=make_adam(net), model=net)


def test_an_optimizer_needs_its_module(job: Job) -> None:
    net = build()
    with pytest.raises(
        CheckpointError,
        match=r"a parameter of 'adam', with the shape \[3\] in group 0, is in no "
        r"registered module\..*together: register\(model=net, adam=optimizer\)",
    ):
        register(adam=make_adam(net))
    register(net=net)
    register(adam=make_adam(net))


def test_one_optimizer_may_train_two_modules(tmp_path: Path) -> None:
    def two(num_steps: int) -> Any:
        mesh = init_device_mesh("cpu", (1,))
        nets = [fully_shard(nn.Linear(2, 2), mesh=mesh) for _ in range(2)]
        parameters = [*nets[0].parameters(), *nets[1].parameters()]
        optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
        register(first=nets[0], second=nets[1], optimizer=optimizer)
        for _ in range(num_steps):
            sum(net(torch.ones(1, 2)).sum() for net in nets).backward()
            optimizer.step()
        save_all_states()
        return whole(optimizer.state_dict())

    saved = run_once(lambda: two(2), tmp_path)
    same(run_once(lambda: two(0), tmp_path), saved)


def test_an_optimizer_may_get_more_parameters(tmp_path: Path) -> None:
    def unfreeze(*, is_first: bool) -> Any:
        net = build()
        sgd = torch.optim.SGD(net[2].parameters(), 0.1, momentum=0.9)
        rest = {"params": list(net[0].parameters())}
        if not is_first:
            sgd.add_param_group(rest)
        register(model=net, optimizer=sgd)
        if is_first:
            train(net, sgd, 1)
            save_all_states()
            sgd.add_param_group(rest)
            train(net, sgd, 1)
            save_all_states()
        return whole(sgd.state_dict())

    saved = run_once(lambda: unfreeze(is_first=True), tmp_path)
    assert len(saved["state"]) == 4
    same(run_once(lambda: unfreeze(is_first=False), tmp_path), saved)


def test_more_parameters_are_loaded_too() -> None:
    net = build()
    sgd = torch.optim.SGD(net[2].parameters(), 0.1, momentum=0.9)
    state = ShardedOptimizerState("optimizer", sgd)
    state.note_states([ShardedModuleState("model", net)])
    plain = torch.optim.SGD(build(is_sharded=False).parameters(), 0.1, momentum=0.9)
    sgd.add_param_group({"params": [*net[0].parameters(), *net[1].parameters()]})
    plain.param_groups[:] = [
        {**plain.param_groups[0], "params": plain.param_groups[0]["params"][cut]}
        for cut in (slice(4, None), slice(4))
    ]
    file = io.BytesIO()
    StatefulState("optimizer", plain).save(file)
    file.seek(0)
    state.load_with(file, lambda _: io.BytesIO())
    assert [len(group["params"]) for group in sgd.param_groups] == [2, 4]


def test_what_nobody_has_claimed_is_carried_over(tmp_path: Path) -> None:
    saved = run_once(lambda: script(1), tmp_path)
    run_once(save_all_states, tmp_path, keep=1)
    assert not (tmp_path / "checkpoint-00000001").exists()
    same(run_once(lambda: script(0), tmp_path), saved)


class Scaled(nn.Module):
    """Has a parameter of the shape that Adam's count of steps has, too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


def test_a_count_of_steps_stays_plain_beside_a_parameter_like_it(
    tmp_path: Path,
) -> None:
    def scaled(num_steps: int) -> Any:
        net = Scaled()
        distribute_module(net, init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        register(model=net, optimizer=optimizer)
        for _ in range(num_steps):
            net.scale.square().backward()
            optimizer.step()
            optimizer.zero_grad()
        save_all_states()
        return optimizer.state[net.scale]

    saved = run_once(lambda: scaled(2), tmp_path)
    loaded = run_once(lambda: scaled(0), tmp_path)
    assert {key: type(each) for key, each in loaded.items()} == {
        key: type(each) for key, each in saved.items()
    }
    same(whole(loaded), whole(saved))


# What others make of them


def test_a_size_is_that_of_all_files(tmp_path: Path) -> None:
    run_once(lambda: script(1), tmp_path)
    path = tmp_path / "checkpoint-00000001"
    size = sum((path / name).stat().st_size for name in FILES[:2])
    shown = run(tmp_path, "show", 1, "model").lines[0]
    assert shown == f"model  {size / 1024:.1f} KiB"


def test_a_check_reads_shards(job: Job) -> None:
    models = [build(), build(is_sharded=False)]
    states = [ShardedModuleState("model", models[0]), StatefulState("model", models[1])]
    before = [fields_of_state(state) for state in states]
    assert before[0] == before[1]
    with torch.no_grad():
        for model in models:
            model[0].weight.add_(1)
    after = [fields_of_state(state) for state in states]
    assert after[0] == after[1]
    assert after[0]["model.0.weight"] != before[0]["model.0.weight"]


# What does not fit


def test_other_shapes_are_told(tmp_path: Path) -> None:
    run_once(lambda: script(1), tmp_path)

    def wider() -> None:
        register(model=build(width=4))

    with pytest.raises(
        CheckpointError,
        match=r"state 'model' does not fit the FSDPSequential of this program: "
        r"0\.weight is \[3, 5\], here \[4, 5\]; 0\.bias is \[3\], here \[4\]",
    ):
        run_once(wider, tmp_path)


def test_entries_of_another_kind_are_told(tmp_path: Path) -> None:
    def spoil() -> None:
        net = build()
        optimizer = make_adam(net)
        register(model=net, optimizer=optimizer)
        train(net, optimizer, 1)
        optimizer.state[next(net.parameters())]["exp_avg"] = "text"
        save_all_states()

    run_once(spoil, tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"exp_avg of model\.0\.weight is of type str, not a tensor",
    ):
        run_once(lambda: script(0), tmp_path)


@pytest.mark.parametrize("before", [True, False])
def test_other_names_are_told(tmp_path: Path, before: bool) -> None:
    text = "Unexpected" if before else "Missing"

    def biased(bias: bool) -> None:
        register(model=build(bias=bias))
        save_all_states()

    run_once(lambda: biased(before), tmp_path)
    with pytest.raises(CheckpointError, match=rf'(?s){text} key.*"0\.bias"'):
        run_once(lambda: biased(not before), tmp_path)


def test_other_parameters_of_an_optimizer_are_told(tmp_path: Path) -> None:
    run_once(lambda: script(1), tmp_path)

    def some(choose: Callable[[nn.Module], Any]) -> None:
        net = build()
        register(model=net, optimizer=torch.optim.AdamW(choose(net)))

    with pytest.raises(
        CheckpointError, match=r"parameters are others \(only saved: \["
    ):
        run_once(lambda: some(lambda net: net[0].parameters()), tmp_path)
    with pytest.raises(CheckpointError, match="parameters are in other groups"):
        run_once(
            lambda: some(lambda net: [{"params": [each]} for each in net.parameters()]),
            tmp_path,
        )


def test_a_plain_optimizer_of_other_parameters_is_told(tmp_path: Path) -> None:
    run_once(lambda: script(1, is_sharded=False), tmp_path)

    def some() -> None:
        net = build()
        register(model=net, optimizer=torch.optim.AdamW(net[0].parameters()))

    with pytest.raises(
        CheckpointError, match="parameters are others .only saved: .'model.1.bias'"
    ):
        run_once(some, tmp_path)


# What is refused


def test_the_older_fsdp_is_refused(job: Job) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    with pytest.raises(
        CheckpointError,
        match=r"'net' is sharded \(FullyShardedDataParallel\).*Shard it with "
        r"torch\.distributed\.fsdp\.fully_shard",
    ):
        register(net=net)


def test_a_module_without_memory_is_refused(job: Job) -> None:
    with torch.device("meta"):
        net = nn.Linear(2, 2)
    fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(CheckpointError, match=r"'net' is on the meta device.*to_empty"):
        register(net=net)


class Holder:
    """Has a sharded tensor in a state of its own making."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"inner": [self.tensor]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tensor = state_dict["inner"][0]


def test_shards_in_other_objects_are_refused(job: Job) -> None:
    weight = next(build().parameters())
    text = "holds a DTensor, of which each replica has a part, but rank 0 writes"
    with pytest.raises(CheckpointError, match=text):
        Variables(weight=weight)
    register(holder=Holder(weight))
    with pytest.raises(CheckpointError, match=text):
        save_all_states()


def test_a_pending_sum_is_refused(job: Job) -> None:
    net = nn.Linear(2, 2)
    mesh = init_device_mesh("cpu", (1,))
    distribute_module(net, mesh)
    net.register_buffer("sum", DTensor.from_local(torch.ones(2), mesh, [Partial()]))
    register(net=net)
    with pytest.raises(CheckpointError, match=r"'sum' in 'net' has a pending sum"):
        save_all_states()


def test_without_memory_for_all_the_shards_are_written_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out when the shards are in it already: they are saved once more."""
    real, num_given = mmap.mmap, 0

    def give_one(*args: Any, **options: Any) -> mmap.mmap:
        nonlocal num_given
        num_given += 1
        if num_given == 2:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return real(*args, **options)

    def script() -> list[Tensor]:
        net = build()
        register(model=net)
        kept = [own.detach().clone() for own in map(local_shard, net.parameters())]
        Variables(big=torch.zeros(20 << 20))  # More than one chunk of memory.
        current_job().boundary.save(is_awaited=False)
        return kept

    with monkeypatch.context() as patch:
        patch.setattr("mmap.mmap", give_one)
        kept = run_once(script, tmp_path)

    def resumed() -> list[Tensor]:
        net = build()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
        register(model=net)
        return [own.detach() for own in map(local_shard, net.parameters())]

    loaded = run_once(resumed, tmp_path)
    assert all(map(torch.equal, loaded, kept))
    assert num_given == 2
