"""The settings of a job, from arguments and variables alike, read or refused."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple


class SaveEvery(NamedTuple):
    """After how many global batches to save, and whether at the end of each epoch."""

    num_batches: int | None = None
    is_each_epoch: bool = False


ONLY_BY_TIME = SaveEvery()


def check_checkpoint_dir(value: str | os.PathLike[str] | None) -> None:
    """Refuse what is neither a path nor a URL.

    Raises:
        ValueError: `value` is something else.
    """
    if not (value is None or isinstance(value, (str, os.PathLike))):
        raise ValueError(
            f"checkpoint_dir (ELASTICRUN_CHECKPOINT_DIR) is {value!r}; give the path "
            "of a directory, or the URL of an object store."
        )


def parse_save_interval(value: float | str) -> float | Literal["auto"]:
    """Return seconds: 0 means every boundary, infinity ("off") none by time; or "auto".

    Raises:
        ValueError: `value` is no number of seconds from 0 up, nor "off" or "auto".
    """
    if value == "off":
        return math.inf
    if value == "auto":
        return "auto"
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not seconds >= 0:
        raise ValueError(
            f"save_interval (ELASTICRUN_SAVE_INTERVAL) is {value!r}; give seconds "
            "(0 saves at every boundary), 'auto' or 'off'."
        )
    return seconds


def parse_keep(value: int | str, *, setting: str = "keep (ELASTICRUN_KEEP)") -> int:
    """Return how many checkpoints to keep.

    Args:
        setting: What to call it in an error.

    Raises:
        ValueError: `value` is not a whole number from 1 up.
    """
    keep = _whole(value)
    if keep < 1:
        raise ValueError(
            f"{setting} is {value!r}; give how many checkpoints to keep, at least 1."
        )
    return keep


def parse_async_save(value: bool | str) -> bool:
    """Return whether checkpoints are written while training goes on: "on" or "off".

    Raises:
        ValueError: `value` is something else.
    """
    if isinstance(value, bool):
        return value
    if value not in ("on", "off"):
        raise ValueError(
            f"async_save (ELASTICRUN_ASYNC_SAVE) is {value!r}; give True or False, in "
            "the variable 'on' or 'off'."
        )
    return value == "on"


def parse_trust_pickle(value: str | Iterable[str]) -> frozenset[str]:
    """Return the names of states; one may be given as it is.

    Raises:
        ValueError: `value` is something else.
    """
    given: Any = [value] if isinstance(value, str) else value
    names = list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"trust_pickle is {value!r}; give the names of the states that may hold "
            "any object, like ['history']. Trust is in each by its name, since loading "
            "it executes what its file says."
        )
    return frozenset(names)


def parse_save_every(value: int | str | None) -> SaveEvery:
    """Return when to save besides by time: "500", "epoch", or both as "500,epoch".

    Raises:
        ValueError: `value` is something else, or has two numbers.
    """
    every = SaveEvery()
    words = value.split(",") if isinstance(value, str) else [value]
    for word in words if value is not None else ():
        if isinstance(word, str) and word.strip() == "epoch":
            every = every._replace(is_each_epoch=True)
        elif _whole(word) > 0 and every.num_batches is None:
            every = every._replace(num_batches=_whole(word))
        else:
            raise ValueError(
                f"save_every (ELASTICRUN_SAVE_EVERY) is {value!r}; give a number of "
                "global batches from 1 up, 'epoch', or both with a comma between them."
            )
    return every


def parse_keep_every(value: int | str | None) -> int | None:
    """Return whose multiples stay for ever, None for no checkpoint.

    Raises:
        ValueError: `value` is not a whole number from 1 up.
    """
    if value is None:
        return None
    if _whole(value) < 1:
        raise ValueError(
            f"keep_every (ELASTICRUN_KEEP_EVERY) is {value!r}; give a whole number n "
            "from 1 up: every n-th checkpoint stays for ever."
        )
    return _whole(value)


def parse_keep_best(value: tuple[str, str] | str | None) -> tuple[str, str] | None:
    """Return a value's name, and "max" or "min".

    Raises:
        ValueError: `value` is no such pair, nor one as text like "accuracy:max".
    """
    if value is None:
        return None
    pair: Any = value.split(":") if isinstance(value, str) else value
    if (
        not (isinstance(pair, (tuple, list)) and len(pair) == 2)
        or not (isinstance(pair[0], str) and pair[0])
        or pair[1] not in ("max", "min")
    ):
        raise ValueError(
            f"keep_best (ELASTICRUN_KEEP_BEST) is {value!r}; give the name of a value "
            "in Variables and 'max' or 'min', like ('accuracy', 'max') or "
            "'accuracy:max'."
        )
    return pair[0], pair[1]


def _whole(value: Any) -> int:
    """Return a whole number, given as one or as text; 0 for anything else."""
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    try:
        return 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return 0
