"""Measure a checkpoint of 1 GiB of parameters beside what others offer; JSON lines.

    python benchmarks/checkpoint.py [--gibibytes 1] [--rounds 10] [--directory DIR]

All methods save the same 16 tensors of float32, by turns. `blocked` is how long the
training thread waits, `total` until the checkpoint is durable: elasticrun's with the
checksums of its files, their fsync, the manifest and the commit; the others' with
fsync, which DCP makes by itself. `memory` is by how much the process has grown once a
method has been used, in GiB. `load` is until the parameters are in the module, from the
page cache, which a save of elasticrun's in flight bypasses; only its load has compared
a checksum.

What they are compared with: `memcpy` copies the tensors into memory that was used
before (by NumPy or by torch, whose median is less), `raw` writes them to a file in
pieces of 16 MiB and forces it to the disk. `blocked_to_memcpy` and `total_to_raw` are
medians of the ratios within a round.

Everything has a first turn that does not count. Each round has another order, since
what a disk still has to do slows down whoever comes next.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from machine import report
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from elasticrun.checkpoint.states.stateful import StatefulState
from elasticrun.replicas.environment import Environment
from elasticrun.testing import Job, Settings

PIECE = 16 << 20
MEMCPY, RAW = ("memcpy with torch", "memcpy with NumPy"), "raw"


class Times(NamedTuple):
    """Seconds of one save."""

    blocked: float
    total: float

    @classmethod
    def waiting(cls, seconds: float) -> Times:
        """Return those of a save that returns when all is done."""
        return cls(seconds, seconds)


def make_module(gibibytes: float) -> torch.nn.ParameterList:
    """Return 16 tensors of float32."""
    num_values = int(gibibytes * 2**28 / 16)
    values = (torch.nn.Parameter(torch.randn(num_values)) for _ in range(16))
    return torch.nn.ParameterList(values)


def timed(call: Callable[[], object]) -> float:
    """Return how long the call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def fsync(path: Path) -> None:
    """Force a file that somebody has written to the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


class Bare:
    """A copy in memory and a plain file: what cannot be done faster."""

    def __init__(self, module: torch.nn.ParameterList, directory: Path) -> None:
        self._sources = [p.detach() for p in module]
        self._targets = [torch.zeros_like(source) for source in self._sources]
        self._path = directory / "raw"

    def copy_with_torch(self) -> Times:
        def copy() -> None:
            for target, source in zip(self._targets, self._sources, strict=True):
                target.copy_(source)

        return Times.waiting(timed(copy))

    def copy_with_numpy(self) -> Times:
        def copy() -> None:
            for target, source in zip(self._targets, self._sources, strict=True):
                np.copyto(target.numpy(), source.numpy())

        return Times.waiting(timed(copy))

    def write(self) -> Times:
        def write() -> None:
            with open(self._path, "xb", buffering=0) as file:
                for target in self._targets:
                    data = memoryview(target.numpy()).cast("B")
                    while data:
                        data = data[file.write(data[:PIECE]) :]
                os.fsync(file.fileno())

        seconds = timed(write)
        self._path.unlink()
        return Times.waiting(seconds)


class Elastic:
    """elasticrun: at a boundary and in flight, or as `save_all_states` does it."""

    def __init__(
        self, module: torch.nn.ParameterList, directory: Path, *, async_save: bool
    ) -> None:
        self._module = module
        self._is_async = async_save
        self.job = Job(
            Environment(),
            Settings.read(
                job=directory.name,
                checkpoint_dir=directory,
                save_interval="off",
                keep=1,
                async_save=async_save,
            ),
        )
        self.job.register(StatefulState("model", module))

    def at_boundary(self) -> Times:
        """Save as a loop does."""
        before = self.job.newest_checkpoint
        begin = time.perf_counter()
        self.job.boundary.request_checkpoint()
        self.job.boundary.reach()
        blocked = time.perf_counter() - begin
        while self.job.newest_checkpoint is before:
            time.sleep(0.0005)
        total = time.perf_counter() - begin
        while any(t.name == "elasticrun-writer" for t in threading.enumerate()):
            time.sleep(0.0005)  # It removes the checkpoint before.
        self.job.boundary.reach()
        return Times(blocked, total)

    def at_once(self) -> Times:
        seconds = timed(self.job.save)
        return Times.waiting(seconds)

    def load(self) -> float:
        newest = self.job.newest_checkpoint
        assert newest is not None
        return timed(lambda: self.job.load(StatefulState("model", self._module)))


class Others:
    """torch.save, safetensors and torch.distributed.checkpoint."""

    def __init__(self, module: torch.nn.ParameterList, directory: Path) -> None:
        self._module = module
        self._directory = directory
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )

    def torch_save(self) -> Times:
        def save() -> None:
            with open(self._directory / "model.pt", "wb") as file:
                torch.save(self._module.state_dict(), file)
                file.flush()
                os.fsync(file.fileno())

        seconds = timed(save)
        return Times.waiting(seconds)

    def safetensors(self) -> Times:
        def save() -> None:
            path = self._directory / "model.safetensors"
            save_file(dict(self._module.state_dict()), path)
            fsync(path)

        seconds = timed(save)
        return Times.waiting(seconds)

    def dcp_save(self) -> Times:
        with self._new_folder() as path:
            values = self._module.state_dict()
            seconds = timed(lambda: dcp.save(values, checkpoint_id=path))
        return Times.waiting(seconds)

    def dcp_async_save(self) -> Times:
        return self._dcp_async(None)

    def dcp_async_save_with_stager(self) -> Times:
        return self._dcp_async(self._stager)

    def _dcp_async(self, stager: Any) -> Times:
        with self._new_folder() as path:
            values = self._module.state_dict()
            begin = time.perf_counter()
            future: Any = dcp.async_save(
                values, checkpoint_id=path, async_stager=stager
            )
            blocked = time.perf_counter() - begin
            future.result()
            return Times(blocked, time.perf_counter() - begin)

    @contextmanager
    def _new_folder(self) -> Iterator[Path]:
        path = self._directory / "dcp"
        shutil.rmtree(path, ignore_errors=True)
        yield path

    def load_with_torch(self) -> float:
        return timed(
            lambda: self._module.load_state_dict(
                torch.load(self._directory / "model.pt", weights_only=True)
            )
        )

    def load_with_safetensors(self) -> float:
        return timed(
            lambda: self._module.load_state_dict(
                load_file(self._directory / "model.safetensors")
            )
        )

    def load_with_dcp(self) -> float:
        def load() -> None:
            values = self._module.state_dict()
            dcp.load(values, checkpoint_id=self._directory / "dcp")
            self._module.load_state_dict(values)

        return timed(load)


def grown(save: Callable[[], Times]) -> tuple[Times, float]:
    """Return the times of a save, and by how many GiB the process has grown."""
    process = psutil.Process()
    before = process.memory_info().rss
    times = save()
    return times, round((process.memory_info().rss - before) / 2**30, 2)


def measure(directory: Path, gibibytes: float, num_rounds: int) -> None:
    """Save and load by turns."""
    module = make_module(gibibytes)
    bare = Bare(module, directory)
    own = Elastic(module, directory / "async", async_save=True)
    waiting = Elastic(module, directory / "sync", async_save=False)
    others = Others(module, directory)
    saves: dict[str, Callable[[], Times]] = {
        MEMCPY[0]: bare.copy_with_torch,
        MEMCPY[1]: bare.copy_with_numpy,
        RAW: bare.write,
        "elasticrun": own.at_boundary,
        "elasticrun, save_all_states": own.at_once,
        "elasticrun, async_save=False": waiting.at_once,
        "torch.save": others.torch_save,
        "safetensors": others.safetensors,
        "DCP save": others.dcp_save,
        "DCP async_save": others.dcp_async_save,
        "DCP async_save, reused stager": others.dcp_async_save_with_stager,
    }
    loads = {
        "elasticrun": own.load,
        "torch.save": others.load_with_torch,
        "safetensors": others.load_with_safetensors,
        "DCP save": others.load_with_dcp,
    }
    memory = {name: grown(save)[1] for name, save in saves.items()}
    times: dict[str, list[Times]] = defaultdict(list)
    load_seconds: dict[str, list[float]] = defaultdict(list)
    for number in range(num_rounds):
        for name in random.Random(number).sample(list(saves), len(saves)):
            times[name].append(saves[name]())
        for name, load in loads.items():
            load_seconds[name].append(load())
    copies = [[each.blocked for each in times.pop(name)] for name in MEMCPY]
    memcpy = min(copies, key=statistics.median)
    raw = [each.total for each in times.pop(RAW)]
    report(
        "checkpoint_floor",
        gibibytes=gibibytes,
        memcpy=median(memcpy),
        raw=median(raw),
        rounds=num_rounds,
        load_average=round(os.getloadavg()[0], 1),
    )
    for name in (name for name in saves if name in times):
        found = times[name]
        report(
            "checkpoint",
            method=name,
            blocked=median([each.blocked for each in found]),
            total=median([each.total for each in found]),
            blocked_to_memcpy=ratio([each.blocked for each in found], memcpy),
            total_to_raw=ratio([each.total for each in found], raw),
            memory=memory[name],
            load=median(load_seconds[name]) if name in loads else None,
        )
    own.job.close()
    waiting.job.close()


def measure_small(
    directory: Path, num_rounds: int, *, num_tensors: int, num_states: int
) -> None:
    """Capture tensors of 1 kB in one state or in many, beside a loop of copies.

    In milliseconds of the training thread's CPU, the least of all rounds: others on the
    machine change that least. `state_dict_ms` is what the states' modules take to say
    what they have.
    """
    tensors = [torch.nn.Parameter(torch.randn(256)) for _ in range(num_tensors)]
    targets = [torch.zeros_like(each.detach()) for each in tensors]
    job = Job(
        Environment(),
        Settings.read(
            {}, job="small", checkpoint_dir=directory, save_interval="off", keep=1
        ),
    )
    size = len(tensors) // num_states
    modules = [
        torch.nn.ParameterList(tensors[number * size : (number + 1) * size])
        for number in range(num_states)
    ]
    for number, module in enumerate(modules):
        job.register(StatefulState(f"model-{number}", module))
    copies, state_dicts, captures = [], [], []
    for _ in range(num_rounds):
        begin = time.thread_time()
        for target, tensor in zip(targets, tensors, strict=True):
            target.copy_(tensor.detach())
        copies.append(time.thread_time() - begin)
        begin = time.thread_time()
        for module in modules:
            module.state_dict()
        state_dicts.append(time.thread_time() - begin)
        before = job.newest_checkpoint
        begin = time.thread_time()
        job.boundary.request_checkpoint()
        job.boundary.reach()
        captures.append(time.thread_time() - begin)
        while job.newest_checkpoint is before:
            time.sleep(0.0005)
        job.boundary.reach()
    job.close()
    report(
        "checkpoint_small",
        tensors=len(tensors),
        states=num_states,
        copy_ms=round(min(copies) * 1e3, 1),
        state_dict_ms=round(min(state_dicts) * 1e3, 1),
        capture_ms=round(min(captures) * 1e3, 1),
        capture_to_copy=round(min(captures) / min(copies), 2),
        rounds=num_rounds,
    )


def median(values: list[float]) -> float:
    """Return the median, in milliseconds' precision."""
    return round(statistics.median(values), 3)


def ratio(values: list[float], others: list[float]) -> float:
    """Return the median of the ratios within a round."""
    return round(
        statistics.median(a / b for a, b in zip(values, others, strict=True)), 2
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gibibytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--directory", help="on the disk to measure")
    options = parser.parse_args()
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        measure(Path(directory), options.gibibytes, options.rounds)
        for num_tensors, num_states in ((10_000, 1), (10_000, 1000), (1000, 1000)):
            measure_small(
                Path(directory) / f"small-{num_tensors}-{num_states}",
                options.rounds,
                num_tensors=num_tensors,
                num_states=num_states,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
