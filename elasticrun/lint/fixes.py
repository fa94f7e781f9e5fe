"""Fixes: edits that mend findings and leave every other byte as it is."""

from __future__ import annotations

import re
import tokenize
from collections import defaultdict
from pathlib import Path

from elasticrun.lint.engine import LintResult
from elasticrun.lint.finding import Edit, Finding
from elasticrun.lint.project import LINE_END, Module


def fix_files(result: LintResult, *, unsafe: bool = False) -> int:
    """Write the fixes into the files; return how many were made."""
    by_path: dict[str, list[Finding]] = defaultdict(list)
    for finding in result.findings:
        if finding.fix is not None and (finding.fix.is_safe or unsafe):
            by_path[finding.path].append(finding)
    texts = {module.name: module for module in result.modules}
    count = 0
    for path, findings in by_path.items():
        if path not in texts:
            continue
        fixed, made = apply(texts[path].text, findings)
        if made and Module(Path(path), path, fixed).parse() is not None:
            Path(path).write_bytes(fixed.encode(_encoding(Path(path))))
            count += made
    return count


def apply(text: str, findings: list[Finding]) -> tuple[str, int]:
    """Return a text with as many of the fixes as do not overlap, and their number."""
    offsets = _offsets(text)
    chosen: list[tuple[int, int, str]] = []
    made = 0
    for finding in findings:
        assert finding.fix is not None
        spans = [_span(edit, offsets, len(text)) for edit in finding.fix.edits]
        if any(_overlaps(span, other) for span in spans for other in chosen):
            continue
        chosen += spans
        made += 1
    for start, end, new in sorted(chosen, reverse=True):
        text = text[:start] + new + text[end:]
    return text, made


def _span(edit: Edit, offsets: list[int], length: int) -> tuple[int, int, str]:
    start = offsets[edit.start[0] - 1] + edit.start[1]
    last = edit.end[0] - 1
    end = offsets[last] + edit.end[1] if last < len(offsets) else length
    return start, end, edit.text


def _overlaps(one: tuple[int, int, str], other: tuple[int, int, str]) -> bool:
    return (one[0] < other[1] and other[0] < one[1]) or one[0] == other[0]


def _offsets(text: str) -> list[int]:
    """Return where each line begins, for any ending of lines."""
    return [0, *(each.end() for each in re.finditer(LINE_END, text))]


def _encoding(path: Path) -> str:
    with path.open("rb") as file:
        return tokenize.detect_encoding(file.readline)[0]
