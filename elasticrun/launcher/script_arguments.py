"""Command-line arguments that are a script and the script's own arguments."""

from __future__ import annotations

import argparse
from typing import Any


def add_script_arguments(parser: argparse.ArgumentParser) -> None:
    """Take what follows the options as `script` and `args`.

    A `--` before the script or right behind it only ends options, and is nobody's
    argument.
    """
    # As two arguments, argparse would take a `--` between them out.
    parser.add_argument(
        "script", nargs=argparse.PARSER, action=_Split, metavar="SCRIPT"
    )


class _Split(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        del parser, option_string
        # Some versions of Python leave it there.
        namespace.script, *namespace.args = values[values[0] == "--" :]
        del namespace.args[: namespace.args[:1] == ["--"]]
