"""What a stream in front of a file knows of errors."""

from __future__ import annotations

import errno

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
