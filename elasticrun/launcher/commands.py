"""The commands that start a job or talk to one; each returns an exit code."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

from elasticrun.checkpoint.events import local_directory
from elasticrun.checkpoint.inspection.listing import (
    NEWEST,
    InspectionError,
    choose_checkpoint,
    choose_storage,
)
from elasticrun.checkpoint.storage.place import Place
from elasticrun.checkpoint.storage.remote import storage_at
from elasticrun.errors import NO_JOB, USAGE, CheckpointError, ElasticRunError
from elasticrun.launcher import environment
from elasticrun.launcher.control.jobs import (
    JobConnection,
    JobError,
    SilentJobError,
    find_job,
    find_jobs,
    find_known_job,
    status_of_ended,
)
from elasticrun.launcher.options import (
    AUTO,
    SETTINGS_BY_OPTION,
    NodeSettings,
    OptionError,
    Options,
    Program,
    check_name,
    make_program,
    options_of_torchrun,
    parse_hang_timeout,
    parse_max_restarts,
    parse_nodes,
    parse_replicas,
    read_settings,
)
from elasticrun.launcher.terminal.console import coloured_by_rank, only_colours
from elasticrun.launcher.terminal.output import LogReader, find_logs, marked
from elasticrun.launcher.terminal.status_table import render, render_ended

_FOLLOW_SECONDS = 0.2


def run(arguments: argparse.Namespace) -> int:
    """Start a job and wait for its end."""
    from elasticrun.launcher.run import run_job

    for option in _misplaced(arguments):
        _note(
            f"note: {option} stands behind the script, so the script gets it; put it "
            "before the script to give it to elasticrun"
        )
    try:
        return run_job(_options(arguments))
    except OptionError as error:
        return _fail(str(error), USAGE)


def _misplaced(arguments: argparse.Namespace) -> list[str]:
    """Return options of the launcher that the script is given."""
    given = (word.partition("=")[0] for word in arguments.args)
    own = ("--replicas", "--nodes", "--checkpoint-dir", "--max-restarts")
    return [] if arguments.function else [word for word in given if word in own]


def _options(arguments: argparse.Namespace) -> Options:
    program = _program(arguments)
    variables = environment.variables()
    for option, text in options_of_torchrun(variables).items():
        if getattr(arguments, option) is None:
            setattr(arguments, option, text)
    name = arguments.name or variables.get("ELASTICRUN_JOB")
    place = _checkpoint_place(
        arguments.checkpoint_dir
        or variables.get("ELASTICRUN_CHECKPOINT_DIR")
        or f"{program.label.removesuffix('.py')}-checkpoints"
    )
    local = local_directory(place)
    nodes = parse_nodes(
        arguments.nodes,
        arguments.rdzv_endpoint,
        place=place,
        address=arguments.address,
    )
    _check(arguments, nodes)
    given = {name: getattr(arguments, name) for name in SETTINGS_BY_OPTION}
    settings, variables_of_settings = read_settings(variables, **given)
    num_shares = settings.virtual_replicas
    return Options(
        program=program,
        replicas=parse_replicas(arguments.replicas or AUTO, num_shares=num_shares),
        name=name or program.label,
        is_named=name is not None,
        checkpoint_dir=place,
        local_dir=local,
        log_dir=Path(os.path.abspath(arguments.log_dir or local / "logs")),
        is_fresh=arguments.fresh,
        max_restarts=parse_max_restarts(arguments.max_restarts),
        is_exec=arguments.start == "exec",
        hang_timeout=parse_hang_timeout(arguments.hang_timeout),
        spares=arguments.spares,
        settings=settings,
        variables=variables_of_settings,
        lifeline=arguments.lifeline,
        is_linted=arguments.lint,
        nodes=nodes,
        notice=arguments.notice,
        is_quiet=arguments.quiet,
        on_event=arguments.on_event,
    )


def _check(arguments: argparse.Namespace, nodes: NodeSettings | None) -> None:
    if arguments.function and nodes is not None:
        raise OptionError(
            f"launch() trains on this machine alone, and PET_NNODES={arguments.nodes} "
            "says that it is one of several. Use `elasticrun run`, or set PET_NNODES=1."
        )
    if arguments.spares == "prepared" and nodes is not None:
        raise OptionError(
            "--spares with --nodes: a spare starts with a number of replicas and an "
            "address, and other machines may change both. Leave out one of the two "
            "options."
        )
    if arguments.fresh and nodes is not None:
        raise OptionError(
            "--fresh with --nodes: the machines start one after another, so one would "
            "move aside what another has just begun. Move the checkpoint directory "
            "yourself before the start, or give another --checkpoint-dir."
        )


def _checkpoint_place(text: str) -> Place:
    check_name(os.path.abspath(text))
    try:
        return storage_at(text).place
    except (CheckpointError, ValueError) as error:
        raise OptionError(str(error)) from error


def _program(arguments: argparse.Namespace) -> Program:
    if arguments.function:
        return Program("function", arguments.script, (), tuple(arguments.args))
    return make_program(arguments.script, arguments.args, is_module=arguments.is_module)


def scale(arguments: argparse.Namespace) -> int:
    """Change the number of replicas, and wait until they train."""
    text = arguments.replicas
    if not re.fullmatch(r"[+-]?\d+", text):
        return _fail(f"{text!r} is no number of replicas: give N, +N or -N", USAGE)

    def ask(job: JobConnection) -> Iterator[str]:
        before = 0 if text.isdecimal() else int(job.status["target"])
        return job.scale(before + int(text), is_forced=arguments.force)

    return _follow(arguments, ask)


def stop(arguments: argparse.Namespace) -> int:
    """End a job, saved unless that is not wanted, and wait for its end."""
    try:
        try:
            job = find_job(arguments.job)
        except SilentJobError as error:
            _say_all(error.title, error.stop(is_now=arguments.now))
            return 0
        with job:
            _say_all(job.title, job.stop(is_now=arguments.now))
    except JobError as error:
        return _fail(str(error), error.exit_code)
    return 0


def leave(arguments: argparse.Namespace) -> int:
    """Save and end on this node, while the others go on, and wait for its end."""
    return _follow(arguments, JobConnection.leave)


def _follow(
    arguments: argparse.Namespace, ask: Callable[[JobConnection], Iterator[str]]
) -> int:
    """Ask a job for a change, and say what happens until it is done."""
    try:
        with find_job(arguments.job) as job:
            _say_all(job.title, ask(job))
    except JobError as error:
        return _fail(str(error), error.exit_code)
    return 0


def _say_all(title: str, texts: Iterator[str]) -> None:
    _note(title)
    for text in texts:
        _say(text)


def status(arguments: argparse.Namespace) -> int:
    """Show one job or all of them, or how one scales."""
    try:
        if arguments.scaling:
            return _show_scaling(arguments)
        return _show_status(arguments)
    except JobError as error:
        return _fail(str(error), error.exit_code)


def _show_scaling(arguments: argparse.Namespace) -> int:
    """Show what each number of replicas gives, by the newest checkpoint."""
    from elasticrun.checkpoint.inspection.scaling import show_scaling

    directory = find_known_job(arguments.job).directory
    try:
        storage = choose_storage(str(directory), configured=None)
        checkpoint = choose_checkpoint(storage, NEWEST)
        for line in show_scaling(checkpoint, as_json=arguments.json):
            _say(line)
    except (InspectionError, ElasticRunError, OSError, ValueError) as error:
        return _fail(str(error), USAGE)
    return 0


def _show_status(arguments: argparse.Namespace) -> int:
    jobs, silent = _statuses(arguments.job)
    ended = []
    if not (jobs or silent) and arguments.job is not None:
        ended = [status_of_ended(find_known_job(arguments.job))]
    if arguments.json:
        _say(json.dumps([*jobs, *ended]))
    elif jobs or not silent:
        text = render(jobs) or "\n\n".join(map(render_ended, ended))
        _say(text or _describe_last())
    for error in silent:
        _fail(str(error), error.exit_code)
    return silent[0].exit_code if silent else 0


def _describe_last() -> str:
    """Return that no job is running, and how the last one of this directory ended."""
    try:
        last = status_of_ended(find_known_job(None))
    except JobError:
        return (
            "no job of this user is running; to see how one ended, give its checkpoint "
            "directory: elasticrun status DIR"
        )
    return f"no job of this user is running; the last one:\n\n{render_ended(last)}"


def _statuses(
    name: str | None,
) -> tuple[list[dict[str, object]], list[SilentJobError]]:
    """Return the jobs of this name; without one, those of here, else all."""
    jobs, silent = find_jobs()
    all_: list[JobConnection | SilentJobError] = [*jobs, *silent]
    is_any_here = any(job.is_here for job in all_)

    def is_meant(job: JobConnection | SilentJobError) -> bool:
        return job.is_called(name) if name else job.is_here or not is_any_here

    found = []
    for job in jobs:
        with job:
            if is_meant(job):
                found.append(job.status)
    return found, [error for error in silent if is_meant(error)]


def logs(arguments: argparse.Namespace) -> int:
    """Show what replicas printed, once or as it grows."""
    try:
        ended = _directory_of_ended(arguments.job)
        if ended is not None:
            _show_logs(ended, arguments)
            return 0
        with find_job(arguments.job) as job:
            _note(job.title)
            has_ended = (lambda: job.has_ended) if arguments.follow else None
            _show_logs(Path(str(job.status["log_dir"])), arguments, has_ended)
    except JobError as error:
        return _fail(str(error), error.exit_code)
    return 0


def _show_logs(
    log_dir: Path,
    arguments: argparse.Namespace,
    has_ended: Callable[[], bool] | None = None,
) -> None:
    """Write the logs of a generation, rank after rank.

    Args:
        has_ended: If it is given, logs are written as they grow, also those of every
            generation to come, until the job has ended.
    """
    found = find_logs(log_dir)
    first = arguments.generation
    if first is None:
        first = max(found, default=0)
    if has_ended is None and not [*_chosen(found, first, arguments)]:
        known = ", ".join(
            f"{g} (ranks {', '.join(map(str, each))})" for g, each in found.items()
        )
        raise JobError(
            f"{log_dir} has no such log; it has generations: {known or 'none'}",
            exit_code=NO_JOB,
        )
    readers: dict[Path, LogReader] = {}
    with ExitStack() as stack:
        while True:
            # Asked before the look, which then finds all that was printed.
            is_last = has_ended is None or has_ended()
            for rank, path in _chosen(find_logs(log_dir), first, arguments):
                is_new = path not in readers
                if is_new:
                    readers[path] = LogReader(path)
                    stack.callback(readers[path].close)
                lines: Iterable[bytes] = readers[path].read()
                if is_new and arguments.tail is not None:
                    lines = deque(lines, arguments.tail)
                for line in lines:
                    _show(marked(rank, line) + "\n")
            if is_last:
                return
            time.sleep(_FOLLOW_SECONDS)


def _chosen(
    found: dict[int, dict[int, Path]], first: int, arguments: argparse.Namespace
) -> Iterator[tuple[int, Path]]:
    """Yield the rank and the log of each replica that is to be shown."""
    for number, ranks in found.items():
        if number >= first and arguments.generation in (None, number):
            for rank, path in ranks.items():
                if arguments.rank in (None, rank):
                    yield rank, path


def _directory_of_ended(name: str | None) -> Path | None:
    """Return where the logs of a job are that has ended; None if it is running."""
    if name is not None and os.path.isdir(name) and not _statuses(name)[0]:
        inner = Path(name) / "logs"
        return inner if inner.is_dir() else Path(name)
    known = find_known_job(name)
    if known.status is not None:
        return None
    log_dir = status_of_ended(known)["log_dir"]
    if log_dir is None:
        raise JobError(
            f"{known.name} was not started by elasticrun run, so it has no logs",
            exit_code=NO_JOB,
        )
    return Path(log_dir)


def _say(text: str) -> None:
    _write((only_colours(text) if sys.stdout.isatty() else text) + "\n")


def _write(text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    sys.stdout.write(text)
    sys.stdout.flush()


def _show(text: str) -> None:
    """Write what a replica printed, which may do no more to a terminal than colour."""
    if sys.stdout.isatty():
        text = only_colours(text)
        text = coloured_by_rank(text) if environment.has_colours() else text
    _write(text)


def _note(text: str) -> None:
    text = only_colours(text) if sys.stderr.isatty() else text
    sys.stderr.write(f"elasticrun: {text}\n")


def _fail(text: str, code: int) -> int:
    _note(text)
    return code
