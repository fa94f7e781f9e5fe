"""How long streams are, and where their samples begin: counted once, and kept."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import io
import json
import os
import pickle
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticrun.checkpoint.files.durable import open_plain, write_anew
from elasticrun.errors import ElasticRunError
from elasticrun.logger import Logger

logger = Logger(__name__)

# Of each stream its name, its samples if they are known, and what shows that its
# content is the same: see `stamp_of`.
Contents = Sequence[tuple[str, int | None, str]]

STRIDE = 256  # Samples from one mark to the next.
_NUM_THREADS = 8
_MOST_PASSED = 1 << 16  # Bytes that an index may have in vain, beside its half.
_BAR_AFTER_SECONDS = 2.0
_PLAIN = (bool, int, float, str, bytes)


class Scan(NamedTuple):
    """What is known of a stream once it has been read through.

    Attributes:
        length: Its samples.
        marks: Where to enter it, a row for each sample whose number is a multiple of
            the data set's `stride`; what a row means is its own. Empty without.
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


class Index:
    """What is known of streams that are counted alike: a line each, in one file.

    All processes append to it, and read what others have appended since: so they share
    the work without waiting for each other. The last line of a stream counts. One that
    is torn, as where two machines append at once through a network, has another
    checksum, and the stream is counted again.

    Args:
        kind: How the streams are counted.
    """

    def __init__(self, directory: Path, kind: str) -> None:
        name = hashlib.sha256(kind.encode()).hexdigest()[:32]
        self._made_of = directory, kind
        self._lock = threading.Lock()  # For the threads that count.
        self._path = directory / f"{name}.index"
        self._known: dict[str, tuple[str, bytes]] = {}  # Stamp and line of each name.
        self._num_read = self._file = 0  # Bytes of it, and which file that was.

    def __reduce__(self) -> Any:
        return Index, self._made_of  # A lock goes to no other process.

    def find(self, name: str, stamp: str) -> Scan | None:
        """Return what is known of a stream, if its content is still the same."""
        for _ in range(2):  # In what was read, and in what others have appended since.
            known = self._known.get(name)
            if known is not None and known[0] == stamp:
                return _decoded(known[1])
            with self._lock:
                self._read_on()
        return None

    def add(self, name: str, stamp: str, scan: Scan) -> None:
        """Keep what is known of a stream.

        Without it the stream is counted again at the next start, so training goes on.
        """
        line = _encoded(name, stamp, scan)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "ab", buffering=0, opener=open_plain) as file:
                file.write(b"\n" + line)  # What was torn before it ends there.
        except (OSError, ValueError) as error:
            with self._lock:  # A cache lets two threads by at once.
                _warn_that_not_kept(self._path.parent, str(error))

    def compact(self) -> None:
        """Write it anew where most of it is of streams that were counted again."""
        self._read_on()
        lines = [line for _, line in self._known.values()]
        if self._num_read > _MOST_PASSED + 2 * sum(map(len, lines)):
            with contextlib.suppress(OSError):
                write_anew(self._path, b"\n".join([b"", *lines]))

    def _read_on(self) -> None:
        """Read what was appended."""
        try:
            with open(self._path, "rb", opener=open_plain) as file:
                about = os.fstat(file.fileno())
                if about.st_ino != self._file:  # It was compacted.
                    self._num_read, self._file = 0, about.st_ino
                file.seek(self._num_read)
                lines = file.read().splitlines(keepends=True)
        except OSError:
            return  # There is none yet.
        except ValueError:  # A link or a pipe, which somebody else has put there.
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            return
        if lines and not lines[-1].endswith(b"\n"):
            del lines[-1]  # Which is being written.
        self._num_read += sum(map(len, lines))
        for line in lines:
            checksum, _, text = line[:-1].partition(b" ")
            if checksum == b"%08x" % zlib.crc32(text):
                name, stamp = json.loads(text.partition(b"\t")[0])
                self._known[name] = stamp, line


def _encoded(name: str, stamp: str, scan: Scan) -> bytes:
    """Return a line: a checksum, what it is of, and what is known."""
    about: list[Any] = [scan.length, scan.size, scan.marks.shape]
    for numbers in (scan.marks, scan.broken, scan.begins):
        data = np.ascontiguousarray(numbers, "<i8").tobytes()
        about.append(base64.b64encode(data).decode())
    text = f"{json.dumps([name, stamp])}\t{json.dumps(about)}".encode()
    return b"%08x %b\n" % (zlib.crc32(text), text)


def _decoded(line: bytes) -> Scan:
    length, size, shape, *kept = json.loads(line.partition(b"\t")[2])
    arrays = (np.frombuffer(base64.b64decode(text), "<i8") for text in kept)
    marks, broken, begins = (each.astype(np.int64) for each in arrays)
    return Scan(length, marks.reshape(shape), broken, begins, size)


def digest_of(function: Any) -> str | None:
    """Return what tells a function from others of its name; None if nothing does.

    That is its code, and values that it holds. What it calls by a name is left out.
    """
    written = io.BytesIO()
    try:
        _FunctionPickler(written).dump(function)
    except Exception:  # It holds what cannot be pickled: a lock, a local class.
        return None
    return hashlib.sha256(written.getvalue()).hexdigest()[:32]


class _FunctionPickler(pickle.Pickler):
    """Writes what a function is made of, where pickle writes a name."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FunctionType):
            held = [cell.cell_contents for cell in value.__closure__ or ()]
            read = [value.__globals__.get(name) for name in value.__code__.co_names]
            held += [each for each in read if isinstance(each, _PLAIN)]
            given = value.__defaults__, value.__kwdefaults__
            return object, (), (value.__qualname__, value.__code__, given, held)
        if isinstance(value, CodeType):
            # A set has another order in each process.
            constants = [
                sorted(map(repr, each)) if isinstance(each, frozenset) else each
                for each in value.co_consts
            ]
            return object, (), (value.co_code, value.co_names, constants)
        if isinstance(value, ModuleType):
            return object, (), value.__name__
        return NotImplemented


def scan_all(
    names: Sequence[str],
    stamps: Sequence[str],
    scan: Callable[[int], Scan],
    *,
    index: Index | None,
    rank: int,
    world_size: int,
) -> list[Scan]:
    """Return the scan of each stream, from an index or by reading it now.

    Replicas begin at different streams, and look for what others have counted.

    Args:
        stamps: What shows that the content of each is the same: see `stamp_of`.
        index: Where scans are kept; None to read all streams at each start.
    """

    def scan_one(number: int) -> Scan:
        name, stamp = names[number], stamps[number]
        kept = index.find(name, stamp) if index else None
        if kept is None:
            kept = _named(name, scan, number)
            if index:
                index.add(name, stamp, kept)
        return kept

    if index and rank == 0:
        index.compact()
    first = rank * len(names) // world_size
    numbers = [*range(first, len(names)), *range(first)]
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        made = _with_bar(pool.map(scan_one, numbers), len(names), rank)
        scans = dict(zip(numbers, made, strict=True))
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

    files, path = fsspec.core.url_to_fs(name)
    about = files.info(path)
    keys = ("size", "ETag", "etag", "mtime", "LastModified", "updated", "created")
    return " ".join(str(about[key]) for key in keys if key in about)


def stamps_of(names: Sequence[str]) -> list[str]:
    """Return `stamp_of` each name; a storage is asked for several at once."""
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        return list(pool.map(stamp_of, names))


@functools.cache  # Once: a full disk has no room for any of the streams.
def _warn_that_not_kept(directory: Path, why: str) -> None:
    logger.warning(
        "%s cannot keep the lengths of streams: %s. They are counted again at each "
        "start. Make room there, or make it writable.",
        directory,
        why,
    )


def _with_bar(scans: Iterator[Scan], total: int, rank: int) -> Iterable[Scan]:
    """Show a bar on rank 0 for what takes longer, where tqdm is installed."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return scans
    bar: Iterable[Scan] = tqdm(
        scans,
        total=total,
        desc="counting samples",
        unit="stream",
        delay=_BAR_AFTER_SECONDS,
        disable=rank != 0,
    )
    return bar
