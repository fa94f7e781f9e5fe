"""How long each stream is, and where its samples begin: counted once, kept in files."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import threading
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticrun.checkpoint.files.durable import open_plain, write_anew
from elasticrun.errors import ElasticRunError
from elasticrun.logger import Logger

logger = Logger(__name__)

STRIDE = 256  # Samples from one mark to the next.
_NUM_THREADS = 8
_PARSING = threading.Lock()
_BAR_AFTER_SECONDS = 2.0


class Scan(NamedTuple):
    """What is known of a stream once it has been read through.

    Attributes:
        length: Its samples.
        marks: Where to enter it, a row for each sample whose number is a multiple of
            `STRIDE`; what a row means is the data set's own. Empty without.
        broken: The numbers of samples that are left out, and not in the length.
        begins: The numbers of samples at which it can be entered at once, from 0 on.
            Empty if all that lies before a sample must be read.
        size: Bytes of its samples; 0 if nobody knows.
    """

    length: int
    marks: NDArray[np.int64] = np.empty(0, np.int64)
    broken: NDArray[np.int64] = np.empty(0, np.int64)
    begins: NDArray[np.int64] = np.empty(0, np.int64)
    size: int = 0


class Stream(NamedTuple):
    """A stream whose scan may be kept.

    Attributes:
        kind: How it is counted.
        stamp: What shows that its content is the same: size and time of a file.
    """

    kind: str
    name: str
    stamp: str

    @property
    def file_name(self) -> str:
        """The name of the file in which its scan is kept."""
        text = f"{self.kind}\0{self.name}".encode()
        return f"{hashlib.sha256(text).hexdigest()[:32]}.npz"


def scan_all(
    names: Sequence[str],
    scan: Callable[[int], Scan],
    *,
    kind: str,
    directory: Path | None,
    rank: int,
    world_size: int,
) -> list[Scan]:
    """Return the scan of each stream, from a file or by reading it now.

    Replicas begin at different streams, and look for what others have written: so that
    they share the work without waiting for each other.

    Args:
        directory: Where scans are kept; None to read all streams at each start.
    """

    def scan_one(number: int) -> Scan:
        if directory is None:
            return _named(names[number], scan, number)
        stream = Stream(kind, names[number], stamp_of(names[number]))
        kept = read_scan(directory, stream)
        if kept is None:
            kept = _named(names[number], scan, number)
            write_scan(directory, stream, kept)
        return kept

    first = rank * len(names) // world_size
    numbers = [*range(first, len(names)), *range(first)]
    with ThreadPoolExecutor(_NUM_THREADS) as pool, _bar(len(names), rank) as bar:
        scans: dict[int, Scan] = {}
        for number, made in zip(numbers, pool.map(scan_one, numbers), strict=True):
            scans[number] = made
            bar.update()
    return [scans[number] for number in range(len(names))]


def _named(name: str, scan: Callable[[int], Scan], number: int) -> Scan:
    """Return a scan, or an error that names the stream."""
    try:
        return scan(number)
    except ElasticRunError:
        raise
    except Exception as error:
        raise ElasticRunError(f"{name} cannot be read through: {error!r}") from error


def stamp_of(name: str) -> str:
    """Return size and time of a file, or what a storage says of it; "" of no file."""
    if "://" not in name:
        with contextlib.suppress(OSError):
            status = os.stat(name)
            return f"{status.st_size} {status.st_mtime_ns}"
        return ""
    import fsspec

    with fsspec.open(name) as file:  # A file object; nothing is read.
        about = file.fs.info(file.path) if hasattr(file, "fs") else {}
    keys = ("size", "ETag", "etag", "mtime", "LastModified", "updated", "created")
    return " ".join(str(about[key]) for key in keys if key in about)


def stamps_of(names: Sequence[str]) -> list[str]:
    """Return `stamp_of` each name; a storage is asked for several at once."""
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        return list(pool.map(stamp_of, names))


def read_scan(directory: Path, stream: Stream) -> Scan | None:
    """Return what is kept of a stream, if its content is still the same."""
    try:
        with open(directory / stream.file_name, "rb", opener=open_plain) as file:
            data = io.BytesIO(file.read())
        # NumPy parses each header as Python does a program, and CPython 3.11 counts how
        # deep that is for all threads together: one that waits in it fails another.
        with _PARSING:
            kept = np.load(data, allow_pickle=False)
            if str(kept["stamp"]) != stream.stamp:
                return None
            scan = Scan(
                int(kept["length"]),
                kept["marks"],
                kept["broken"],
                kept["begins"],
                int(kept["size"]),
            )
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
        return None  # None yet, or one that was torn: it is made anew.
    num_marks, is_whole = len(scan.marks), scan.length >= 0 == scan.broken.ndim - 1
    is_marked = not num_marks or num_marks * STRIDE >= scan.length
    return scan if is_whole and is_marked else None


def write_scan(directory: Path, stream: Stream, scan: Scan) -> None:
    """Keep what is known of a stream; a file that is torn is not taken for one.

    Without it the stream is counted again at the next start, so training goes on.
    """
    data = io.BytesIO()
    np.savez(data, stamp=stream.stamp, name=stream.name, **scan._asdict())
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_anew(directory / stream.file_name, data.getvalue())
    except OSError as error:
        _warn_that_not_kept(directory, error.strerror or str(error))


@functools.cache  # Once: a full disk has no room for any of the streams.
def _warn_that_not_kept(directory: Path, why: str) -> None:
    logger.warning(
        "%s cannot keep the lengths of streams: %s. They are counted again at each "
        "start. Make room there, or make it writable.",
        directory,
        why,
    )


def _bar(total: int, rank: int) -> Any:
    """Return a bar on rank 0 for what takes longer, where tqdm is installed."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return _NoBar()
    return tqdm(
        total=total,
        desc="counting samples",
        unit="stream",
        delay=_BAR_AFTER_SECONDS,
        disable=rank != 0,
    )


class _NoBar(contextlib.nullcontext[Any]):
    def __enter__(self) -> _NoBar:
        return self

    def update(self) -> None:
        """Show nothing."""
