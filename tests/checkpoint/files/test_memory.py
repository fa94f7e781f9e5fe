"""The memory that states are captured into."""

from __future__ import annotations

import errno
import gc
import os
import threading
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

from elasticrun import (
    register,
    request_checkpoint,
)
from elasticrun.checkpoint.files.capture_buffers import CHUNK_SIZE, CaptureBuffers
from elasticrun.job.current import current_job
from tests.support.generations import run_once
from tests.support.in_flight import (
    batches,
    committed,
)


def test_memory_is_used_again_and_what_is_too_much_given_back() -> None:
    memory = CaptureBuffers()

    def capture(*sizes: int) -> list[bytes]:
        memory.clear()
        files = [memory.capture(lambda f, n=n: f.write(b"%d" % n * n)) for n in sizes]  # type: ignore[misc]
        return [b"".join(blocks) for blocks in files]

    assert capture(1, 2, 3) == [b"1", b"22", b"333"]
    first = memory._chunks[0]
    large = CHUNK_SIZE // 7 + 10
    assert capture(5, large, 5) == [b"5" * 5, b"%d" % large * large, b"5" * 5]
    assert memory._chunks[0] is first
    assert len(memory._chunks) == 2
    capture(4)
    assert len(memory._chunks) == 2  # Kept for another one like the last.
    capture(4)
    assert memory._chunks == [first]


def test_the_first_save_takes_memory_that_was_touched_beforehand(
    tmp_path: Path,
) -> None:
    def script() -> None:
        net = torch.nn.Linear(1000, 3000)
        optimizer = torch.optim.Adam(net.parameters())
        register(net=net, optimizer=optimizer)
        saver: Any = current_job().boundary._saver
        memory = saver._capturer._memory
        touched = []
        for _ in (loader := batches(4)):
            net(torch.ones(1000)).sum().backward()
            optimizer.step()
            for thread in threading.enumerate():
                if thread.name == "elasticrun-memory":
                    thread.join()
            touched += memory._touched
            if loader.batch_index == 1:
                request_checkpoint()
            if loader.batch_index == 2:
                assert memory._chunks == touched[:1]
                memory._touched.append(memory._chunks[0])  # As what came too late.
            if loader.batch_index == 3:
                request_checkpoint()
        assert not memory._touched

    run_once(script, tmp_path)


@pytest.mark.slow
def test_large_writes_come_in_order_through_any_number_of_threads() -> None:
    content = torch.arange(9_000_001, dtype=torch.int32).numpy()
    for num_threads in (1, 2, 3, 64):
        memory = CaptureBuffers()
        memory.num_threads = num_threads

        def write(file: BinaryIO) -> None:
            for part in (content[:7], content[7:8_000_000], content[8_000_000:]):
                file.write(part.data)

        blocks = memory.capture(write)
        assert b"".join(blocks) == content.tobytes()
        del blocks
        gc.collect()


def test_without_memory_training_waits_and_the_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The system's answer is made up; that it may say so is not."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    def script() -> None:
        register(net=torch.nn.Linear(1000, 100))
        for _ in (loader := batches(3)):
            request_checkpoint()
            assert committed(tmp_path) == list(range(1, loader.batch_index + 1))

    monkeypatch.setattr("mmap.mmap", refuse)
    run_once(script, tmp_path)
    assert committed(tmp_path) == [1, 2, 3]
    assert caplog.text.count("too little memory for a copy of all states") == 1
    assert "Cannot allocate memory" in caplog.text
