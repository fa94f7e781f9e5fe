"""`python -m elasticrun.lint PATH...`."""

from __future__ import annotations

import argparse
import sys

from elasticrun.lint import command


def run(arguments: list[str] | None = None) -> int:
    """Parse the arguments and lint."""
    parser = argparse.ArgumentParser(
        prog="python -m elasticrun.lint",
        description="Find what a restart would run twice, and what it would lose.",
    )
    command.add_arguments(parser)
    return command.main(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(run())
