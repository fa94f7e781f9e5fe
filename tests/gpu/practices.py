"""A training as people have it on a GPU, with one practice or another.

Everything is on `elasticrun.device()`; tests/processes/test_practices.py runs on a CPU
what needs no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from elasticrun.testing import run_generation

NUM_SAMPLES, BATCH_SIZE = 42, 16  # The last of three batches has ten samples.


def data() -> TensorDataset:
    x = torch.linspace(-1, 1, NUM_SAMPLES * 8).reshape(NUM_SAMPLES, 8)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def train(
    practice: str,
    checkpoint_dir: str,
    stop_after: int | None = None,
    max_local_batch_size: int | None = None,
    dropout: float = 0.2,
) -> list[torch.Tensor]:
    """Train for two epochs, and return the parameters.

    Args:
        practice: "plain", "device_ids", "bf16", "fp16" (with a GradScaler), "compile",
            "graphs" (CUDA graphs), "pinned", "fsdp", or "norm" (buffers).
        stop_after: Ask for a stop in this step of this generation.
        dropout: 0 where numbers of replicas are compared, each of which draws.
    """
    import elasticrun as er

    torch.manual_seed(0)
    er.init(checkpoint_dir, save_interval="off")
    device = er.device()
    middle = nn.BatchNorm1d(16) if practice == "norm" else nn.Dropout(dropout)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), middle, nn.Linear(16, 1))
    net = net.to(device)
    if practice == "fsdp":
        fully_shard(net)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    model = wrap(practice, net, optimizer)
    scaler = torch.amp.GradScaler(
        device.type, init_scale=1024.0, enabled=practice == "fp16"
    )
    er.register(scaler=scaler)
    loader = er.AdaptiveDataLoader(
        data(),
        BATCH_SIZE,
        shuffle=True,
        pin_memory=practice == "pinned",
        max_local_batch_size=max_local_batch_size,
    )
    num_steps = 0
    for _ in er.remaining_epochs_until(2):
        for x, y in loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            with precision(practice, device):
                loss = mse_loss(model(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            num_steps += 1
            if num_steps == stop_after:
                er.request_stop()
    full = (p.full_tensor() if practice == "fsdp" else p for p in net.parameters())
    return [p.detach().float().cpu() for p in full]


def check_that_a_restart_does_not_show(
    folder: Path, practice: str, *, stops: Sequence[int]
) -> None:
    """Compare a training with others that stop in those steps, and go on."""
    (calm,) = run_generation(train, 1, practice, str(folder / "calm"))
    for stop_after in stops:
        cut = str(folder / f"cut-{stop_after}")
        assert run_generation(train, 1, practice, cut, stop_after) == [None]
        (resumed,) = run_generation(train, 1, practice, cut)
        for one, other in zip(calm, resumed, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def wrap(practice: str, net: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    import elasticrun as er

    inner: Any = net
    if practice in ("compile", "graphs"):
        mode = "reduce-overhead" if practice == "graphs" else "default"
        inner = torch.compile(net, mode=mode)
    options: dict[str, Any] = {}
    if practice == "device_ids" and er.world_size() > 1:
        options["device_ids"] = [er.device()]
    return er.AdaptiveDataParallel(inner, optimizer, **options)


def precision(practice: str, device: torch.device) -> Any:
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    if practice not in kinds:
        return nullcontext()
    return torch.autocast(device.type, dtype=kinds[practice])


def contexts() -> tuple[str, list[int]]:
    """Return this replica's device, and on which GPUs the process holds anything."""
    import elasticrun as er

    er.init()
    torch.ones(1, device=er.device())
    gpus = range(torch.cuda.device_count())
    return str(er.device()), [gpu for gpu in gpus if torch.cuda.memory_reserved(gpu)]
