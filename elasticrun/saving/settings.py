"""The settings of a job: their defaults, environment variables and validation.

A program's arguments win over environment variables. Errors name a setting as it was
given: the argument or the variable.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, Literal, NamedTuple

from elasticrun.checkpoint.retention import parse_keep, parse_whole_number
from elasticrun.replicas.environment import variables
from elasticrun.replicas.signals import STOP_SIGNALS, parse_stop_signals

# What runs programs that have no file, or another: Python itself, notebooks, Ray.
_NO_SCRIPTS = (
    *("", "-", "-c", "-m"),
    *("ipykernel_launcher.py", "colab_kernel_launcher.py", "default_worker.py"),
)


class SaveEvery(NamedTuple):
    """After how many global batches to save, and whether at the end of each epoch."""

    num_batches: int | None = None
    is_each_epoch: bool = False


ONLY_BY_TIME = SaveEvery()


def parse_checkpoint_dir(
    value: str | os.PathLike[str], *, setting: str
) -> str | os.PathLike[str]:
    """Return where checkpoints are kept: the path of a directory, or a URL."""
    if not isinstance(value, (str, os.PathLike)):
        raise ValueError(
            f"{setting} is {value!r}; give the path of a directory, or the URL of an "
            "object store."
        )
    return value


def parse_save_interval(value: float | str, *, setting: str) -> float | Literal["auto"]:
    """Return seconds (0: every boundary; infinity, "off": none by time), or "auto"."""
    if value == "off":
        return math.inf
    if value == "auto":
        return "auto"
    seconds = math.nan if isinstance(value, bool) else _number(value)
    if not seconds >= 0:
        raise ValueError(
            f"{setting} is {value!r}; give seconds (0 saves at every boundary), 'auto' "
            "or 'off'."
        )
    return seconds


def parse_switch(value: bool | str, *, setting: str) -> bool:
    """Return whether something is on: True and False, or "on" and "off"."""
    if isinstance(value, bool):
        return value
    if value not in ("on", "off"):
        raise ValueError(
            f"{setting} is {value!r}; give True or False, in the variable 'on' or "
            "'off'."
        )
    return value == "on"


def parse_rescue(value: bool | str, *, setting: str) -> bool | Literal["always"]:
    """Return whether to be ready for a rescue: as `parse_switch`, or "always"."""
    if value == "always":
        return "always"
    try:
        return parse_switch(value, setting=setting)
    except ValueError as error:
        raise ValueError(
            f"{str(error).rstrip('.')}; or 'always', to be ready for a rescue at any "
            "cost in time."
        ) from None


def parse_trust_pickle(value: str | Iterable[str], *, setting: str) -> frozenset[str]:
    """Return the names of states; one may be given as it is."""
    given: Any = [value] if isinstance(value, str) else value
    names = list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"{setting} is {value!r}; give the names of the states that may hold any "
            "object, like ['history']. Loading such a state may execute any code in "
            "its file, so each is named."
        )
    return frozenset(names)


def parse_save_every(value: int | str, *, setting: str) -> SaveEvery:
    """Return when to save besides by time: "500", "epoch", or both as "500,epoch"."""
    every = SaveEvery()
    words = value.split(",") if isinstance(value, str) else [value]
    for word in words:
        if isinstance(word, str) and word.strip() == "epoch":
            every = every._replace(is_each_epoch=True)
        elif parse_whole_number(word) > 0 and every.num_batches is None:
            every = every._replace(num_batches=parse_whole_number(word))
        else:
            raise ValueError(
                f"{setting} is {value!r}; give a number of global batches from 1 up, "
                "'epoch', or both with a comma between them."
            )
    return every


def parse_virtual_replicas(value: int | str, *, setting: str) -> int:
    """Return in how many shares to cut each global batch."""
    if parse_whole_number(value) < 1:
        raise ValueError(f"{setting} is {value!r}; give a number from 1 up.")
    return parse_whole_number(value)


def parse_seconds(value: float | timedelta | str, *, setting: str) -> float:
    """Return how long something may take."""
    seconds = _number(value.total_seconds() if isinstance(value, timedelta) else value)
    if not 0 < seconds < math.inf:
        raise ValueError(f"{setting} is {value!r}; give the seconds above 0.")
    return seconds


def _number(value: Any) -> float:
    """Return a number that may be written as text; NaN of what is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _name_of_script() -> str:
    """Return the file name of the user's program, that of its folder for a package.

    Empty where there is none: one process's program would pass for any other's.
    """
    folder, name = os.path.split(sys.argv[0])
    if name == "__main__.py":
        name = os.path.basename(folder)
    return "" if name in _NO_SCRIPTS else name


def _text(value: object, *, setting: str) -> str:  # noqa: ARG001
    return str(value)


def _read(parse: Callable[..., object], variable: str = "") -> dict[str, Any]:
    """Return a field's metadata: what parses it, or refuses it, and its variable."""
    return {"parse": parse, "variable": variable}


@dataclass(frozen=True)
class Settings:
    """What a job saves, when and where, and how it is started.

    Attributes:
        checkpoint_dir: Where checkpoints are kept; without it nothing is saved.
        save_interval: Seconds between checkpoints; 0 for every boundary; infinite for
            "off"; or "auto".
        save_every: What else makes the job save: batches, ends of epochs.
        keep: How many of the newest checkpoints stay.
        async_save: Whether training goes on while a checkpoint is written.
        rescue: Whether a survivor saves the last boundary when a replica dies;
            "always" if also where that costs more than it may.
        trust_pickle: States that may hold any object; loading them executes code.
        grace: Seconds that a stop may take before a replica leaves without saving.
        stop_signals: The signals that mean to save and stop.
        job: The job's name, which a checkpoint remembers; empty if it has none.
        trace_dir: Where to append one line per delivered micro-batch, or None.
        backend: "gloo", "nccl", or "auto": NCCL where each replica has a GPU.
        timeout: Seconds that a collective may take; None for what torch finds right.
        virtual_replicas: In how many shares each global batch is cut at any number of
            replicas; None for one a replica.
    """

    checkpoint_dir: str | os.PathLike[str] | None = field(
        default=None, metadata=_read(parse_checkpoint_dir, "ELASTICRUN_CHECKPOINT_DIR")
    )
    save_interval: float | Literal["auto"] = field(
        default=300.0, metadata=_read(parse_save_interval, "ELASTICRUN_SAVE_INTERVAL")
    )
    save_every: SaveEvery = field(
        default=ONLY_BY_TIME, metadata=_read(parse_save_every, "ELASTICRUN_SAVE_EVERY")
    )
    keep: int = field(default=3, metadata=_read(parse_keep, "ELASTICRUN_KEEP"))
    async_save: bool = field(
        default=True, metadata=_read(parse_switch, "ELASTICRUN_ASYNC_SAVE")
    )
    rescue: bool | Literal["always"] = field(
        default=True, metadata=_read(parse_rescue, "ELASTICRUN_RESCUE")
    )
    trust_pickle: frozenset[str] = field(
        default=frozenset(), metadata=_read(parse_trust_pickle)
    )
    grace: float = field(
        default=60.0, metadata=_read(parse_seconds, "ELASTICRUN_GRACE")
    )
    stop_signals: tuple[int, ...] = field(
        default=STOP_SIGNALS,
        metadata=_read(parse_stop_signals, "ELASTICRUN_STOP_SIGNALS"),
    )
    job: str = field(
        default_factory=_name_of_script, metadata=_read(_text, "ELASTICRUN_JOB")
    )
    trace_dir: str | None = field(
        default=None, metadata=_read(_text, "ELASTICRUN_TRACE")
    )
    backend: str = field(default="auto", metadata=_read(_text))
    timeout: float | None = field(
        default=None, metadata=_read(parse_seconds, "ELASTICRUN_TIMEOUT")
    )
    virtual_replicas: int | None = field(
        default=None,
        metadata=_read(parse_virtual_replicas, "ELASTICRUN_VIRTUAL_REPLICAS"),
    )

    @classmethod
    def read(
        cls,
        process: Mapping[str, str] | None = None,
        called: Mapping[str, str] | None = None,
        /,
        **given: Any,
    ) -> Settings:
        """Return the settings that a program gives, and from variables the others.

        Args:
            process: The variables of a process; None for this one's.
            called: What to call a setting in a refusal if it is given, by its name.
            given: By name; None and an empty text are as good as nothing given.
        """
        process = variables() if process is None else process
        values = {}
        for each in fields(cls):
            name, variable = each.name, each.metadata["variable"]
            setting = f"{name} ({variable})" if variable else name
            value = given.pop(name, None)
            if value is None or value == "":
                value = process.get(variable) or None
            elif called:
                setting = called.get(name, setting)
            if value is not None:
                values[name] = each.metadata["parse"](value, setting=setting)
        return cls(**values, **given)  # Which refuses what is left: no setting.
