"""One replica on a GPU: device, generators, and a restart that does not show."""

from __future__ import annotations

import importlib.util
import logging
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import elasticrun
from elasticrun.replicas.gpus import count_gpus
from elasticrun.testing import run_generation
from tests.support.held import held_writer
from tests.support.stage import wait_until


def train(checkpoint_dir: str, stop_after: int | None = None) -> dict[str, Any]:
    """Train a net with dropout on the GPU, and return what it ended with."""
    import elasticrun as er

    torch.manual_seed(0)
    er.init(checkpoint_dir, save_interval="off")
    device = er.device()
    net = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.Adam(net.parameters())
    model = er.AdaptiveDataParallel(net, optimizer)
    inputs = torch.arange(80.0).reshape(10, 8) / 80
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = er.AdaptiveDataLoader(data, 4, shuffle=True, pin_memory=True)
    num_steps = 0
    for _ in er.remaining_epochs_until(3):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            num_steps += 1
            if num_steps == stop_after:
                er.request_stop()
    momentum = next(iter(optimizer.state.values()))["exp_avg"]
    return {
        "device": str(device),
        "devices": {str(p.device) for p in net.parameters()} | {str(momentum.device)},
        "parameters": [p.detach().cpu() for p in net.parameters()],
    }


def test_a_restart_does_not_show(tmp_path: Path) -> None:
    (whole,) = run_generation(train, 1, str(tmp_path / "whole"))
    assert run_generation(train, 1, str(tmp_path / "cut"), 4) == [None]
    (resumed,) = run_generation(train, 1, str(tmp_path / "cut"))
    for one, other in zip(whole["parameters"], resumed["parameters"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_everything_is_on_the_replicas_own_gpu(tmp_path: Path) -> None:
    assert run_generation(train, 1, str(tmp_path), 4) == [None]
    (resumed,) = run_generation(train, 1, str(tmp_path))
    assert resumed["device"] == "cuda:0"
    assert resumed["devices"] == {"cuda:0"}


def measure_noise(checkpoint_dir: str, kind: str) -> list[float]:
    """Return what the noise of a fixed net's gradients is, on the GPU or not."""
    import elasticrun as er

    backend = "gloo" if kind == "cpu" else "auto"
    er.init(checkpoint_dir, save_interval="off", backend=backend)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(er.device())
    assert next(net.parameters()).is_cuda != (kind == "cpu")
    if kind == "fsdp":
        fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    model = er.AdaptiveDataParallel(net, optimizer, measure_noise=True)
    scaler = torch.amp.GradScaler("cuda", enabled=kind == "fp16")
    er.register(scaler=scaler)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(64, 8, generator=generator))
    loader = er.AdaptiveDataLoader(data, 8, shuffle=True)
    for (x,) in loader.batches(32 * 16):
        optimizer.zero_grad()
        x = x.to(er.device())
        with torch.autocast("cuda", torch.float16, enabled=kind == "fp16"):
            output = model(x)
        loss = nn.functional.mse_loss(output.float(), x.sum(1, keepdim=True))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    noise = model.noise
    assert noise.num_steps == 8
    return [noise.covariance, noise.squared_norm]


def test_noise_is_the_same_on_a_gpu(tmp_path: Path) -> None:
    expected, *found = [
        run_generation(measure_noise, 1, str(tmp_path / kind), kind)[0]
        for kind in ("cpu", "plain", "fp16", "fsdp")
    ]
    for values, tolerance in zip(found, (1e-4, 3e-2, 1e-4), strict=True):
        torch.testing.assert_close(values, expected, rtol=tolerance, atol=1e-6)


def draw_after_restart(checkpoint_dir: str, *, stops: bool) -> list[float]:
    """Return what the GPU's generator draws in each batch."""
    import elasticrun as er

    er.init(checkpoint_dir, save_interval="off")
    torch.cuda.manual_seed(1)
    loader = er.AdaptiveDataLoader(TensorDataset(torch.arange(6)), 1)
    drawn = []
    for _ in loader:
        drawn.append(float(torch.rand(1, device=er.device())))
        if stops and len(drawn) == 3:
            er.request_stop()
    return drawn


def test_the_gpus_generator_comes_back(tmp_path: Path) -> None:
    (whole,) = run_generation(
        lambda: draw_after_restart(str(tmp_path / "whole"), stops=False), 1
    )
    directory = str(tmp_path / "cut")
    run_generation(lambda: draw_after_restart(directory, stops=True), 1)
    (rest,) = run_generation(lambda: draw_after_restart(directory, stops=False), 1)
    assert rest == whole[3:]


def hold_memory_until_stopped(checkpoint_dir: str) -> None:
    import elasticrun as er

    er.init(checkpoint_dir, save_interval="off")
    held = torch.ones(2**20, device=er.device())
    loader = er.AdaptiveDataLoader(TensorDataset(torch.zeros(1000)), 4)
    for _ in er.remaining_epochs_until(10**9):
        for (x,) in loader:
            held[0] = float(x[0])


def test_status_shows_memory_and_utilization(tmp_path: Path) -> None:
    """The latter only where nvidia-ml-py is there to ask; a slice is not told of."""
    job = elasticrun.launch(
        hold_memory_until_stopped, str(tmp_path), replicas=1, wait=False
    )

    def held() -> list[int]:
        return [each["gpu_memory"] or 0 for each in job.status()["members"]]

    wait_until(lambda: sum(held()) >= 2**22)
    [utilization] = [each["gpu_utilization"] for each in job.status()["members"]]
    if importlib.util.find_spec("pynvml") is not None and not slices():
        assert 0 <= utilization <= 100
    job.stop()
    with pytest.raises(elasticrun.ElasticRunError, match="stopped"):
        job.result()


def save_in_flight(checkpoint_dir: str) -> list[torch.Tensor]:
    """Change everything in place while a thread writes; return what was captured."""
    import elasticrun as er

    er.init(checkpoint_dir, save_interval="off", save_every=2)
    net = nn.Linear(1000, 5000).to(er.device())  # Some megabytes, and a small bias.
    er.register(net=net)
    kept: list[torch.Tensor] = []
    with held_writer() as held:
        loader = er.AdaptiveDataLoader(TensorDataset(torch.arange(3)), 1)
        for (x,) in loader:
            if loader.batch_index == 2:
                held.wait_for_writer()
                kept = [p.detach().clone().cpu() for p in net.parameters()]
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.mul_(2).add_(float(x[0]))
        held.let_go()
    return kept


def test_what_is_saved_is_what_was_at_the_boundary(tmp_path: Path) -> None:
    (kept,) = run_generation(save_in_flight, 1, str(tmp_path))
    saved = torch.load(tmp_path / "checkpoint-00000001" / "net", weights_only=True)
    assert [value.device.type for value in saved.values()] == ["cuda", "cuda"]
    for value, expected in zip(saved.values(), kept, strict=True):
        assert torch.equal(value.cpu(), expected)


def draw_on_a_shared_gpu(checkpoint_dir: str, *, stops: bool) -> list[float]:
    """Draw on a GPU that is not the replica's own, since two use it."""
    import elasticrun as er

    er.init(checkpoint_dir, save_interval="off", backend="gloo")
    assert er.device().type == "cpu"
    torch.cuda.manual_seed(1 + er.rank())
    drawn = []
    for _ in er.AdaptiveDataLoader(TensorDataset(torch.arange(2000)), 2):
        drawn.append(float(torch.rand(1, device="cuda:0")))
        if stops and len(drawn) == 3:
            er.request_stop()
    return drawn


def test_the_generator_of_a_shared_gpu_comes_back(tmp_path: Path) -> None:
    directory = str(tmp_path / "whole")
    calm = run_generation(lambda: draw_on_a_shared_gpu(directory, stops=False), 2)
    directory = str(tmp_path / "cut")
    run_generation(lambda: draw_on_a_shared_gpu(directory, stops=True), 2)
    rest = run_generation(lambda: draw_on_a_shared_gpu(directory, stops=False), 2)
    assert 0 < len(rest[0]) <= 997  # Where the two agree may be some batches later.
    assert rest == [drawn[-len(rest[0]) :] for drawn in calm]


def device_and_warnings() -> tuple[str, list[str]]:
    import elasticrun as er

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("elasticrun").addHandler(handler)
    return str(er.device()), said


def test_two_replicas_that_see_one_gpu_say_why_they_have_none() -> None:
    only = {"CUDA_VISIBLE_DEVICES": "0"}
    (first, said), (second, _) = run_generation(device_and_warnings, 2, variables=only)
    assert first == second == "cpu"
    assert "rank 0 and rank 1" in said[0]
    assert "see the same GPU" in said[0]


@pytest.mark.parametrize(("visible", "device"), [("0", "cuda:0"), ("", "cpu")])
def test_what_the_variable_shows_is_used(visible: str, device: str) -> None:
    variables = {"CUDA_VISIBLE_DEVICES": visible}
    ((found, _),) = run_generation(device_and_warnings, 1, variables=variables)
    assert found == device


def slices() -> list[str]:
    """Return the slices (MIG) of this machine's GPUs, as the driver names them."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    listed = subprocess.run([program, "-L"], capture_output=True, text=True, check=True)
    return re.findall(r"UUID: (MIG-[^)]+)", listed.stdout)


def test_a_slice_is_a_gpu(tmp_path: Path) -> None:
    """It is counted as one, given to the replica, and trained on through a restart."""
    if not slices():
        pytest.skip("no GPU here is cut into slices (MIG)")
    visible = {"CUDA_VISIBLE_DEVICES": slices()[0]}
    assert count_gpus(visible) == 1
    ((found, _),) = run_generation(device_and_warnings, 1, variables=visible)
    assert found == "cuda:0"
    path = str(tmp_path)
    assert run_generation(train, 1, path, 4, variables=visible) == [None]
    (resumed,) = run_generation(train, 1, path, variables=visible)
    assert resumed["devices"] == {"cuda:0"}


class Kept:
    """A tensor in host memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.tensor.copy_(state["tensor"])


def copy_to_the_host(checkpoint_dir: str) -> None:
    """Save while a copy of a gibibyte to pinned memory is under way."""
    import elasticrun as er

    er.init(checkpoint_dir, save_interval="off", save_every=1)
    on_gpu = torch.zeros(2**28, device=er.device())
    on_host = torch.zeros(2**28, pin_memory=True)
    er.register(average=Kept(on_host))
    for (number,) in er.AdaptiveDataLoader(TensorDataset(torch.arange(1.0, 5.0)), 1):
        with torch.cuda.stream(torch.cuda.Stream()):
            on_gpu.fill_(float(number))
            on_host.copy_(on_gpu, non_blocking=True)


def test_a_copy_to_the_host_is_waited_for(tmp_path: Path) -> None:
    run_generation(copy_to_the_host, 1, str(tmp_path))
    saved = sorted(tmp_path.glob("checkpoint-*/average"))
    assert saved
    for path in saved:
        tensor = torch.load(path, weights_only=True)["tensor"]
        assert tensor.min() == tensor.max()


def read_streams(checkpoint_dir: str, paths: list[str], *, stops: bool) -> list[int]:
    """Return the numbers that lines have told the GPU, in two workers and ahead."""
    import elasticrun as er

    er.init(checkpoint_dir, save_interval="off")
    loader = er.AdaptiveDataLoader(
        er.TextLines(paths, parse=int, lanes=3, lengths="unknown"),
        4,
        shuffle=True,
        device=er.device(),
        num_workers=2,
    )
    delivered = []
    for batch in loader:
        assert batch.device.type == "cuda"
        delivered += batch.tolist()
        if stops and loader.batch_index == 3:
            er.request_stop()
    return delivered


def test_streams_come_to_the_gpu_each_sample_once(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{number}.txt") for number in range(3)]
    for number, path in enumerate(paths):
        lines = range(number * 20, number * 20 + 15 + number)
        Path(path).write_text("".join(f"{line}\n" for line in lines))

    def run(directory: str, *, stops: bool) -> Any:
        path = str(tmp_path / directory)
        (found,) = run_generation(lambda: read_streams(path, paths, stops=stops), 1)
        return found

    whole = run("whole", stops=False)
    assert len(whole) == len(set(whole)) == 15 + 16 + 17
    assert run("cut", stops=True) is None
    rest = run("cut", stops=False)
    assert rest
    assert rest == whole[-len(rest) :]


class Transformed(torch.utils.data.Dataset[torch.Tensor]):
    """Sample i is a row of 65,536 times i, with one number that is drawn for it."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        row = torch.full((1 << 16,), float(index))
        row[0] = torch.rand(())
        return row


def deliver_ahead(checkpoint_dir: str, num_workers: int, *, stops: bool) -> list[Any]:
    """Keep the GPU busy with each batch while the next ones are copied."""
    import elasticrun as er

    er.init(checkpoint_dir, save_interval="off")
    torch.manual_seed(0)
    loader = er.AdaptiveDataLoader(
        Transformed(),
        4,
        shuffle=True,
        device=er.device(),
        pin_memory=True,
        num_workers=num_workers,
    )
    weight = torch.eye(1 << 11, device=er.device())
    delivered = []
    for batch in loader:
        assert batch.device == er.device()
        used = batch.view(-1, 1 << 11)
        del batch  # Its memory must not be taken over while it is computed with.
        for _ in range(200):
            used = used @ weight
        delivered.append((used.view(4, -1)[:, :2].clone(), torch.rand(())))
        if stops and len(delivered) == 5:
            er.request_stop()
    return [[*batch.cpu().flatten().tolist(), float(own)] for batch, own in delivered]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_copied_ahead_are_whole_and_come_once(
    tmp_path: Path, num_workers: int
) -> None:
    def run(directory: str, *, stops: bool) -> Any:
        path = str(tmp_path / directory)
        (found,) = run_generation(
            lambda: deliver_ahead(path, num_workers, stops=stops), 1, timeout=300
        )
        return found

    whole = run("whole", stops=False)
    numbers = [batch[1:8:2] for batch in whole]
    assert sorted(n for batch in numbers for n in batch) == list(range(48))
    assert run("cut", stops=True) is None
    assert run("cut", stops=False) == whole[5:]


def test_loops_share_one_stream_of_copies() -> None:
    from elasticrun.data.workers.device import on_device

    device = torch.device("cuda")
    most = []
    for _ in range(8):
        host = iter([torch.zeros(1 << 20)] * 4)
        for batch in on_device(host, device, is_ahead=True):
            batch.add_(1)
        torch.cuda.synchronize()
        most.append(torch.cuda.memory_reserved())
    assert most[-1] == most[0]
