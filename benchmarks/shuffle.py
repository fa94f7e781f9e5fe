"""Measure how well the orders of streams mix; JSON lines.

    python benchmarks/shuffle.py [--quick]

Three epochs over files of lines, by each library's own shuffle: elasticrun's streams,
torch's DataLoader by index, and of those that are installed WebDataset (a buffer of
1000 samples, shards shuffled), Mosaic's streaming (py1e) and litData; by others the
first data set alone, one shard for each file. Printed are the share of pairs of files
that were in one batch, the correlation of a sample's place in the epoch with that in
its file, and how often two samples of a batch are in one of the next epoch, too, over
chance.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from machine import report
from torch.utils.data import DataLoader

from elasticrun import AdaptiveDataLoader, TextLines

sys.path.insert(0, str(Path(__file__).parent.parent))  # Where the tests are.

from tests.support.mixing import mixing

NUM_EPOCHS = 3
# Files, samples in each, and samples in a batch.
CASES = [
    (64, 1500, 16),
    (128, 1500, 16),
    (256, 500, 32),
    (1000, 60, 32),
    (16, 6000, 16),
    (1, 50_000, 32),
]

# Returns the samples of the next epoch.
Epoch = Callable[[], Iterable[int]]


def elasticrun(folder: Path, num_files: int, length: int, batch_size: int) -> Epoch:
    for number in range(num_files):
        first = number * length
        (folder / f"{number:04}.txt").write_text(
            "".join(f"{sample}\n" for sample in range(first, first + length))
        )
    lines = TextLines(folder / "*.txt", parse=int)
    loader = AdaptiveDataLoader(lines, batch_size, shuffle=True)
    epochs = itertools.count()

    def epoch() -> Iterable[int]:
        for batch, _ in loader.read(next(epochs)):
            yield from batch.tolist()

    return epoch


def torch(folder: Path, num_files: int, length: int, batch_size: int) -> Epoch:
    del folder
    loader: Any = DataLoader(range(num_files * length), batch_size, shuffle=True)  # type: ignore[arg-type]
    return lambda: itertools.chain.from_iterable(batch.tolist() for batch in loader)


def webdataset(folder: Path, num_files: int, length: int, batch_size: int) -> Epoch:
    import webdataset

    del batch_size
    for number in range(num_files):
        with tarfile.open(folder / f"{number:04}.tar", "w") as shard:
            for sample in range(number * length, (number + 1) * length):
                member = tarfile.TarInfo(f"{sample}.txt")
                member.size = len(str(sample))
                shard.addfile(member, io.BytesIO(str(sample).encode()))
    shards = [str(path) for path in sorted(folder.glob("*.tar"))]
    dataset = webdataset.WebDataset(shards, shardshuffle=len(shards)).shuffle(1000)
    return lambda: (int(sample["__key__"]) for sample in dataset)


def mosaic(folder: Path, num_files: int, length: int, batch_size: int) -> Epoch:
    from streaming import MDSWriter, StreamingDataset
    from streaming.base.util import merge_index

    for number in range(num_files):
        with MDSWriter(out=str(folder / f"{number:04}"), columns={"n": "int"}) as shard:
            for sample in range(number * length, (number + 1) * length):
                shard.write({"n": sample})
    merge_index(str(folder))
    dataset = StreamingDataset(
        local=str(folder), shuffle=True, shuffle_algo="py1e", batch_size=batch_size
    )
    return lambda: (int(sample["n"]) for sample in dataset)


def litdata(folder: Path, num_files: int, length: int, batch_size: int) -> Epoch:
    from litdata import StreamingDataLoader, StreamingDataset, optimize

    samples = [*range(num_files * length)]
    optimize(itself, samples, str(folder), chunk_size=length, num_workers=1)
    dataset = StreamingDataset(str(folder), shuffle=True)
    loader = StreamingDataLoader(dataset, batch_size=batch_size)
    return lambda: itertools.chain.from_iterable(batch.tolist() for batch in loader)


def itself(sample: int) -> int:
    return sample


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="the first case alone")
    cases = CASES[:1] if parser.parse_args().quick else CASES
    peers = (elasticrun, torch, webdataset, mosaic, litdata)
    for case, make in itertools.product(cases, peers):
        if make is not elasticrun and case is not CASES[0]:
            continue
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.suppress(ModuleNotFoundError),
        ):
            epoch = make(Path(folder), *case)
            orders = [np.fromiter(epoch(), np.int64) for _ in range(NUM_EPOCHS)]
            met, correlation, again = mixing(orders, case[0], case[2])
            report(
                "shuffle",
                by=make.__name__,
                files=case[0],
                samples_in_each=case[1],
                batch_size=case[2],
                pairs_that_met=round(met, 3),
                correlation=round(correlation, 3),
                together_again=round(again, 3),
            )


if __name__ == "__main__":
    main()
