"""`elasticrun run`: one job from its start to its exit code."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from elasticrun.errors import STOP_CODES, STOPPED
from elasticrun.launcher import directory, processes
from elasticrun.launcher.control import sockets
from elasticrun.launcher.control.server import Server
from elasticrun.launcher.directory import check_meeting_place, locked, make_usable
from elasticrun.launcher.event_loop import EventLoop
from elasticrun.launcher.events import EventKeeper
from elasticrun.launcher.linting import Linting
from elasticrun.launcher.options import Options
from elasticrun.launcher.stop_signals import StopSignals, signals_as_bytes
from elasticrun.launcher.supervisor.status import JobStatus
from elasticrun.launcher.supervisor.supervisor import Supervisor
from elasticrun.launcher.terminal.console import Console, open_console
from elasticrun.replicas.wire import raise_limit_of_open_files

if TYPE_CHECKING:
    from elasticrun.launcher.notices import Notice, Notices

_STATUS_SECONDS = 0.5


def run_job(options: Options) -> int:
    """Run the job, and return the launcher's exit code."""
    console = open_console()
    with contextlib.closing(console):
        raise_limit_of_open_files()
        _move_aside_if_fresh(options, console)
        directory.check_reachable(options.checkpoint_dir)
        if _is_finished(options, console):
            return 0
        # What comes last is closed first: who waits for the end is answered before the
        # processes are ended, and another job is kept out until they are.
        with ExitStack() as stack:
            stop_signals = options.settings.stop_signals
            wakeups = stack.enter_context(signals_as_bytes(stop_signals))
            is_shared = options.nodes is not None
            lock = locked(options.local_dir, is_shared=is_shared)
            find_loss = stack.enter_context(lock)
            if options.nodes and options.nodes.place == str(options.local_dir):
                check_meeting_place(options.local_dir)
            _check_logs(options)
            processes.adopt_orphans()
            loop = EventLoop()
            control = sockets.ControlSocket()
            stack.callback(control.close)
            supervisor = Supervisor(options, console, loop, find_loss)
            keeper = EventKeeper(options, console, lambda: supervisor.is_first_node)
            stack.callback(keeper.close)
            stack.callback(supervisor.close)
            _say_where(options, console)
            status = JobStatus(supervisor)
            stops = StopSignals(supervisor.stop, stop_signals)
            stack.callback(Server(control, supervisor, status, stops).close)
            loop.watch(wakeups, lambda: stops.read(wakeups))
            if options.lifeline is not None:
                on_end = partial(_on_lifeline, loop, stops, options.lifeline)
                loop.watch(options.lifeline, on_end)
            if options.notice is not None:
                notices = _look_for_notices(options.notice, supervisor, console, stops)
                stack.callback(notices.close)
            _keep_status_line(loop, console, status)
            script = options.program.file if options.is_linted else None
            linting = Linting(script, console, loop)
            stack.callback(linting.close)
            supervisor.start()
            while supervisor.exit_code is None:
                loop.run_once()
            if supervisor.exit_code not in STOP_CODES:  # A stop waits for nothing.
                linting.finish(wakeups)
            console.record("end", console.last_event, code=supervisor.exit_code)
            return supervisor.exit_code


def _move_aside_if_fresh(options: Options, console: Console) -> None:
    if not options.is_fresh:
        return
    where = options.checkpoint_dir
    if not options.log_dir.is_relative_to(options.local_dir):
        _check_logs(options)  # Before anything is moved for a job that cannot start.
    if (moved := directory.move_aside(where)) is not None:
        console.event(f"starting anew; what was in {where} is now in {moved}")


def _check_logs(options: Options) -> None:
    make_usable(options.log_dir, what="logs", option="--log-dir")


def _is_finished(options: Options, console: Console) -> bool:
    """Return whether there is nothing left to do, and say so."""
    where = options.checkpoint_dir
    when = directory.finished_at(where, options.program)
    if when is not None:
        date = time.strftime("%Y-%m-%d %H:%M", time.localtime(when))
        console.event(
            f"{options.name} is finished: this program came to its end on {date}, with "
            f"checkpoint {directory.newest_checkpoint(where)} in {where}. To train "
            f"longer, raise its number of epochs in {options.program.label} or its "
            "arguments; to start anew, or if other files have changed, add --fresh."
        )
        return True
    return False


def _say_where(options: Options, console: Console) -> None:
    where = options.checkpoint_dir
    newest = directory.newest_checkpoint(where)
    console.event(
        f"job {options.name}, checkpoints in {where}"
        + (f", resuming from checkpoint {newest}" if newest else "")
        + f", logs in {options.log_dir}",
        "start",
        pid=os.getpid(),
        host=socket.gethostname(),
        program=options.program.label,
        replicas=options.replicas.initial,
        checkpoint_dir=str(where),
        checkpoint=newest or None,
        log_dir=str(options.log_dir),
    )


def _on_lifeline(loop: EventLoop, stops: StopSignals, lifeline: int) -> None:
    """Stop: the process that started this one has ended."""
    loop.forget(lifeline)
    stops.take_end_of_parent(now=time.monotonic())


def _look_for_notices(
    source: str, supervisor: Supervisor, console: Console, stops: StopSignals
) -> Notices:
    """Leave when this machine is to be taken away."""
    from elasticrun.launcher.notices import Notices  # Few jobs need HTTP.

    def on_notice(notice: Notice) -> None:
        if notice.deadline is not None:
            supervisor.limit_grace(notice.deadline - time.time())
        stops.announce(notice.text, STOPPED, now=time.monotonic())

    loop, say = supervisor.loop, console.event
    return Notices(source, loop, on_notice=on_notice, say=say)


def _keep_status_line(loop: EventLoop, console: Console, status: JobStatus) -> None:
    if not console.has_status_line:
        return

    def show() -> None:
        console.show_status(status.status_line())
        loop.call_later(_STATUS_SECONDS, show)

    show()
