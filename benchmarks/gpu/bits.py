"""Compare what one and two processes train with virtual replicas on a GPU; JSON lines.

    python benchmarks/gpu/bits.py

Convolution, BatchNorm, dropout and AdamW, with deterministic kernels, in four shares:
one process, two, and two that stop and go on as one. `same_bits` says whether all
parameters are the same. With gloo, and with NCCL where that lets two share a GPU.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elasticrun as er
from elasticrun.replicas import devices
from elasticrun.testing import GenerationFailed, run_generation

sys.path.append(str(Path(__file__).parents[1]))
from machine import report

SIZES = [(1,), (2,), (2, 1)]
IS_CUDA = torch.cuda.is_available()
VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # Without it cuBLAS is not deterministic.
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "OMP_NUM_THREADS": "1",
}


def train(directory: str, backend: str, stop_after: int) -> str:
    """Return a checksum of the parameters that 24 steps lead to."""
    torch.use_deterministic_algorithms(True)
    if IS_CUDA:
        devices.why_not_a_gpu_each = lambda _: ""  # One GPU for all.
    er.init(directory, backend=backend, virtual_replicas=4, save_interval="off")
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.BatchNorm2d(32),
        nn.GELU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32 * 14 * 14, 10),
    ).to("cuda:0" if IS_CUDA else "cpu")
    optimizer = torch.optim.AdamW(net.parameters())
    model = er.AdaptiveDataParallel(net, optimizer)
    rows = torch.randn(8 * 37, 3, 16, 16)
    loader = er.AdaptiveDataLoader(TensorDataset(rows), 37, shuffle=True)
    device = next(net.parameters()).device
    for _ in er.remaining_epochs_until(3):
        for (inputs,) in loader:
            optimizer.zero_grad()
            model(inputs.to(device)).square().mean().backward()
            optimizer.step()
            if er.generation() == 0 and loader.batch_index == stop_after:
                er.request_stop()
    values = torch.cat([each.detach().flatten() for each in net.parameters()])
    return hashlib.sha256(values.cpu().numpy().tobytes()).hexdigest()


def trained(backend: str, *sizes: int) -> set[str]:
    """Return what replicas end with that stop and go on in other numbers."""
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes[:-1]:
            run_generation(train, size, folder, backend, 5, variables=VARIABLES)
        more = folder, backend, -1
        return set(run_generation(train, sizes[-1], *more, variables=VARIABLES))


def main() -> None:
    for backend in ("gloo", "nccl") if IS_CUDA else ("gloo",):
        try:
            found = [trained(backend, *sizes) for sizes in SIZES]
        except GenerationFailed as error:
            print(f"{backend}: {error}", file=sys.stderr)
            continue
        report(
            "the same bits on a GPU",
            backend=backend,
            replicas=SIZES,
            same_bits=len(set.union(*found)) == 1,
            gpu=torch.cuda.get_device_name() if IS_CUDA else None,
        )


if __name__ == "__main__":
    main()
