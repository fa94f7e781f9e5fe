"""Which files a path, a pattern or a URL of streams names."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_BRACES = re.compile(r"(?<!\[)\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}")


def paths_of(given: Paths) -> list[str]:
    """Return the files that paths, patterns and URLs name, each pattern's sorted."""
    patterns = [given] if isinstance(given, (str, os.PathLike)) else given
    names = [name for each in patterns for name in _named_by(os.fspath(each))]
    known: set[str] = set()
    for name in names:
        place = name if "://" in name else os.path.abspath(name)
        if place in known:
            raise ValueError(
                f"{name} is named twice, so each epoch would have its samples twice. "
                "Give patterns that do not overlap; to read a file more often than "
                "others, use Mixed."
            )
        known.add(place)
    return names


def _named_by(text: str) -> list[str]:
    """Return the files that one path, pattern or URL names.

    Braces stand for what they do in a shell, and for WebDataset; `[{]` is a brace.
    """
    is_url = "://" in text
    if not is_url:
        text = os.path.expanduser(text)
        if os.path.exists(text):
            return [text]
    if braces := _BRACES.search(text):
        first, last, listed = braces.groups()
        parts = listed.split(",") if first is None else []
        if first is not None:
            is_padded = any(len(end) > 1 and end[0] == "0" for end in (first, last))
            width = max(len(first), len(last)) if is_padded else 0
            begin, end = int(first), int(last)
            step = 1 if begin <= end else -1
            parts = [f"{n:0{width}}" for n in range(begin, end + step, step)]
        return [
            name
            for part in parts
            for name in _named_by(text[: braces.start()] + part + text[braces.end() :])
        ]
    if not glob.has_magic(text):
        return [text]
    if not is_url:
        found = sorted(glob.glob(text, recursive=True))
    else:
        import fsspec

        files, pattern = fsspec.core.url_to_fs(text)
        # Of a chain, such as filecache::s3://, all but what has the pattern stays.
        links = text.split("::")
        at = next(at for at, link in enumerate(links) if "://" in link)
        found = [
            "::".join([*links[:at], files.unstrip_protocol(path), *links[at + 1 :]])
            for path in sorted(files.glob(pattern))
        ]
    if not found:
        raise ValueError(f"{text!r} matches no file. Look at the pattern.")
    return found
