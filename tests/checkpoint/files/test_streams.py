"""What a stream in front of a file knows of errors."""

from __future__ import annotations

import errno
import threading
import zlib

import numpy as np
import pytest
import torch

from elasticrun.checkpoint.files.capture_buffers import NoMemoryLeftError
from elasticrun.checkpoint.files.durable import ChecksumWriter, write_through


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), NoMemoryLeftError("no room")],
)
def test_a_full_disk_is_told_as_such_whatever_torch_makes_of_it(
    error: Exception,
) -> None:
    left = 0

    def take(data: memoryview) -> None:
        nonlocal left
        left -= data.nbytes
        if left < 0:
            raise error

    causes = set()
    for room in range(0, 1000, 50):
        left, error.__cause__ = room, None
        with pytest.raises(type(error), match="no room|No space left") as caught:
            write_through(
                ChecksumWriter(take), lambda out: torch.save(torch.zeros(99), out)
            )
        causes.add(type(caught.value.__cause__))
    assert causes == {
        RuntimeError,
        type(None),
    }  # Else torch has changed for the better.
    with pytest.raises(LookupError):
        write_through(ChecksumWriter(take), lambda out: {}["a mistake"])


@pytest.mark.parametrize("length", [8, 1 << 20])
def test_bytes_that_are_not_contiguous_are_refused(length: int) -> None:
    writer = ChecksumWriter(bytearray().extend)
    with pytest.raises(BufferError, match="contiguous"):
        writer.write(np.zeros((length, 2))[:, 0])
    assert writer.size == 0


@pytest.mark.parametrize("has_threads", [True, False])
def test_the_checksum_is_of_what_was_given_whatever_becomes_of_it(
    monkeypatch: pytest.MonkeyPatch, has_threads: bool
) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    if not has_threads:
        monkeypatch.setattr(threading.Thread, "start", fail)
    taken = bytearray()
    writer = ChecksumWriter(taken.extend)
    data = bytearray(8 << 20)
    for value in range(3):
        data[:] = bytes([value]) * len(data)
        writer.write(data)
    data[:] = b"-" * len(data)
    assert (writer.size, writer.crc32) == (len(taken), zlib.crc32(taken))
