"""Measure reading JSON lines in streams beside what else reads them; JSON lines.

    python benchmarks/streams.py [--rounds 5] [--files 16] [--lines 20000]
        [--without PEER ...] [--pictures-only]

All parse the same records to the same tensors in batches of 64, once in order and once
shuffled: elasticrun and Mosaic's streaming by their own shuffle (elasticrun mixes
windows of 1000 samples of each of 16 lanes), the others through a buffer of 1000
samples, as WebDataset's and Hugging Face's are by default. torch, torchdata, Hugging
Face's `datasets` and elasticrun read lines, WebDataset and elasticrun tar shards;
Mosaic has its own format, and stands with the lines. Those that are not installed are
left out. They take turns within each round, and a ratio is that of two turns of one
round; quoted is the median. Above 1.00, elasticrun is the faster one. Without workers
seconds are those of the processor, since others may use the cores.

The last lines are the time to the first batch where a loop begins at its first sample
and at 90 % of one file of `--long` lines, and of a tenth of them, and the memory of
the process after that. The ratio is that of the least times: others may use the cores,
and `load` says how many wanted them.

Before all stand tar shards of 30 kB samples, 64 of 500, shuffled, read by elasticrun
and by WebDataset (a buffer of 1000) without workers, each in a process of its own: the
least time to the first batch in a few turns, of elasticrun also at 90 %, and by how
much the process grows at most in 200 batches.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import itertools
import json
import multiprocessing
import os
import random
import resource
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from machine import report
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from elasticrun import AdaptiveDataLoader, TarShards, TextLines

BATCH_SIZE = 64
BUFFER = 1000


def parsed(line: str) -> torch.Tensor:
    """Return the numbers of a record."""
    return torch.tensor(json.loads(line)["tokens"])


def buffered(samples: Iterable[torch.Tensor], size: int) -> Iterator[torch.Tensor]:
    """Shuffle by a buffer: each sample takes the place of one at random."""
    draws = random.Random(0)
    samples = iter(samples)
    buffer = list(itertools.islice(samples, size))
    for sample in samples:
        place = int(draws.random() * size)
        yield buffer[place]
        buffer[place] = sample
    draws.shuffle(buffer)
    yield from buffer


class Lines(IterableDataset[torch.Tensor]):
    """The files as a program reads them itself, shared out among workers."""

    def __init__(self, paths: list[Path], *, shuffle: bool) -> None:
        self.paths = paths
        self.shuffle = shuffle

    def __iter__(self) -> Iterator[torch.Tensor]:
        samples = self.in_order()
        return buffered(samples, BUFFER) if self.shuffle else samples

    def in_order(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        step = (
            slice(None)
            if worker is None
            else slice(worker.id, None, worker.num_workers)
        )
        for path in self.paths[step]:
            with open(path) as file:
                yield from map(parsed, file)


def decoded(sample: dict[str, Any]) -> torch.Tensor:
    """Return the numbers of a sample of a tar shard."""
    return parsed(sample["json"].decode())


def write(folder: Path, num_files: int, num_lines: int) -> None:
    """Write the records as lines and as tar shards."""
    for number in range(num_files):
        lines = [
            json.dumps({"tokens": list(range(n, n + 64))}) for n in range(num_lines)
        ]
        (folder / f"{number:03}.jsonl").write_text("\n".join(lines) + "\n")
        with tarfile.open(folder / f"{number:03}.tar", "w") as shard:
            for n, line in enumerate(lines):
                member = tarfile.TarInfo(f"{n}.json")
                member.size = len(line)
                shard.addfile(member, io.BytesIO(line.encode()))


Peers = dict[str, Callable[[], Iterable[Any]]]


def peers(folder: Path, num_workers: int, *, shuffle: bool) -> Peers:
    """Return what reads the lines."""
    paths = sorted(folder.glob("*.jsonl"))
    options = {"batch_size": BATCH_SIZE, "num_workers": num_workers}
    streams = TextLines(folder / "*.jsonl", parse=parsed)
    len(streams)  # Counted before, as in every start but the first.
    made: Peers = {
        "elasticrun": lambda: AdaptiveDataLoader(streams, shuffle=shuffle, **options),
        "torch": lambda: DataLoader(Lines(paths, shuffle=shuffle), **options),
    }
    with contextlib.suppress(ImportError):
        from torchdata.stateful_dataloader import StatefulDataLoader

        made["torchdata"] = lambda: StatefulDataLoader(
            Lines(paths, shuffle=shuffle), **options
        )
    with contextlib.suppress(ImportError):
        import datasets

        streamed = datasets.load_dataset(
            "json", data_files=[*map(str, paths)], split="train", streaming=True
        )
        if shuffle:
            streamed = streamed.shuffle(seed=0, buffer_size=BUFFER)
        streamed = streamed.with_format("torch")
        made["datasets"] = lambda: DataLoader(streamed, **options)
    with contextlib.suppress(ImportError):
        made["mosaic"] = mosaic(folder, paths, shuffle=shuffle, options=options)
    return made


def mosaic(
    folder: Path, paths: list[Path], *, shuffle: bool, options: dict[str, int]
) -> Callable[[], Iterable[Any]]:
    """Return what reads the same lines from Mosaic's shards."""
    from streaming import MDSWriter, StreamingDataset

    class Shards(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: int) -> torch.Tensor:
            return parsed(super().__getitem__(at)["line"])

    local = str(folder / "mds")
    if not Path(local).exists():
        with MDSWriter(out=local, columns={"line": "str"}) as shards:
            for line in itertools.chain.from_iterable(map(Path.open, paths)):
                shards.write({"line": line})
    shards = Shards(local=local, shuffle=shuffle, batch_size=BATCH_SIZE)
    return lambda: DataLoader(shards, **options)


def tar_peers(folder: Path, num_workers: int, *, shuffle: bool) -> Peers:
    """Return what reads the tar shards."""
    options = {"batch_size": BATCH_SIZE, "num_workers": num_workers}
    shards = TarShards(folder / "*.tar", transform=decoded)
    len(shards)
    made: Peers = {
        "elasticrun": lambda: AdaptiveDataLoader(shards, shuffle=shuffle, **options)
    }
    with contextlib.suppress(ImportError):
        import webdataset

        paths = [*map(str, sorted(folder.glob("*.tar")))]
        size = BUFFER if shuffle else 0
        made["webdataset"] = lambda: DataLoader(
            webdataset.WebDataset(paths, shardshuffle=False, empty_check=False)
            .shuffle(size)
            .map(decoded),
            **options,
        )
    return made


def samples_per_second(loader: Iterable[Any], clock: Callable[[], float]) -> float:
    """Return the speed of one loop, the start of workers included."""
    num_samples = 0
    begin = clock()
    for batch in loader:
        num_samples += len(
            batch if isinstance(batch, torch.Tensor) else batch["tokens"]
        )
    return num_samples / (clock() - begin)


def compare(case: str, made: Peers, rounds: int) -> None:
    """Report the speed of each, in turns."""
    clock = time.process_time if "0 workers" in case else time.perf_counter
    turns = [
        {name: samples_per_second(make(), clock) for name, make in made.items()}
        for _ in range(rounds)
    ]
    own = [turn["elasticrun"] for turn in turns]
    report(
        benchmark="streams",
        case=case,
        samples_per_second={
            name: round(statistics.median(turn[name] for turn in turns))
            for name in made
        },
        ratio_to={
            name: round(
                statistics.median(
                    mine / turn[name] for mine, turn in zip(own, turns, strict=True)
                ),
                3,
            )
            for name in made
            if name != "elasticrun"
        },
        clock=clock.__name__,
        rounds=rounds,
        load=round(os.getloadavg()[0], 1),
    )


def resume(folder: Path, num_lines: int, turns: int) -> None:
    """Report the time to the first batch at the begin and at 90 % of a long file."""
    path = folder / "long.txt"
    with open(path, "w") as file:
        file.writelines(f"{n} a record of a long file\n" for n in range(num_lines))
    lines = TextLines(path, lanes=8)
    begin = time.perf_counter()
    len(lines)
    counted = time.perf_counter() - begin
    process = psutil.Process()
    for shuffle in (False, True):
        loader = AdaptiveDataLoader(lines, BATCH_SIZE, shuffle)
        seconds: dict[str, list[float]] = {"0 %": [], "90 %": []}
        for _, (case, own) in itertools.product(range(turns), seconds.items()):
            first = len(loader) * 9 // 10 if case == "90 %" else 0
            begin = time.perf_counter()
            next(loader.read(0, first))
            own.append(time.perf_counter() - begin)
        report(
            benchmark="streams",
            case=f"the first batch of {num_lines} lines "
            + ("shuffled" if shuffle else "in order"),
            milliseconds={
                case: {
                    "least": round(min(own) * 1000, 3),
                    "median": round(statistics.median(own) * 1000, 3),
                }
                for case, own in seconds.items()
            },
            ratio=round(min(seconds["90 %"]) / min(seconds["0 %"]), 3),
            mebibytes=round(process.memory_info().rss / 2**20),
            seconds_to_count=round(counted, 2),
            turns=turns,
            load=round(os.getloadavg()[0], 1),
        )


PICTURE, NUM_SHARDS, IN_SHARD = 30_000, 64, 500


def pictures(folder: Path, kind: str, turns: int) -> None:
    """Report the first batch and the memory of shuffled tar shards."""
    paths = [str(path) for path in sorted(folder.glob("*.tar"))]
    seconds: dict[str, list[float]] = {}
    if kind == "elasticrun":
        shards = TarShards(paths, index=folder)
        loader = AdaptiveDataLoader(
            shards, BATCH_SIZE, shuffle=True, collate_fn=unchanged
        )
        places = {"0 %": 0, "90 %": len(loader) * 9 // 10}

        def started(first: int) -> Iterator[Any]:
            return loader.read(0, first)

    else:
        import webdataset

        places = {"0 %": 0}

        def started(first: int) -> Iterator[Any]:
            del first
            dataset = webdataset.WebDataset(paths, shardshuffle=NUM_SHARDS)
            dataset = dataset.shuffle(BUFFER)
            return iter(DataLoader(dataset, BATCH_SIZE, collate_fn=unchanged))

    before = psutil.Process().memory_info().rss
    for _ in itertools.islice(started(0), 200):
        pass
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for _, (place, first) in itertools.product(range(turns), places.items()):
        begin = time.perf_counter()
        next(started(first))
        seconds.setdefault(place, []).append(time.perf_counter() - begin)
    report(
        benchmark="streams",
        case="the first batch of pictures",
        by=kind,
        milliseconds={k: round(min(own) * 1000) for k, own in seconds.items()},
        mebibytes=round((most - before) / 2**20),
        turns=turns,
        load=round(os.getloadavg()[0], 1),
    )


def unchanged(samples: list[Any]) -> list[Any]:
    """Return what was read: WebDataset's samples and ours are alike."""
    return samples


def compare_pictures(folder: Path, without: list[str]) -> None:
    """Write the shards, and let each read them in a fresh process."""
    content = random.Random(0).randbytes(PICTURE)
    for number in range(NUM_SHARDS):
        with tarfile.open(folder / f"pictures-{number:02}.tar", "w") as shard:
            for n in range(IN_SHARD):
                member = tarfile.TarInfo(f"{number * IN_SHARD + n}.jpg")
                member.size = len(content)
                shard.addfile(member, io.BytesIO(content))
    fresh = multiprocessing.get_context("spawn")
    kinds = ["elasticrun"]
    if importlib.util.find_spec("webdataset") and "webdataset" not in without:
        kinds.append("webdataset")
    for kind in kinds:
        alone = fresh.Process(target=pictures, args=(folder, kind, 5))
        alone.start()
        alone.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--files", type=int, default=16)
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--without", nargs="*", default=[], help="peers to leave out")
    parser.add_argument("--long", type=int, default=10_000_000)
    parser.add_argument("--pictures-only", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        compare_pictures(Path(name), options.without)
    if options.pictures_only:
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, options.files, options.lines)
        for num_workers, shuffle in itertools.product((0, 2), (False, True)):
            case = f"{'shuffled' if shuffle else 'in order'}, {num_workers} workers"
            lines = peers(folder, num_workers, shuffle=shuffle)
            tars = tar_peers(folder, num_workers, shuffle=shuffle)
            for what, made in (("lines", lines), ("tar", tars)):
                chosen = {k: v for k, v in made.items() if k not in options.without}
                compare(f"{what} {case}", chosen, options.rounds)
        fresh = multiprocessing.get_context("spawn")
        for num_lines in (options.long // 10, options.long):
            alone = fresh.Process(target=resume, args=(folder, num_lines, 200))
            alone.start()
            alone.join()


if __name__ == "__main__":
    main()
