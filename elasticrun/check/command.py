"""The command line of the check: `elasticrun check`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from elasticrun.check.checker import Checker, Scope
from elasticrun.check.replica.guard import what_is_not_guarded
from elasticrun.check.report import ExitCode, Report, as_text
from elasticrun.check.runner import RunnerError, ScriptRunner
from elasticrun.check.scenarios import Limits, parse_restart_place
from elasticrun.check.source import find_source
from elasticrun.errors import BY_SIGNAL
from elasticrun.launcher.options import OptionError, parse_seconds
from elasticrun.launcher.script_arguments import add_script_arguments
from elasticrun.lint.engine import lint_paths
from elasticrun.lint.rules.conversion import ER003

_DEFAULT_SIZES = "1,2,3"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `elasticrun check`."""
    add = parser.add_argument
    add("--at", action="append", default=[], metavar="E:L:K",
        help="restart only here: after K batches of loop L of epoch E; E:end is the "
        "end of an epoch, afterE:L:K a loop behind it; repeat it for several "
        "restarts")  # fmt: skip
    add("--replicas", default=None, metavar="N,N,...",
        help=f"numbers of replicas to check with; default: {_DEFAULT_SIZES}; with "
        "--at those of one generation after another")  # fmt: skip
    add("--max-epochs", type=int, default=3, metavar="N",
        help="epochs of each epoch loop, 0 for all; default: 3")  # fmt: skip
    add("--max-batches", type=int, default=4, metavar="N",
        help="batches or steps of each loop, 0 for all; default: 4")  # fmt: skip
    add("--kill", action="store_true",
        help="also kill -9 all replicas, one batch after a checkpoint")  # fmt: skip
    add("--ignore", action="append", default=[], metavar="PATTERN",
        help="a field (such as variables.start) or file that may differ")  # fmt: skip
    add("--link", action="append", default=[], metavar="PATH",
        help="data that is only read: link it instead of copying it")  # fmt: skip
    add("--writable", action="append", default=[], metavar="FOLDER",
        help="a folder outside of the copy that the program may write in; what is "
        "there may be overwritten")  # fmt: skip
    add("--hang-timeout", default="60", metavar="SECONDS",
        help="how long no batch may come; default: 60, and five times that before "
        "training begins")  # fmt: skip
    add_script_arguments(parser)


def main(options: argparse.Namespace) -> int:
    """Check a script; return the exit code."""
    try:
        report = check(options)
    except (OptionError, ValueError) as error:
        report = Report(exit_code=ExitCode.USAGE, problem=f"{error}")
    except RunnerError as error:
        report = Report(exit_code=ExitCode.SCRIPT_FAILS, problem=f"{error}")
    sys.stdout.write(f"{as_text(report)}\n")
    return report.exit_code


def check(options: argparse.Namespace) -> Report:
    """Run the check that a command line asks for."""
    arguments = list(options.args)
    if arguments[:1] == ["--"]:
        del arguments[0]
    scope = _scope(options, arguments)
    source = find_source(
        options.script,
        directory=os.getcwd(),
        linked=options.link,
        writable=options.writable,
    )
    if any(f.code == ER003.code for f in lint_paths([source.script]).findings):
        raise OptionError(
            f"{source.script.name} trains without elasticrun, so there is nothing to "
            f"restart in. `elasticrun lint {options.script}` says what to change."
        )
    unguarded = what_is_not_guarded(source.guarded)
    if unguarded:
        _say_meanwhile(f"warning: {unguarded}")
    hang_timeout = parse_seconds("--hang-timeout", options.hang_timeout)
    # So that neither replicas nor copies are left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(BY_SIGNAL[signal.SIGTERM]))
    with tempfile.TemporaryDirectory(prefix="elasticrun-check-") as folder:
        runner = ScriptRunner(
            source,
            arguments,
            folder=Path(os.path.realpath(folder)),
            limits=Limits(options.max_epochs, options.max_batches),
            hang_timeout=hang_timeout,
        )
        with runner:
            return Checker(runner, scope, _say_meanwhile).check()


def _scope(options: argparse.Namespace, arguments: Sequence[str]) -> Scope:
    places = tuple(parse_restart_place(text) for text in options.at)
    sizes = _sizes(options.replicas or ("1" if places else _DEFAULT_SIZES))
    if places and len(sizes) not in (1, len(places) + 1):
        raise OptionError(
            f"--replicas {options.replicas} with {len(places)} --at: give one number, "
            f"or one for each of the {len(places) + 1} generations."
        )
    for name in ("max_epochs", "max_batches"):
        if getattr(options, name) < 0:
            text = f"--{name.replace('_', '-')} {getattr(options, name)}"
            raise OptionError(f"{text}: give a number from 1 up, or 0 for all.")

    def command(scenario: Sequence[str]) -> list[str]:
        kept = []
        if options.max_epochs != 3:
            kept += ["--max-epochs", str(options.max_epochs)]
        if options.max_batches != 4:
            kept += ["--max-batches", str(options.max_batches)]
        for name in ("ignore", "link", "writable"):
            kept += [w for each in getattr(options, name) for w in (f"--{name}", each)]
        own = ["--", *arguments] if arguments else []
        return ["elasticrun", "check", *scenario, *kept, options.script, *own]

    return Scope(
        places,
        sizes,
        is_killed=options.kill,
        ignored=tuple(options.ignore),
        command=command,
    )


def _sizes(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise OptionError(
            f"--replicas {text}: give numbers from 1 up, with commas between them."
        )
    return tuple(map(int, parts))


def _say_meanwhile(text: str) -> None:
    sys.stderr.write(f"{text}\n")
