"""The command line: what can be said, and which module does it.

Nothing heavy is imported before it is known what is asked for.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from elasticrun.errors import BY_SIGNAL, USAGE
from elasticrun.launcher.script_arguments import add_script_arguments

_DESCRIPTION = "Train PyTorch models through restarts, at any number of replicas."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    _open_standard_streams()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["scale"]:  # argparse takes no JOB that an option precedes.
        arguments.sort(key="--force".__eq__)
    parser = _make_parser(arguments[0] if arguments else "")
    if not arguments:
        parser.print_help(sys.stderr)
        return USAGE
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # It ends already.
        return BY_SIGNAL[signal.SIGINT]
    except BrokenPipeError:  # Whoever read the output has seen enough.
        sys.stderr.close()
        return 141


def _open_standard_streams() -> None:
    """Open those that are closed, as by `>&-`, before others get their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # It gets the lowest number that is free.
            os.set_inheritable(number, True)
            mode = "r" if number == 0 else "w"
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _make_parser(chosen: str) -> argparse.ArgumentParser:
    # No part of an option's name: a newer version may have two that begin so.
    parser = argparse.ArgumentParser(
        prog="elasticrun", description=_DESCRIPTION, allow_abbrev=False
    )
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=text, description=text, allow_abbrev=False
        )

    for name, text, add_arguments in (
        ("run", "train with a script, and restart it after crashes", _add_run),
        ("scale", "change the number of replicas of a running job", _add_scale),
        ("status", "show the running jobs, or how the last one ended", _add_status),
        ("stop", "save and stop a running job", _add_stop),
        ("leave", "save, and go on without this machine", _add_job),
        ("logs", "show what the replicas have printed", _add_logs),
    ):
        command = add(name, text)
        add_arguments(command)
        command.set_defaults(run=_lazily("elasticrun.launcher.commands", name))
    _add_checkpoints(commands)
    for name, package, text, add_name, main_name in (
        ("lint", "lint", "find lines of a script that a restart would break",
         "add_arguments", "main"),
        ("rule", "lint", "explain a rule of the linter", "add_rule_arguments",
         "rule_main"),
        ("report", "report", "write a page with the history of a job",
         "add_arguments", "main"),
        ("check", "check", "run a script with and without restarts, and compare",
         "add_arguments", "main"),
    ):  # fmt: skip
        command = add(name, text)
        if name == chosen:
            module = import_module(f"elasticrun.{package}.command")
            getattr(module, add_name)(command)
            command.set_defaults(run=getattr(module, main_name))
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--replicas", metavar="N|auto|MIN:MAX",
        help="how many processes train; default: auto, one for each GPU, or one for "
             "each core (at most 8) without GPUs; MIN:MAX limits auto and `elasticrun "
             "scale`")  # fmt: skip
    add("--checkpoint-dir", metavar="DIR|URL",
        help="where the job saves, and resumes from; default: "
        "SCRIPT-checkpoints")  # fmt: skip
    add("--fresh", action="store_true",
        help="start anew; old checkpoints are renamed, never deleted")  # fmt: skip
    add("--max-restarts", metavar="N",
        help="restarts after crashes with no new checkpoint between them; "
        "default: 3")  # fmt: skip
    add("--grace", metavar="SECONDS",
        help="how long the job may take to save and exit at a stop; default: "
             "ELASTICRUN_GRACE, or 60")  # fmt: skip
    add("--save-interval", metavar="SECONDS",
        help="seconds between checkpoints, fewer in the first minutes; 0: after every "
             "batch, auto: by the cost of a save, off: none by time; default: "
             "300")  # fmt: skip
    add("--virtual-replicas", metavar="N",
        help="cut batches into N shares, so that the job ends with the same bits at "
             "any number of processes up to N; default: "
             "ELASTICRUN_VIRTUAL_REPLICAS")  # fmt: skip
    add("--hang-timeout", default="auto", metavar="auto|SECONDS|off",
        help="after how long without a batch a process counts as hung; default: auto, "
             "20 times the longest time so far, at least 9 minutes")  # fmt: skip
    add("--spares", action="store_const", const="prepared", default="imported",
        help="let the spare processes that take over after a crash run the top of the "
        "script, too; by default they only import what it imports")  # fmt: skip
    add("--no-spares", dest="spares", action="store_const", const="",
        help="keep no spare processes")  # fmt: skip
    add("--stop-signals", metavar="NAMES",
        help="signals at which the job saves and stops, besides TERM and INT: any of "
             "HUP, USR1, USR2, QUIT, ALRM, XCPU; default: ELASTICRUN_STOP_SIGNALS, or "
             "HUP,USR1,USR2")  # fmt: skip
    add("--start", choices=["fork", "exec"], default="fork",
        help="fork processes from one that has imported torch (the default), or "
        "start a new interpreter for each")  # fmt: skip
    add("--no-lint", dest="lint", action="store_false",
        help="do not lint the script at the start")  # fmt: skip
    add("--name", metavar="JOB",
        help="the job's name, for other commands and in checkpoints; a job loads no "
             "checkpoint of another name; default: the script's file name")  # fmt: skip
    add("--log-dir", metavar="DIR",
        help="directory for the logs of all processes; default: logs in the checkpoint "
             "directory")  # fmt: skip
    add("--nodes", metavar="N|MIN:MAX",
        help="how many machines take part; start the same command on each")  # fmt: skip
    add("--rdzv-endpoint", metavar="HOST:PORT",
        help="the machine at which all machines meet (default port: 29400); default: "
             "they find each other through the checkpoint directory")  # fmt: skip
    add("--address", metavar="HOST",
        help="name or address of this machine, at which the others "
        "reach it")  # fmt: skip
    add("--notice", metavar="aws|gcp|azure|URL",
        help="the cloud, or a URL, to ask whether this machine will be taken away; "
             "before that the job saves and leaves")  # fmt: skip
    add("-q", "--quiet", action="store_true",
        help="show only the launcher's messages; the output of processes goes to the "
             "logs")  # fmt: skip
    add("--on-event", metavar="COMMAND",
        help="run a command at each start, crash, rescue, restart, rescaling, stop and "
             "end of the job, with the event as JSON on its standard "
             "input")  # fmt: skip
    add("--lifeline", type=int, help=argparse.SUPPRESS)
    add("--function", action="store_true", help=argparse.SUPPRESS)
    add(
        "-m",
        dest="is_module",
        action="store_true",
        help="SCRIPT is the name of a module, as with python -m",
    )
    add_script_arguments(parser)
    for torchruns, own in (
        ("--nnodes", "nodes"),
        ("--nproc-per-node", "replicas"),
        ("--nproc_per_node", "replicas"),
        ("--max_restarts", "max_restarts"),
        ("--rdzv_endpoint", "rdzv_endpoint"),
    ):
        add(torchruns, dest=own, help=argparse.SUPPRESS)


def _add_scale(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("replicas", metavar="N|+N|-N",
        help="how many processes to train with, or how many more or fewer "
        "than now")  # fmt: skip
    _add_job(parser)
    parser.add_argument("--force", action="store_true",
        help="even if the global batch has fewer samples, or the machine fewer GPUs or "
             "less than half as many cores")  # fmt: skip


def _add_stop(parser: argparse.ArgumentParser) -> None:
    _add_job(parser)
    parser.add_argument("--now", action="store_true",
        help="end the job at once, without saving")  # fmt: skip


def _add_status(parser: argparse.ArgumentParser) -> None:
    _add_job(parser)
    add = parser.add_argument
    add(
        "--json",
        action="store_true",
        help="print a JSON array with an object for each job",
    )
    add("--scaling", action="store_true",
        help="show how fast each number of replicas trains, by the newest "
        "checkpoint")  # fmt: skip


def _add_logs(parser: argparse.ArgumentParser) -> None:
    _add_job(parser)
    add = parser.add_argument
    add("--rank", type=int, metavar="R", help="show this rank only")
    add("--generation", type=int, metavar="G", help="default: the newest")
    add("--tail", type=int, metavar="N", help="show the last N lines of each rank")
    add("-f", "--follow", action="store_true", help="continue while the job runs")


def _add_checkpoints(commands: Any) -> None:
    """Hand on all words as they are; who can do something with them looks at them."""
    text = "list, verify, show or export checkpoints"
    parser = commands.add_parser(
        "checkpoints", help=text, add_help=False, prefix_chars="\0"
    )
    parser.add_argument("words", nargs="*")
    parser.set_defaults(run=_lazily("elasticrun.checkpoint.inspection.command", "main"))


def _add_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", nargs="?", metavar="JOB",
        help="the job's name, its checkpoint directory, or the process number of its "
             "launcher; default: the job of this directory")  # fmt: skip


def _lazily(module: str, function: str) -> Callable[[argparse.Namespace], int]:
    def call(options: argparse.Namespace) -> int:
        return int(getattr(import_module(module), function)(options))

    return call


class _Version(argparse.Action):
    """Prints the version, which is looked up only then."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show the version")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from elasticrun.checkpoint.manifest import version

        sys.stdout.write(f"elasticrun {version()}\n")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
