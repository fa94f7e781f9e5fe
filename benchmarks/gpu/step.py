"""Measure a step of AdaptiveDataParallel beside DDP's on one GPU; JSON lines.

    python benchmarks/gpu/step.py [--small] [--seconds 150]

ResNet-50 (channels last) and a GPT-2 of 124 million parameters train in bfloat16, in
one process and in two on the same GPU, started by torchrun; with two also ready for a
rescue (`rescue="always"`). Each way of training has processes of its own, in turns, so
that the peak of the memory is its own. Milliseconds are the least of the medians of a
way's runs. What does not fit in `--seconds` is left out, and said.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).parents[1]))
from machine import report

# The network, whether it is compiled, and processes: the most telling ones first.
CASES = [
    ("resnet50", False, 1),
    ("gpt2", False, 1),
    ("gpt2", False, 2),
    ("resnet50", False, 2),
    ("gpt2", True, 1),
]
NUM_ROUNDS = 2
IS_SMALL = "--small" in sys.argv
NUM_WARM_UP, NUM_BLOCKS, NUM_STEPS = (1, 2, 1) if IS_SMALL else (10, 5, 10)
NUM_TURNS = NUM_WARM_UP + NUM_BLOCKS * NUM_STEPS + 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true", help="try it out on a CPU")
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--train", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train is not None:
        train(**given.train)
        return
    end = time.monotonic() + given.seconds
    for name, is_compiled, num_processes in CASES:
        ways = ["DDP", "elasticrun"] + ["always"] * (num_processes > 1)
        found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for way in ways * NUM_ROUNDS:
            case = {"name": name, "is_compiled": is_compiled, "way": way}
            if (left := end - time.monotonic()) > 0:
                found[way] += run(case, num_processes, left)
        if not all(found.values()):
            print(f"failed, or no time: {name}, {num_processes=}", file=sys.stderr)
            continue
        best = {way: min(run["ms"] for run in runs) for way, runs in found.items()}
        report(
            "step on a GPU",
            network=name,
            compiled=is_compiled,
            processes=num_processes,
            milliseconds={way: round(ms, 3) for way, ms in best.items()},
            ratio={way: round(ms / best["DDP"], 4) for way, ms in best.items()},
            peak_mib={way: round(runs[0]["mib"]) for way, runs in found.items()},
            runs={way: [round(run["ms"], 2) for run in found[way]] for way in ways},
            gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        )


def run(
    case: dict[str, Any], num_processes: int, seconds: float
) -> list[dict[str, float]]:
    """Train in processes of their own; return what rank 0 measured, if it came to."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        variables = {
            **os.environ,
            "ELASTICRUN_CHECKPOINT_DIR": folder,
            "ELASTICRUN_SAVE_INTERVAL": "off",
            "ELASTICRUN_RESCUE": "always" if case["way"] == "always" else "on",
            "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # NCCL 2.31 takes it for two ranks.
        }
        torchrun = ["-m", "torch.distributed.run", "--standalone"]
        command = [sys.executable, *torchrun, f"--nproc-per-node={num_processes}"]
        command += [__file__, "--train", json.dumps({**case, "out": str(out)})]
        command += ["--small"] * IS_SMALL
        with subprocess.Popen(command, env=variables, start_new_session=True) as agent:
            try:
                agent.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(
                    agent.pid, signal.SIGKILL
                )  # torchrun would leave its workers.
        return [json.loads(out.read_text())] if out.exists() else []


def train(name: str, way: str, out: str, *, is_compiled: bool) -> None:
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # One GPU for all: `device()` gives what is set.
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    net, inputs, targets = models.make(name, device, is_small=IS_SMALL)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4, fused=True)
    if is_compiled:
        net = torch.compile(net)  # type: ignore[assignment]
    model, turns = ddp(net) if way == "DDP" else elastic(net, optimizer)
    medians, begin = [], 0.0
    for turn in turns:
        if (turn - NUM_WARM_UP) % NUM_STEPS == 0:
            if device.type == "cuda":
                torch.cuda.synchronize()
            now = time.perf_counter()
            medians += [(now - begin) / NUM_STEPS] * (turn > NUM_WARM_UP)
            begin = now
        optimizer.zero_grad()
        models.loss_of(model, inputs, targets).backward()
        optimizer.step()
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    if distributed.get_rank() == 0:
        found = {"ms": 1000 * statistics.median(medians), "mib": peak / 2**20}
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    distributed.destroy_process_group()


def ddp(net: nn.Module) -> tuple[nn.Module, Iterator[int]]:
    data = TensorDataset(torch.arange(NUM_TURNS))
    return DistributedDataParallel(net), (
        turn for turn, _ in enumerate(DataLoader(data))
    )


def elastic(
    net: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, Iterator[int]]:
    import elasticrun as er

    er.init()
    model = er.AdaptiveDataParallel(net, optimizer)
    data = TensorDataset(torch.arange(NUM_TURNS * er.world_size()))
    loader = er.AdaptiveDataLoader(data, er.world_size())
    return model, (
        turn for _ in er.remaining_epochs_until(1) for turn, _ in enumerate(loader)
    )


if __name__ == "__main__":
    main()
