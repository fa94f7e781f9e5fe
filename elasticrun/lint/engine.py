"""From paths to findings: which programs there are, and what is found in them."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from elasticrun.lint.finding import SEVERITIES, Finding, lowered
from elasticrun.lint.graph import MAX_WORK, TooMuchError
from elasticrun.lint.options import LintOptions
from elasticrun.lint.program import Program
from elasticrun.lint.project import MAX_BYTES, Module, Project, python_files
from elasticrun.lint.rules import conversion
from elasticrun.lint.rules.conversion import Application, Edit
from elasticrun.lint.rules.table import CHECKS
from elasticrun.lint.walk.entry_points import walk_through

_SCRIPTS = 8  # What more files import is a library, and none of these its script.
# What a file has that makes loaders or optimizers for another one.
_MAKERS = re.compile(r"DataLoader\(|\boptim\.\w|[oO]ptimizer\(|Adam|SGD")
_KEPT = 20  # Modules with text and tree; those of a large project take gigabytes.


class LintProblem(NamedTuple):
    """A file that could not be linted, and why."""

    path: str
    line: int
    message: str


class LintResult(NamedTuple):
    """What came out of linting some paths."""

    findings: list[Finding]
    problems: list[LintProblem]
    modules: list[Module]


def lint_paths(paths: Iterable[Path], options: LintOptions | None = None) -> LintResult:
    """Lint files, and all Python files below folders."""
    project = Project()
    options = options or LintOptions()
    result = LintResult([], [], [])
    for path in paths:
        if not (path.is_file() or path.is_dir()):
            text = "does not exist. Check the path, relative to the current folder."
            if path.exists():
                text = (
                    "is no file or folder. Check the path, relative to the current one."
                )
            result.problems.append(LintProblem(str(path), 1, text))
            continue
        for file in python_files(path):
            is_notebook = file.suffix == ".ipynb"
            module = None if is_notebook else project.load(file, str(file))
            if module is not None:
                result.modules.append(module)
                continue
            text = "cannot be read as Python source in the encoding it declares."
            if is_notebook:
                text = f'is a notebook: nbqa reads it, `nbqa "elasticrun lint" {file}`.'
            elif file.stat().st_size > MAX_BYTES:
                text = "has more than 1 MB, which the linter does not read."
            result.problems.append(LintProblem(str(file), 1, text))
    return _lint(project, options, result)


def lint_text(
    text: str, name: str = "script.py", options: LintOptions | None = None
) -> LintResult:
    """Lint one program that stands in no file, or not as it is there."""
    module = Module(Path(name).absolute(), name, text)
    project = Project()
    project.modules[module.path] = module
    return _lint(project, options or LintOptions(), LintResult([], [], [module]))


def _lint(project: Project, options: LintOptions, result: LintResult) -> LintResult:
    found: list[Finding] = []
    roots = _roots(project, result)
    walked: set[str] = set()
    for module in roots:
        if module.imported_by & walked:
            continue  # walked through already, from the script that imports it
        with _giving_up(result, module):
            found += _in_elastic(project, module)
            walked.add(module.name)
    if not roots:
        found += _in_plain(project, result)
    result.findings.extend(_reported(found, project, options, result.modules))
    return result


def _in_elastic(project: Project, module: Module) -> Iterator[Finding]:
    program = Program(walk_through(project, module))
    for check in CHECKS:
        yield from check(program)


def _in_plain(project: Project, result: LintResult) -> Iterator[Finding]:
    """Yield what makes plain scripts elastic, and what is found in them then."""
    reached = {each: project.reached(each) for each in result.modules}
    importers: dict[Module, list[Module]] = defaultdict(list)
    for module, every in reached.items():
        for each in every:
            importers[each].append(module)
    walked: set[Module] = set()
    for number, module in enumerate(importers):
        if number % _KEPT == 0:
            project.forget()
        with _giving_up(result, module):
            if not _trains(module, result if module in reached else None):
                continue
            for script in _scripts(project, module, importers):
                if script not in walked:
                    walked.add(script)
                    yield from _if_elastic(project, script)


def _trains(module: Module, result: LintResult | None) -> bool:
    """Return whether a plain file has loops that train; the result is told why not."""
    tree = None
    if "torch" in module.text:
        tree = module.parse() if result is None else _parsed(module, result)
    if tree is None or not conversion.may_train(module.text):
        return False
    _check_size(tree)
    return bool(conversion.edits_of(tree))


def _scripts(
    project: Project, training: Module, importers: dict[Module, list[Module]]
) -> list[Module]:
    """Return the files that bring a training what it does not import itself.

    The file that trains is the script if there are none, or if it is run by itself.
    """
    own = {*project.reached(training)}
    above = [each for each in importers[training] if importers[each] == [each]]
    scripts = [
        each
        for each in (above if len(above) <= _SCRIPTS else [])
        if any(map(_edits_beside, _making(project.reached(each), own)))
    ]
    is_script = not scripts or "__main__" in training.text
    return [*scripts, training] if is_script else scripts


def _check_size(tree: ast.Module) -> None:
    """Raise TooMuchError if a plain script has too many loops for its size."""
    nodes = [*ast.walk(tree)]
    if len(nodes) * sum(isinstance(each, ast.For) for each in nodes) > 5 * MAX_WORK:
        raise TooMuchError


def _making(modules: list[Module], known: set[Module]) -> list[Module]:
    """Return the files that may make something for a training, or train as well."""
    return [
        each
        for each in modules
        if each not in known
        and (_MAKERS.search(each.text) or conversion.may_train(each.text))
    ]


def _edits_beside(module: Module) -> list[Edit]:
    tree = module.parse()
    return [] if tree is None else conversion.edits_beside(tree)


def _if_elastic(project: Project, script: Module) -> Iterator[Finding]:
    """Yield what a script and its imports need, and what is found in it then."""
    modules = [script, *_making(project.reached(script), {script})]
    told: set[tuple[object, ...]] = set()
    for module in modules:
        if edits := _edits_beside(module):
            found = [*conversion.findings(module, edits)]
            told |= {each.order[:3] for each in found}
            yield from found
            assert module.tree is not None
            Application(edits).visit(module.tree)
    for finding in _in_elastic(project, script):
        # Of loops without a boundary, and of such an optimizer, ER003 has spoken.
        is_told = finding.code == "ER306" and finding.order[:3] in told
        if finding.code != "ER002" and not is_told:
            yield finding
    for module in modules:
        module.forget()


@contextmanager
def _giving_up(result: LintResult, module: Module) -> Iterator[None]:
    """Note what goes wrong with one file, and go on with the next."""
    try:
        yield
        return
    except RecursionError:
        why = (
            "nested too deep to be looked through, so nothing is said about this file. "
            "Cut its longest expression in two."
        )
    except TooMuchError:
        why = (
            f"takes more than {MAX_WORK:,} steps to be looked through, so not all that "
            "there is to find in it is said. Divide it into smaller programs."
        )
    except Exception as error:
        why = (
            f"internal error: {type(error).__name__}: {error}. Nothing is said about "
            "this file; please report it with the file."
        )
    result.problems.append(LintProblem(module.name, 1, why))


def _roots(project: Project, result: LintResult) -> list[Module]:
    """Return the modules to begin with: scripts first, what they import last."""
    roots = []
    for module in result.modules:
        if not project.leads_to_elastic(module):
            continue
        if _parsed(module, result) is not None:
            roots.append(module)
    imported = {each for module in roots for each in project.imports(module)}
    return sorted(roots, key=lambda module: module in imported)


def _parsed(module: Module, result: LintResult) -> ast.Module | None:
    """Return a file's tree; note why it cannot be parsed."""
    tree = module.parse()
    if module.error is not None:
        line = module.error.lineno or 1
        text = f"cannot be parsed: {module.error.msg}."
        result.problems.append(LintProblem(module.name, line, text))
    return tree


def _reported(
    found: list[Finding], project: Project, options: LintOptions, modules: list[Module]
) -> list[Finding]:
    """Return the findings to show, at most one of each rule at a place."""
    by_name = {each.name: each for each in project.modules.values() if each is not None}
    asked_for = {each.name for each in modules}
    kept: dict[tuple[str, int, int, str], Finding] = {}
    for finding in found:
        if _is_suppressed(finding, by_name[finding.path]):
            continue
        if not options.wants(finding.code):
            continue
        if finding.path not in asked_for and finding.code != conversion.ER003.code:
            finding = finding._replace(severity=lowered(finding.severity))
        if finding.severity == "H" and not options.pedantic:
            continue
        best = kept.setdefault(finding.order, finding)
        if SEVERITIES.index(finding.severity) < SEVERITIES.index(best.severity):
            kept[finding.order] = finding
    return [kept[key] for key in sorted(kept)]


def _is_suppressed(finding: Finding, module: Module) -> bool:
    """Return whether a comment at its first or last line, or above it, hides it."""
    lines = (finding.line, finding.end_line)
    known = set().union(*(module.suppressions.get(line, ()) for line in lines))
    return not known.isdisjoint(("", finding.code))
