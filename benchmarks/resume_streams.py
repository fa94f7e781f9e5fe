"""Count what a resume in mid-epoch loses and repeats, at other sizes; JSON lines.

    python benchmarks/resume_streams.py [--only PEER ...]

Two processes read 64 files of 100 samples, shuffled, by global batches of 64, and end
after 40 of 100; 2, 3 or 1 go on to the end of the epoch, each from the state that the
process of its number has left. Lost are samples that no process has read in the epoch,
repeated those beyond the first time. Peers that are not installed are left out:

webdataset  shards split by node, its shuffle with a seed, in torchdata's
            `StatefulDataLoader`, which reads again what was read
datasets    Hugging Face's `split_dataset_by_node` and `shuffle`, in the same loader
mosaic      `StreamingDataset` (py1e) in its `StreamingDataLoader`
litdata     `StreamingDataset` in its `StreamingDataLoader`
grain       a `DataLoader` over an index sampler, split by `ShardOptions`
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import multiprocessing
import os
import socket
import sys
import tarfile
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import report

from elasticrun import (
    AdaptiveDataLoader,
    TextLines,
    init,
    remaining_epochs_until,
    request_stop,
)
from elasticrun.testing import run_generation

NUM_FILES, LENGTH, BATCH_SIZE, NUM_READ = 64, 100, 64, 40
NUM_SAMPLES = NUM_FILES * LENGTH

# Returns the samples that a process reads from a state on, and its state then.
Read = Callable[[Path, int, int, Any, int | None], tuple[list[int], Any]]


def write(folder: Path) -> None:
    """Write the samples as lines, and as tar shards."""
    for number in range(NUM_FILES):
        samples = range(number * LENGTH, (number + 1) * LENGTH)
        path = folder / f"{number:02}"
        path.with_suffix(".jsonl").write_text(
            "".join(f'{{"n": {n}}}\n' for n in samples)
        )
        with tarfile.open(path.with_suffix(".tar"), "w") as shard:
            for n in samples:
                member = tarfile.TarInfo(f"{n}.txt")
                member.size = len(str(n))
                shard.addfile(member, io.BytesIO(str(n).encode()))


def taken(loader: Any, num_batches: int | None) -> tuple[list[int], Any]:
    """Read so many batches, or all that there are; return the loader's state, too."""
    samples: list[int] = []
    batches: Iterator[Any] = iter(loader)
    for number, batch in enumerate(batches, 1):
        samples += map(int, batch)
        if number == num_batches:
            return samples, loader.state_dict()
    return samples, None


def stateful(dataset: Any, world_size: int, state: Any, collate: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader: Any = StatefulDataLoader(
        dataset, BATCH_SIZE // world_size, collate_fn=collate
    )
    if state is not None:
        loader.load_state_dict(state)
    return loader


def webdataset(
    folder: Path, rank: int, world_size: int, state: Any, num_batches: int | None
) -> tuple[list[int], Any]:
    import webdataset

    del rank  # Which it finds in the environment, as some others do.
    dataset = webdataset.WebDataset(
        [str(path) for path in sorted(folder.glob("*.tar"))],
        shardshuffle=NUM_FILES,
        nodesplitter=webdataset.split_by_node,
        seed=0,
        empty_check=False,
    ).shuffle(1000, seed=0)
    loader = stateful(
        dataset,
        world_size,
        state,
        lambda batch: [int(each["__key__"]) for each in batch],
    )
    return taken(loader, num_batches)


def datasets(
    folder: Path, rank: int, world_size: int, state: Any, num_batches: int | None
) -> tuple[list[int], Any]:
    from datasets import load_dataset
    from datasets.distributed import split_dataset_by_node

    files = [str(path) for path in sorted(folder.glob("*.jsonl"))]
    dataset = load_dataset("json", data_files=files, split="train", streaming=True)
    dataset = dataset.shuffle(seed=0, buffer_size=1000)
    dataset = split_dataset_by_node(dataset, rank=rank, world_size=world_size)
    loader = stateful(
        dataset, world_size, state, lambda batch: [each["n"] for each in batch]
    )
    return taken(loader, num_batches)


def mosaic(
    folder: Path, rank: int, world_size: int, state: Any, num_batches: int | None
) -> tuple[list[int], Any]:
    from streaming import StreamingDataLoader, StreamingDataset

    del rank
    dataset = StreamingDataset(
        local=str(folder / "mds"),
        shuffle=True,
        batch_size=BATCH_SIZE // world_size,
        num_canonical_nodes=2,
    )
    loader: Any = StreamingDataLoader(
        dataset,
        batch_size=BATCH_SIZE // world_size,
        collate_fn=lambda batch: torch.tensor([each["n"] for each in batch]),
    )
    if state is not None:
        loader.load_state_dict(state)
    return taken(loader, num_batches)


def litdata(
    folder: Path, rank: int, world_size: int, state: Any, num_batches: int | None
) -> tuple[list[int], Any]:
    from litdata import StreamingDataLoader, StreamingDataset

    del rank
    dataset = StreamingDataset(str(folder / "lit"), shuffle=True)
    loader: Any = StreamingDataLoader(dataset, batch_size=BATCH_SIZE // world_size)
    if state is not None:
        loader.load_state_dict(state)
    return taken(loader, num_batches)


def grain(
    folder: Path, rank: int, world_size: int, state: Any, num_batches: int | None
) -> tuple[list[int], Any]:
    from grain import python as grain

    del folder  # It reads by index.
    loader = grain.DataLoader(
        data_source=range(NUM_SAMPLES),
        sampler=grain.IndexSampler(
            NUM_SAMPLES,
            shard_options=grain.ShardOptions(rank, world_size),
            shuffle=True,
            num_epochs=1,
            seed=0,
        ),
        operations=[grain.Batch(BATCH_SIZE // world_size)],
    )
    batches = iter(loader)
    if state is not None:
        batches.set_state(state)
    samples: list[int] = []
    for number, batch in enumerate(batches, 1):
        samples += map(int, batch)
        if number == num_batches:
            return samples, batches.get_state()
    return samples, None


PEERS: dict[str, tuple[str, Read]] = {
    "webdataset": ("webdataset", webdataset),
    "datasets": ("datasets", datasets),
    "mosaic": ("streaming", mosaic),
    "litdata": ("litdata", litdata),
    "grain": ("grain", grain),
}


def written_for(peer: str, folder: Path) -> None:
    """Write the samples in a peer's own form."""
    if peer == "mosaic":
        from streaming import MDSWriter

        with MDSWriter(
            out=str(folder / "mds"), columns={"n": "int"}, size_limit=2000
        ) as out:
            for n in range(NUM_SAMPLES):
                out.write({"n": n})
    if peer == "litdata":
        from litdata import optimize

        optimize(
            _itself,
            [*range(NUM_SAMPLES)],
            str(folder / "lit"),
            chunk_size=LENGTH,
            num_workers=1,
        )


def _itself(sample: int) -> int:
    return sample


def in_process(
    peer: str,
    folder: Path,
    rank: int,
    world_size: int,
    port: int,
    state: Any,
    num_batches: int | None,
    results: Any,
) -> None:
    """Read in a process of a number among others."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        read = PEERS[peer][1](folder, rank, world_size, state, num_batches)
        results.put((rank, *read, ""))
    except Exception as error:
        traceback.print_exc()
        results.put((rank, [], None, f"{type(error).__name__}: {error}"))


def generation(
    peer: str, folder: Path, states: list[Any], world_size: int, num: int | None
) -> tuple[list[int], list[Any], str]:
    """Return what so many processes read, their states, and an error of one."""
    fresh = multiprocessing.get_context("spawn")
    results: Any = fresh.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(world_size):
        state = states[rank] if rank < len(states) else None
        args = (peer, folder, rank, world_size, port, state, num, results)
        processes.append(fresh.Process(target=in_process, args=args))
        processes[-1].start()
    found = sorted((results.get(timeout=300) for _ in processes), key=lambda r: r[0])
    for process in processes:
        process.join()
    samples = [sample for _, own, _, _ in found for sample in own]
    errors = [error for *_, error in found if error]
    return samples, [state for _, _, state, _ in found], "; ".join(errors[:1])


def resumed(peer: str, folder: Path, world_size: int) -> dict[str, Any]:
    """Return what is lost and repeated."""
    first, states, error = generation(peer, folder, [], 2, NUM_READ)
    if not error:
        second, _, error = generation(peer, folder, states, world_size, None)
    return {"refused": error} if error else counted(first + second)


def counted(samples: list[int]) -> dict[str, Any]:
    times = Counter(samples)
    return {
        "lost": NUM_SAMPLES - len(times),
        "repeated": sum(times.values()) - len(times),
    }


def script(folder: str, directory: str, num_batches: int) -> None:
    """Read with elasticrun, and note what was delivered."""
    init(directory)
    lines = TextLines(f"{folder}/*.jsonl", parse=json.loads)
    loader = AdaptiveDataLoader(lines, BATCH_SIZE, shuffle=True)
    with open(f"{directory}.{os.getpid()}", "w") as log:
        for _ in remaining_epochs_until(1):
            for batch in loader:
                print(*batch["n"][: loader.num_valid].tolist(), file=log, flush=True)
                if loader.batch_index + 1 == num_batches:
                    request_stop()


def by_elasticrun(folder: Path, world_size: int) -> dict[str, Any]:
    directory = folder / f"job-{world_size}"
    run_generation(script, 2, str(folder), str(directory), NUM_READ)
    run_generation(script, world_size, str(folder), str(directory), -1)
    logs = folder.glob(f"{directory.name}.*")
    return counted([int(n) for log in logs for n in log.read_text().split()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    everybody = ["elasticrun", *PEERS]
    parser.add_argument("--only", nargs="*", default=everybody, help="whom to ask")
    chosen = parser.parse_args().only
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        for peer in chosen:
            is_peer = peer in PEERS
            if is_peer and importlib.util.find_spec(PEERS[peer][0]) is None:
                continue
            with contextlib.redirect_stdout(sys.stderr):
                written_for(peer, folder)
            for world_size in (3, 2, 1):
                found = (
                    resumed(peer, folder, world_size)
                    if is_peer
                    else by_elasticrun(folder, world_size)
                )
                report("resume_streams", by=peer, sizes=[2, world_size], **found)


if __name__ == "__main__":
    main()
