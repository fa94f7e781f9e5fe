"""Measure a step of AdaptiveDataParallel beside DDP's on one GPU; JSON lines.

    python benchmarks/gpu/step.py [--small] [--seconds 135]

ResNet-50 (channels last) and a GPT-2 of 124 million parameters train in bfloat16, in
one process and in two on the same GPU, started by torchrun: first with DDP, where
nothing has imported elasticrun, then with it; in two processes with the rescue as it is
by default, and with "always". Milliseconds are the median of blocks of steps, after the
first ones, in which a rescue may turn itself off. A second round follows if there is
time. What does not fit in `--seconds` is left out, and said.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import models
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).parents[1]))
from machine import report

# The network, whether it is compiled, processes, and the rescue; most telling first.
CASES = [
    ("resnet50", False, 1, "on"),
    ("gpt2", False, 1, "on"),
    ("gpt2", False, 2, "on"),
    ("gpt2", False, 2, "always"),
    ("gpt2", True, 1, "on"),
    ("resnet50", False, 2, "on"),
]
IS_SMALL = "--small" in sys.argv
IS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if IS_CUDA else "cpu")
NUM_BLOCKS, NUM_STEPS = (2, 1) if IS_SMALL else (5, 10)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true", help="try it out on a CPU")
    parser.add_argument("--seconds", type=float, default=135)
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train is not None:
        train(*given.train)
        return
    end = time.monotonic() + given.seconds
    for name, is_compiled, num_processes, rescue in CASES * (1 if IS_SMALL else 2):
        case = f"{name}, {is_compiled=}, {num_processes=}, {rescue=}"
        left = end - time.monotonic()
        found = run(name, is_compiled, num_processes, rescue, left) if left > 0 else {}
        if not found:
            print(f"failed, or no time: {case}", file=sys.stderr)
            continue
        ddp, own = found["DDP"], found["elasticrun"]
        report(
            "step on a GPU",
            network=name,
            compiled=is_compiled,
            processes=num_processes,
            rescue=rescue,
            ratio=round(own["milliseconds"] / ddp["milliseconds"], 4),
            **found,
            gpu=torch.cuda.get_device_name() if IS_CUDA else None,
        )


def run(
    name: str, is_compiled: bool, num_processes: int, rescue: str, seconds: float
) -> dict[str, Any]:
    """Train in processes of their own; return what rank 0 measured, if it came to."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        variables = {
            **os.environ,
            "ELASTICRUN_CHECKPOINT_DIR": folder,
            "ELASTICRUN_SAVE_INTERVAL": "off",
            "ELASTICRUN_RESCUE": rescue,
            "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # NCCL 2.31 takes it for two ranks.
        }
        torchrun = ["-m", "torch.distributed.run", "--standalone"]
        command = [sys.executable, *torchrun, f"--nproc-per-node={num_processes}"]
        command += [__file__, *["--small"] * IS_SMALL]
        command += ["--train", name, "compiled" * is_compiled, str(out)]
        with subprocess.Popen(command, env=variables, start_new_session=True) as agent:
            try:
                agent.wait(seconds)
            except subprocess.TimeoutExpired:  # torchrun would leave its workers.
                os.killpg(agent.pid, signal.SIGKILL)
        return json.loads(out.read_text()) if out.exists() else {}


def train(name: str, compiled: str, out: str) -> None:
    if IS_CUDA:
        torch.cuda.set_device(DEVICE)
    distributed.init_process_group("nccl" if IS_CUDA else "gloo")
    found = {}
    for way, prepare in (("DDP", ddp), ("elasticrun", elastic)):
        torch.manual_seed(0)
        torch.compiler.reset()
        found[way] = measure(name, bool(compiled), prepare)
    if distributed.get_rank() == 0:
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    distributed.barrier()
    os._exit(0)  # Groups of processes that share a GPU need not end well.


def measure(
    name: str, is_compiled: bool, prepare: Callable[..., Any]
) -> dict[str, float]:
    if IS_CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    # A rescue has turned itself off after 70 steps, if it does.
    num_warm_up = 1 if IS_SMALL else 75 if distributed.get_world_size() > 1 else 15
    net, inputs, targets = models.make(name, DEVICE, is_small=IS_SMALL)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4, fused=True)
    if is_compiled:
        net = torch.compile(net)  # type: ignore[assignment]
    num_turns = num_warm_up + NUM_BLOCKS * NUM_STEPS + 1
    model, turns = prepare(net, optimizer, num_turns)
    blocks, begin = [], 0.0
    for turn, _ in enumerate(turns):
        if turn >= num_warm_up and (turn - num_warm_up) % NUM_STEPS == 0:
            if IS_CUDA:
                torch.cuda.synchronize()
            now = time.perf_counter()
            blocks += [(now - begin) / NUM_STEPS] * (turn > num_warm_up)
            begin = now
        optimizer.zero_grad()
        models.loss_of(model, inputs, targets).backward()
        optimizer.step()
    peak = torch.cuda.max_memory_allocated() if IS_CUDA else 0
    return {
        "milliseconds": round(1000 * statistics.median(blocks), 3),
        "least": round(1000 * min(blocks), 3),
        "peak_mib": round(peak / 2**20),
    }


def ddp(
    net: nn.Module, _: torch.optim.Optimizer, num_turns: int
) -> tuple[nn.Module, Iterable[Any]]:
    data = TensorDataset(torch.arange(num_turns))
    return DistributedDataParallel(net), DataLoader(data)


def elastic(
    net: nn.Module, optimizer: torch.optim.Optimizer, num_turns: int
) -> tuple[nn.Module, Iterable[Any]]:
    import elasticrun as er
    from elasticrun.replicas import devices

    if IS_CUDA:
        devices.why_not_a_gpu_each = lambda _: ""  # One GPU for all.
    er.init()
    model = er.AdaptiveDataParallel(net, optimizer)
    data = TensorDataset(torch.arange(num_turns * er.world_size()))
    loader = er.AdaptiveDataLoader(data, er.world_size())
    return model, (each for _ in er.remaining_epochs_until(1) for each in loader)


if __name__ == "__main__":
    main()
