"""The command line `elasticrun checkpoints [DIR] [ACTION ...]`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence

from elasticrun.checkpoint.inspection.listing import (
    NEWEST,
    InspectionError,
    choose_checkpoint,
    choose_storage,
    list_checkpoints,
    verify,
)
from elasticrun.checkpoint.storage.place import local_path
from elasticrun.checkpoint.storage.storage import Storage
from elasticrun.errors import ElasticRunError
from elasticrun.replicas.environment import variables

FINE, DAMAGED, COULD_NOT = 0, 1, 2
_HELP = ("-h", "--help")
_ACTIONS = ("list", "verify", "show", "export")

_DESCRIPTION = (
    "Show the checkpoints in DIR, also while the job runs, and without a GPU. Default "
    "for DIR: ELASTICRUN_CHECKPOINT_DIR, or the only directory here with checkpoints; "
    "default for ACTION: list. Exit codes: 0 fine, 1 damage, 2 not "
    "possible."
)


def main(options: argparse.Namespace) -> int:
    """Run `elasticrun checkpoints` with its arguments."""
    directory, rest = _split(options.words)
    if not any(word in _HELP or not word.startswith("-") for word in rest):
        rest = ["list", *rest]
    try:
        if directory is not None:
            _refuse_mistyped(directory)
        arguments = _make_parser().parse_args(rest)
        configured = variables().get("ELASTICRUN_CHECKPOINT_DIR")
        storage = choose_storage(directory, configured=configured)
        is_damaged = _say(arguments.act(storage, arguments))
    except BrokenPipeError:  # Whoever read the output has seen enough; what a store
        raise  # raises is of another type.
    except (InspectionError, ElasticRunError, OSError, ValueError) as error:
        sys.stderr.write(f"elasticrun: {_printable(str(error))}\n")
        return COULD_NOT
    return DAMAGED if is_damaged else FINE


def _say(lines: Iterator[str]) -> bool:
    """Write each line as it comes; return whether damage was found."""
    while True:
        try:
            line = next(lines)
        except StopIteration as end:  # With the number of damaged ones, or nothing.
            return bool(end.value)
        sys.stdout.write(f"{_printable(line)}\n")
        sys.stdout.flush()


def _printable(text: str) -> str:
    """Return text that neither controls a terminal nor is too odd to be written."""
    marks = (
        each if each.isprintable() or each in "\t\n" else "\N{REPLACEMENT CHARACTER}"
        for each in text
    )
    return text if text.isprintable() else "".join(marks)


def _split(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return DIR, which may stand before an action or alone, and the other words."""
    for place, word in enumerate(words):
        if not word.startswith("-"):
            if word in _ACTIONS:
                break
            return word, [*words[:place], *words[place + 1 :]]
    return None, list(words)


def _refuse_mistyped(word: str) -> None:
    """Refuse a word in the place of a directory that is rather a mistyped action."""
    if not (os.sep in word or "~" in word or os.path.exists(word)):
        raise InspectionError(
            f"{word}: there is no such directory, and no such action (they are "
            f"{', '.join(_ACTIONS)})."
        )


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="elasticrun checkpoints",
        usage="elasticrun checkpoints [DIR] [ACTION]",
        description=_DESCRIPTION,
    )
    actions = parser.add_subparsers(metavar="ACTION")

    def add_action(
        name: str,
        act: Callable[[Storage, argparse.Namespace], Iterator[str]],
        text: str,
    ) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=text, description=text)
        action.set_defaults(act=act)
        return action

    listing = add_action("list", _list, "list the checkpoints (the default)")
    verifying = add_action(
        "verify", _verify, "read every byte, and name what is damaged"
    )
    verifying.add_argument(
        "which", nargs="*", metavar="N", help="numbers of checkpoints; default: all"
    )
    showing = add_action(
        "show", _show, "show what a checkpoint holds, or one state of it"
    )
    exporting = add_action("export", _export, "write a state as a plain file")
    for action in (listing, showing):
        action.add_argument("--json", action="store_true", help="one JSON object")
    for action in (showing, exporting):
        action.add_argument("which", metavar="N", help=f"a number, or {NEWEST!r}")
    showing.add_argument("state", nargs="?", metavar="STATE", help="only this one")
    exporting.add_argument(
        "target",
        metavar="OUT",
        help="the file to write; safetensors if it ends in .safetensors, else by "
        "torch.save",
    )
    exporting.add_argument(
        "--state", default="model", help="the state to write; default: model"
    )
    exporting.add_argument(
        "--force", action="store_true", help="replace an existing file"
    )
    return parser


def _list(storage: Storage, arguments: argparse.Namespace) -> Iterator[str]:
    return list_checkpoints(storage, as_json=arguments.json)


def _verify(storage: Storage, arguments: argparse.Namespace) -> Iterator[str]:
    return verify(storage, arguments.which)


def _show(storage: Storage, arguments: argparse.Namespace) -> Iterator[str]:
    from elasticrun.checkpoint.inspection.contents import show

    checkpoint = choose_checkpoint(storage, arguments.which)
    return show(checkpoint, arguments.state, as_json=arguments.json)


def _export(storage: Storage, arguments: argparse.Namespace) -> Iterator[str]:
    from elasticrun.checkpoint.inspection.contents import export_state

    target = local_path(arguments.target, what="export")
    if target.exists() and not arguments.force:
        raise InspectionError(f"{target} exists; --force replaces it")
    checkpoint = choose_checkpoint(storage, arguments.which)
    yield export_state(checkpoint, target, state=arguments.state)
