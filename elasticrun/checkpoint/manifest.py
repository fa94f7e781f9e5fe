"""The manifest: describes a committed checkpoint, in a file of its own."""

from __future__ import annotations

import hashlib
import json
import shlex
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any

from elasticrun.checkpoint.files.durable import (
    TEMPORARY_SUFFIX,
    DamagedFileError,
    FileRecord,
)
from elasticrun.checkpoint.storage.place import DRAFT_NAME, MANIFEST_NAME
from elasticrun.errors import CheckpointError

FORMAT = 3
_OLDEST_FORMAT = 1  # Of which this elasticrun can read the states.
_END_OF_TIME = 253402300800  # The year 10000, which nothing can show.
VERSIONS_JOB = "AtomicDirectory"  # In the place of a job's name: no job has them.


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything a checkpoint says about itself.

    Writer and reader make one, so that nothing is written that could not be read.

    Attributes:
        job: The job's name; another job's checkpoints are refused.
        position: Where the job stood: finished epochs, finished loops, index.
        rescue: Which rank wrote it alone, and why; left out of any other one.
        files: Each state's file; nothing else in the directory counts.
    """

    # In the order of the text.
    format: int = FORMAT
    job: str
    number: int
    generation: int
    world_size: int
    position: Mapping[str, int | bool]
    time: float
    torch_version: str
    elasticrun_version: str
    rescue: str = ""
    files: tuple[FileRecord, ...]

    def __post_init__(self) -> None:
        for count in (self.number, self.generation, self.world_size):
            _count(count)
        texts = self.job, self.torch_version, self.elasticrun_version, self.rescue
        for text in texts:
            _typed(text, str)
        json.dumps(_typed(self.position, dict), allow_nan=False)  # Or none is written.
        if not 0 <= _typed(self.time, int, float) < _END_OF_TIME:
            raise ValueError(f"{self.time!r} is no time")
        names = [record.name for record in self.files]
        for name in names:
            check_file_name(name)
        if len(set(names)) < len(names):
            raise ValueError(f"a file is listed twice in {sorted(names)}")

    @property
    def digest(self) -> str:
        """A short identity: equal on two replicas only if they see the same content."""
        return hashlib.sha256(self.encode()).hexdigest()[:16]

    def record(self, name: str) -> FileRecord:
        for record in self.files:
            if record.name == name:
                return record
        names = ", ".join(record.name for record in self.files)
        raise KeyError(f"checkpoint {self.number} has no {name!r}, only: {names}")

    def encode(self) -> bytes:
        """Return the manifest as JSON text that ends with its own checksum."""
        fields: dict[str, Any] = {
            **vars(self),
            "position": dict(self.position),
            "files": [
                {**record._asdict(), "crc32": f"{record.crc32:08x}"}
                for record in self.files
            ],
        }
        if not self.rescue:
            del fields["rescue"]
        text = json.dumps(fields, indent=2, allow_nan=False)
        body = text.removesuffix("\n}").encode()
        return body + _trailer(body)


def decode(data: bytes, *, source: str = "the manifest") -> Manifest:
    """Return the manifest that `encode` made these bytes from."""
    body, trailer = data[:-_TRAILER_SIZE], data[-_TRAILER_SIZE:]
    if trailer != _trailer(body):
        raise DamagedFileError(
            f"{source} is damaged: its checksum does not fit its {len(data)} bytes."
        )
    try:
        fields = json.loads(data)
        if fields["format"] in range(_OLDEST_FORMAT, FORMAT + 1):
            return _decode_fields(fields)
    except (KeyError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise DamagedFileError(f"{source} is no manifest: {error!r}.") from error
    raise CheckpointError(
        f"{source} has checkpoint format {fields['format']}, written by elasticrun "
        f"{fields.get('elasticrun_version', 'of an unknown version')}; this elasticrun "
        f"reads formats {_OLDEST_FORMAT} to {FORMAT}. Resume with the version of "
        "elasticrun that wrote it, or start anew in another checkpoint directory."
    )


def check_job(manifest: Manifest, job: str, *, source: str) -> None:
    """Refuse another job's checkpoint."""
    if manifest.job == job:
        return
    if job == VERSIONS_JOB:
        raise CheckpointError(
            f"{source} is a checkpoint of the job {manifest.job!r}. The job would "
            "count versions as checkpoints and remove old ones, so that it could not "
            "resume. "
            "Give the versions their own directory."
        )
    if manifest.job == VERSIONS_JOB:
        raise CheckpointError(
            f"{source} is a version of an AtomicDirectory, but this is the job "
            f"{job!r}. A version has no position to resume at, and the job would "
            "remove old versions as checkpoints. Give the job its own directory "
            "(ELASTICRUN_CHECKPOINT_DIR)."
        )
    raise CheckpointError(
        f"{source} belongs to the job {manifest.job!r}, but this is the job {job!r}. "
        "One job cannot resume from the states of another. Give this one its own "
        "directory (ELASTICRUN_CHECKPOINT_DIR), or, if only its name has changed, set "
        f"ELASTICRUN_JOB={shlex.quote(manifest.job)}."
    )


def check_file_name(name: str) -> None:
    """Refuse a name that is not a plain one for a file inside a checkpoint."""
    if name in ("", ".", "..") or any(character in name for character in "/\\\0"):
        raise ValueError(
            f"{name!r} is not a plain file name. A checkpoint's files lie in its own "
            "directory; use a name without path separators."
        )
    if name in (MANIFEST_NAME, MANIFEST_NAME + TEMPORARY_SUFFIX, DRAFT_NAME):
        raise ValueError(
            f"{name!r} is where a checkpoint keeps its manifest. Use another name."
        )


def _trailer(body: bytes) -> bytes:
    # The checksum covers bytes, not fields, so that every byte before it counts
    # and a later format can keep the same envelope.
    return f',\n  "crc32": "{zlib.crc32(body):08x}"\n}}\n'.encode()


_TRAILER_SIZE = len(_trailer(b""))


def _decode_fields(fields: dict[str, Any]) -> Manifest:
    """Return the manifest of these fields, which any program may have written."""
    del fields["crc32"]
    fields.pop("values", None)  # Of a version that kept the best checkpoint by one.
    files = tuple(
        FileRecord(entry["name"], _count(entry["size"]), int(entry["crc32"], 16))
        for entry in fields.pop("files")
    )
    return Manifest(**fields, files=files)


def _count(value: Any) -> int:
    if _typed(value, int) < 0:
        raise ValueError(f"{value!r} is below 0")
    return int(value)


def _typed(value: Any, *kinds: type) -> Any:
    """Return the value if it is of just one of these types: True is no number."""
    if type(value) not in kinds:
        raise TypeError(f"{value!r} is no {kinds[-1].__name__}")
    return value


@cache
def version() -> str:
    """Return the installed version, or "unknown".

    That is so in a plain source tree, in a copy inside of another package, and while an
    installer replaces the package: then there is none, or whatever reading it raises.
    """
    try:
        installed: str | None = metadata.version("elasticrun")
    except Exception:  # Of a distribution of which some files are gone.
        installed = None
    return installed or "unknown"
