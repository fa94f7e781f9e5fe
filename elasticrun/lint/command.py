"""The command line of the linter: `elasticrun lint` and `elasticrun rule`."""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticrun.lint.options import (
    ConfigurationError,
    find_pyproject,
    read_options,
)
from elasticrun.lint.rules.table import RULES

if TYPE_CHECKING:
    from elasticrun.lint.engine import LintResult
    from elasticrun.lint.finding import Finding

CLEAN, FOUND, COULD_NOT = 0, 1, 2
_WORDS = {"E": "error", "W": "warning"}
_PAGES = Path(__file__).with_name("pages")
FORMATS = ("text", "json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `elasticrun lint`."""
    parser.add_argument(
        "paths", nargs="+", metavar="PATH",
        help="files or folders; - for standard input",
    )  # fmt: skip
    parser.add_argument(
        "--format", choices=FORMATS, default="text", help="how findings are written"
    )
    parser.add_argument(
        "--select", type=_codes, default=(), metavar="CODES",
        help="report only these codes or beginnings of codes, separated by commas",
    )  # fmt: skip
    parser.add_argument(
        "--ignore", type=_codes, default=(), metavar="CODES", help="do not report these"
    )
    parser.add_argument("--pedantic", action="store_true", help="report hints as well")
    parser.add_argument(
        "--stdin-filename", type=Path, default=Path("stdin.py"), metavar="PATH",
        help="with -: the name and place of what is read from standard input",
    )  # fmt: skip


def _codes(text: str) -> tuple[str, ...]:
    codes = tuple(each.strip().upper() for each in text.split(",") if each.strip())
    for code in codes:
        if not any(known.startswith(code) for known in RULES):
            raise argparse.ArgumentTypeError(
                f"{code} begins no rule; see `elasticrun rule`"
            )
    return codes


def run(arguments: list[str] | None = None) -> int:
    """Parse the arguments of `elasticrun lint`, and lint."""
    parser = argparse.ArgumentParser(
        prog="elasticrun lint",
        description="Find what a restart would run twice, and what it would lose.",
    )
    add_arguments(parser)
    return main(parser.parse_args(arguments))


def main(options: argparse.Namespace) -> int:
    """Lint; return 0 if clean, 1 with findings, 2 if something could not be linted."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, *before[1:])  # Syntax trees live until the end.
    try:
        return _lint(options)
    finally:
        gc.set_threshold(*before)


def _lint(options: argparse.Namespace) -> int:
    from elasticrun.lint.engine import lint_paths, lint_text
    from elasticrun.lint.project import decode

    is_text = options.paths == ["-"]
    first = options.stdin_filename if is_text else Path(options.paths[0])
    try:
        base = read_options(find_pyproject(first if first.is_dir() else first.parent))
        chosen = base._replace(
            select=options.select or base.select,
            ignore=(*base.ignore, *options.ignore),
            pedantic=options.pedantic or base.pedantic,
        )
        if is_text:
            result = lint_text(decode(sys.stdin.buffer.read()), str(first), chosen)
        else:
            result = lint_paths(map(Path, options.paths), chosen)
    except (ConfigurationError, SyntaxError, ValueError) as error:
        _complain(f"elasticrun lint: {error}")
        return COULD_NOT
    output = _report(result, options.format)
    if output:
        _say(output)
    for problem in result.problems:
        _complain(f"{problem.path}:{problem.line}: {problem.message}")
    if result.problems:
        return COULD_NOT
    return FOUND if result.findings else CLEAN


def add_rule_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `elasticrun rule`."""
    parser.add_argument(
        "codes", nargs="*", metavar="CODE", help="such as ER107; none for a list of all"
    )


def rule_main(options: argparse.Namespace) -> int:
    """Print what is known about rules: why, a wrong script and a right one."""
    if not options.codes:
        for _, each in sorted(RULES.items()):
            _say(f"{each.code} {each.severity}  {each.title}")
        return CLEAN
    status = CLEAN
    for code in options.codes:
        code = code.upper()
        if code not in RULES:
            text = f"there is no rule {code}. `elasticrun rule` lists all."
            _complain(f"elasticrun rule: {text}")
            status = COULD_NOT
        else:
            _say((_PAGES / f"{code}.md").read_text(encoding="utf-8"))
            _say(f"Severity: {_WORDS[RULES[code].severity]}.")
    return status


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _complain(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _report(result: LintResult, form: str) -> str:
    """Return all findings in one of the forms that the command line offers."""
    if form == "json":
        import json

        return json.dumps(_as_json(result), indent=2)
    return "\n".join(map(_text, result.findings))


def _text(finding: Finding) -> str:
    lines = [f"{finding.place}: {finding.code} {finding.message}"]
    if finding.source.strip():
        lines.append(f"   {finding.line} | {finding.source.rstrip()}")
    if finding.chain:
        lines.append(f"   chain: {finding.chain}")
    pointer = f"elasticrun rule {finding.code}"
    lines.append(f"   help: {finding.help:<60} {pointer}")
    return "\n".join(lines)


def _as_json(result: LintResult) -> dict[str, Any]:
    """Return the findings and problems as plain values."""
    return {
        "version": 1,
        "findings": [
            {key: value for key, value in each._asdict().items() if key != "source"}
            for each in result.findings
        ],
        "problems": [each._asdict() for each in result.problems],
        "elastic": [each.name for each in result.modules if each.leads_to_elastic],
    }
