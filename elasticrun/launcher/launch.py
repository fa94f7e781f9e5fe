"""`elasticrun.launch`: starts a job from Python or a notebook."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from elasticrun.errors import STOP_CODES, ElasticRunError
from elasticrun.launcher.control.jobs import JobConnection, JobError, find_job
from elasticrun.launcher.interpreter import command
from elasticrun.launcher.replica.functions import read_results, save_function

_LAST_LINES = 40
_FIND_SECONDS = 30.0
_LAST = "Its last lines:\n"
_LOGS = "logs"  # Beside temporary checkpoints, so that they alone can stay.


class LaunchedJob:
    """A job that `launch` has started, and that goes on by itself.

    Attributes:
        pid: The launcher's process; `elasticrun status` shows it.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        folder: Path,
        lifeline: int,
        *,
        is_temporary: bool,
    ) -> None:
        self._process = process
        self._folder = folder
        self._lifeline = lifeline
        self._is_temporary = is_temporary
        # Also at the end of this process, and when nobody can ask for results.
        self._leave = weakref.finalize(
            self, _leave, process, folder, lifeline, is_temporary
        )
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._results: list[Any] | None = None
        self._error: Exception | None = None
        self._copiers = [
            threading.Thread(target=self._copy, args=streams, daemon=True)
            for streams in ((process.stdout, "stdout"), (process.stderr, "stderr"))
        ]
        for copier in self._copiers:
            copier.start()
        self.pid = process.pid

    def scale(self, replicas: int, *, force: bool = False) -> None:
        """Go on with so many replicas; returns when they train.

        Args:
            force: Even if there are too few samples, GPUs or cores for them.
        """
        with self._find() as job:
            for _ in job.scale(replicas, is_forced=force):
                continue

    def status(self) -> dict[str, Any]:
        """Return what `elasticrun status --json` prints."""
        with self._find() as job:
            return job.status

    def stop(self) -> None:
        """Save, end the job and wait for its end; `launch` it again to go on."""
        with self._find() as job:
            for _ in job.stop():
                continue
        self._process.wait()

    def result(self, timeout: float | None = None) -> list[Any]:
        """Wait for the job's end; return what the function returned, by rank."""
        if self._results is not None:
            return self._results
        if self._error is not None:  # What it came from is removed.
            raise self._error
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"the job still runs after {timeout:g} s") from error
        for copier in self._copiers:
            copier.join()
        if code != 0:
            raise ElasticRunError(self._explain(code) + "".join(self._lines))
        try:
            self._results = read_results(self._folder)
        except Exception as error:
            self._error = error
            raise
        finally:
            if self._results is not None or self._error is not None:
                self._leave()
        return self._results

    def _explain(self, code: int) -> str:
        """Return how the job ended, for people; remove what nobody needs after that."""
        logs = self._folder / _LOGS
        is_failed = code not in STOP_CODES
        if is_failed and self._is_temporary and logs.exists():
            if self._leave.detach() is not None:
                os.close(self._lifeline)
                for path in {*self._folder.iterdir()} - {logs}:
                    if path.is_dir():
                        shutil.rmtree(path, ignore_errors=True)
                    else:
                        path.unlink()
            return f"the job failed (exit code {code}; logs in {logs}). {_LAST}"
        self._leave()
        if is_failed:
            return f"the job failed (exit code {code}). {_LAST}"
        if self._is_temporary:
            return (
                f"the job was stopped (exit code {code}), and its temporary "
                "checkpoints are removed; give a checkpoint_dir to be able to resume. "
                f"{_LAST}"
            )
        return (
            f"the job was stopped (exit code {code}); call launch with the same "
            f"checkpoint_dir to resume. {_LAST}"
        )

    def interrupt(self) -> None:
        """Save and end the job, as Ctrl-C does on a terminal."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)

    def _find(self) -> JobConnection:
        """Return a connection, as soon as the launcher listens."""
        deadline = time.monotonic() + _FIND_SECONDS
        while True:
            try:
                return find_job(str(self.pid))
            except JobError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise ElasticRunError(
                        "the job is not running; result() says how it ended"
                    ) from error
            time.sleep(0.01)

    def _copy(self, source: IO[bytes], target: str) -> None:
        """Print what the launcher prints where this process does: in the notebook."""
        with source:
            for data in source:
                line = data.decode("utf-8", "replace")
                self._lines.append(line)
                with contextlib.suppress(OSError, ValueError):
                    getattr(sys, target).write(line)


def launch(
    function: Callable[..., Any],
    *args: Any,
    replicas: int | str = "auto",
    checkpoint_dir: str | os.PathLike[str] | None = None,
    fresh: bool = False,
    max_restarts: int = 3,
    grace: float | None = None,
    save_interval: float | str | None = None,
    hang_timeout: float | str = "auto",
    start: str = "fork",
    name: str | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    wait: bool = True,
) -> Any:
    """Run `function(*args)` on every replica of a job, as `elasticrun run` does.

    The function, its arguments and what it returns travel by cloudpickle, through files
    that only this user can read. The job ends with this process: it saves first.

    Args:
        replicas: A number, "auto", or "MIN:MAX".
        checkpoint_dir: Where it goes on from; None for a temporary one, which serves
            restarts and is removed at the end, except for the logs of a failed job.
        wait: Return the results; else a `LaunchedJob` at once.

    Returns:
        What the function returned, by rank; or the running job.

    Raises:
        ElasticRunError: The job failed or was stopped.
        TypeError: `function` is none.
    """
    folder = _folder_with(function, args)
    reader, writer = os.pipe()
    options = {
        "--replicas": replicas,
        "--checkpoint-dir": checkpoint_dir or folder / "checkpoints",
        "--max-restarts": max_restarts,
        "--grace": grace,
        "--save-interval": save_interval,
        "--hang-timeout": hang_timeout,
        "--start": start,
        "--name": name or getattr(function, "__name__", "function"),
        "--log-dir": log_dir or (None if checkpoint_dir else folder / _LOGS),
        "--lifeline": reader,
    }
    process = _start(folder, options, fresh=fresh, lifeline=reader)
    job = LaunchedJob(process, folder, writer, is_temporary=checkpoint_dir is None)
    return _result_of(job) if wait else job


def _folder_with(function: Callable[..., Any], args: tuple[Any, ...]) -> Path:
    """Return a new folder, from which replicas take what to call."""
    if not callable(function):
        raise TypeError(
            f"launch needs a function that every replica calls, not {function!r}"
        )
    folder = Path(tempfile.mkdtemp(prefix="elasticrun-launch-"))
    try:
        save_function(folder, function, args)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def _result_of(job: LaunchedJob) -> list[Any]:
    """Wait for a job; if this process is to end, let it save and end first."""
    try:
        return job.result()
    except (KeyboardInterrupt, SystemExit):
        job.interrupt()
        with contextlib.suppress(ElasticRunError):
            job.result()
        raise


def _start(
    folder: Path, options: Mapping[str, object], *, fresh: bool, lifeline: int
) -> subprocess.Popen[bytes]:
    words: list[object] = ["--fresh"] if fresh else []
    for option, value in options.items():
        if value is not None:
            text = os.fspath(value) if isinstance(value, os.PathLike) else value
            words += [option, text]
    words += [folder, *(path or os.getcwd() for path in sys.path)]
    process = subprocess.Popen(
        command("__main__", "main", "run", "--function", *words),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[lifeline],
        start_new_session=True,
    )
    os.close(lifeline)
    return process


def _leave(
    process: subprocess.Popen[bytes], folder: Path, lifeline: int, is_temporary: bool
) -> None:
    """Remove what only this process needs; the job, if it still runs, is to end."""
    with contextlib.suppress(OSError):
        os.close(lifeline)  # It saves and ends.
    if is_temporary and process.poll() is None:
        process.kill()  # What it would save is removed.
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)
