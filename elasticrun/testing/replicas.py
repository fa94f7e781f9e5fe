"""Runs a function in real replicas, as a launcher would, and returns the outcomes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import cloudpickle
from torch.distributed import TCPStore

from elasticrun.errors import STOP_CODES, ElasticRunError, JobStopped
from elasticrun.job.current import close_current_job
from elasticrun.replicas.environment import torchrun_variables
from elasticrun.replicas.store import serve_store_at


class GenerationFailed(ElasticRunError):
    """A replica raised, died or hung; the text has every traceback."""


@dataclass(frozen=True)
class Outcome:
    """How one replica ended.

    Attributes:
        result: What the function returned, or None.
        exit_code: As a shell sees it: 0, the code of a stop, or minus a signal's
            number.
        error: The traceback of what it raised, or None.
    """

    result: Any
    exit_code: int | None
    error: str | None


class StartedGeneration:
    """Replicas that run; use it as a context manager, which leaves none behind."""

    def __init__(
        self, processes: list[BaseProcess], pipes: list[Connection], server: TCPStore
    ) -> None:
        self._processes = processes
        self._pipes = pipes
        self._server = server

    def __enter__(self) -> StartedGeneration:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()

    def pid(self, rank: int) -> int:
        """Return the process number of a replica."""
        pid = self._processes[rank].pid
        assert pid is not None
        return pid

    def send_signal(self, rank: int, number: int = signal.SIGTERM) -> None:
        """Send a signal to one replica."""
        os.kill(self.pid(rank), number)

    def wait(self, *, timeout: float) -> list[Outcome]:
        """Return how every replica ended, by rank.

        Raises:
            GenerationFailed: One still ran after `timeout` seconds; all are killed.
        """
        messages: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + timeout
        open_pipes = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while open_pipes:
            ready = wait(list(open_pipes), max(0.0, deadline - time.monotonic()))
            if not ready:
                self._fail_hung(sorted(open_pipes.values()), timeout)
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = open_pipes.pop(pipe)
                with contextlib.suppress(EOFError):  # It died without a word.
                    messages[rank] = cloudpickle.loads(pipe.recv_bytes())
        for rank, process in enumerate(self._processes):
            process.join(max(0.1, deadline - time.monotonic()))
            if process.is_alive():
                self._fail_hung([rank], timeout)
        return [
            Outcome(
                result=messages.get(rank, {}).get("result"),
                exit_code=process.exitcode,
                error=messages.get(rank, {}).get("error"),
            )
            for rank, process in enumerate(self._processes)
        ]

    def _fail_hung(self, ranks: list[int], timeout: float) -> None:
        for process in self._processes:
            process.kill()
        raise GenerationFailed(
            f"rank {', '.join(map(str, ranks))} still ran after {timeout:.0f} s and "
            "was killed, with all others."
        )


def start_generation(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    variables: Mapping[str, str] | None = None,
) -> StartedGeneration:
    """Start `world_size` real replicas of `function(*args)`.

    They come from a forkserver that has imported torch, meet through a store on
    loopback, and find the variables that torchrun would set. The function and its
    arguments travel by cloudpickle.

    Args:
        variables: More environment variables, such as ELASTICRUN_TRACE.
    """
    server = serve_store_at("127.0.0.1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["elasticrun.testing.preloaded"])
    payload = cloudpickle.dumps((function, args))
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        environment = {
            **torchrun_variables(rank=rank, world_size=world_size, port=server.port),
            **(variables or {}),
        }
        process = context.Process(
            target=_run_replica, args=(payload, environment, sender), daemon=False
        )
        process.start()
        sender.close()
        processes.append(process)
        pipes.append(receiver)
    return StartedGeneration(processes, pipes, server)


def run_generation(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 300.0,
    variables: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run real replicas of `function(*args)` and return what they returned, by rank.

    A replica that stops (`JobStopped`) returns None; that is no failure.

    Args:
        timeout: Seconds, from their start on, after which those that still run are
            killed as hung; many more than a busy machine needs.

    Raises:
        GenerationFailed: A replica raised, died or hung.
    """
    with start_generation(function, world_size, *args, variables=variables) as started:
        outcomes = started.wait(timeout=timeout)
    failures = [
        f"rank {rank} (exit code {outcome.exit_code}):\n{outcome.error or ''}"
        for rank, outcome in enumerate(outcomes)
        if outcome.error or outcome.exit_code not in {0, *STOP_CODES}
    ]
    if failures:
        raise GenerationFailed("\n".join(failures))
    return [outcome.result for outcome in outcomes]


def _run_replica(
    payload: bytes, environment: dict[str, str], sender: Connection
) -> None:
    """Run the function in a replica's process; send what it returns or raises."""
    os.environ.update(environment)
    # The forkserver has made its own method the default; a script's workers are to
    # start as they would elsewhere.
    multiprocessing.set_start_method(None, force=True)
    message: dict[str, Any] = {}
    exit_code = 0
    try:
        function, args = cloudpickle.loads(payload)
        message["result"] = function(*args)
    except JobStopped as stop:
        exit_code = int(str(stop.code))
    except SystemExit as stop:
        exit_code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        message["error"] = traceback.format_exc()
        exit_code = 1
    finally:
        close_current_job()  # As `atexit` does in a script; forks have no atexit.
    sender.send_bytes(cloudpickle.dumps(message))
    sender.close()
    raise SystemExit(exit_code)
