"""Measure what N processes read that load one checkpoint; JSON lines.

    python benchmarks/read_once.py [--megabytes 256] [--processes 4] [--store-seconds 2]

From a directory: the bytes that the processes had from the disk, whose pages were
dropped before, and the seconds until all had loaded, beside those of one process. From
a store whose reads take so long each: how many there were.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from machine import report

from elasticrun.checkpoint.manifest import Manifest
from elasticrun.checkpoint.states.values import load_values, save_values
from elasticrun.checkpoint.store import CheckpointStore

READS = multiprocessing.get_context("fork").Value("i", 0)
STATES = ("model", "optimizer")


class SlowFolders(LocalFileSystem):
    """Counts reads of states, and takes a while for each."""

    protocol = "slow"
    seconds = 0.0

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return super()._strip_protocol(str(path).removeprefix("slow://"))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "rb" and path.endswith(STATES):
            time.sleep(self.seconds)
            with READS.get_lock():
                READS.value += 1
        return super()._open(path, mode, **options)


fsspec.register_implementation("slow", SlowFolders, clobber=True)


def write(place: str, megabytes: int) -> str:
    store = CheckpointStore(place, job="benchmark")
    store.acquire()
    draft = store.begin(1)
    values = {"weights": torch.rand(megabytes << 17)}  # Half of it for each state.
    files = [
        draft.write(name, lambda file: save_values(values, file)) for name in STATES
    ]
    manifest = Manifest(
        job="benchmark", number=1, generation=0, world_size=1, position={}, time=0.0,
        torch_version="", elasticrun_version="", files=tuple(files),
    )  # fmt: skip
    digest = draft.commit(manifest).manifest.digest
    store.release()
    return digest


def load(place: str, digest: str, barrier: Any, results: Any) -> None:
    before = disk_bytes()
    barrier.wait()
    begin = time.perf_counter()
    store = CheckpointStore(place, job="benchmark")
    checkpoint = store.open(1, digest)
    for name in STATES:
        with checkpoint.open(name) as file:
            load_values(file)
    seconds = time.perf_counter() - begin
    barrier.wait()  # None removes what another one reads.
    store.release()
    results.put((seconds, disk_bytes() - before))


def disk_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def drop_pages(root: Path) -> None:
    for path in filter(Path.is_file, root.rglob("*")):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure(place: str, digest: str, num_processes: int, root: Path) -> None:
    drop_pages(root)
    READS.value = 0
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(num_processes), context.SimpleQueue()
    processes = [
        context.Process(target=load, args=(place, digest, barrier, results))
        for _ in range(num_processes)
    ]
    for each in processes:
        each.start()
    seconds, num_bytes = zip(*(results.get() for _ in processes), strict=True)
    for each in processes:
        each.join()
    report(
        "read_once",
        place="store" if "://" in place else "directory",
        processes=num_processes,
        seconds=round(max(seconds), 2),
        megabytes_from_disk=sum(num_bytes) >> 20,
        reads_of_the_store=READS.value,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--store-seconds", type=float, default=2.0)
    parser.add_argument("--directory", help="on a disk, not in memory")
    options = parser.parse_args()
    SlowFolders.seconds = options.store_seconds
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.directory) as root:
        for name in ("directory", "store"):
            folder = Path(root, name)
            folder.mkdir()
            place = str(folder) if name == "directory" else f"slow://{folder}"
            digest = write(place, options.megabytes)
            for num_processes in (1, options.processes):
                measure(place, digest, num_processes, folder)


if __name__ == "__main__":
    main()
