"""What a job is started with, checked once, before anything is started."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from elasticrun.checkpoint.place import Place
from elasticrun.launcher import environment
from elasticrun.launcher.modules import why_not_runnable

AUTO = "auto"
_RENDEZVOUS_PORT = 29400  # As torchrun's.
_MOST_CORES = 8  # More replicas than that on one CPU mostly wait for each other.


class OptionError(ValueError):
    """An option that cannot be: what it is, why not, what to give instead."""


@dataclass(frozen=True)
class Replicas:
    """How many replicas a job has at its start, and within which bounds it may go."""

    initial: int
    least: int
    most: int

    def check(self, number: int) -> None:
        """Refuse a number out of bounds.

        Raises:
            OptionError: It is one.
        """
        if number < 1:
            raise OptionError(f"{number} replicas: give a number from 1 up.")
        if not self.least <= number <= self.most:
            raise OptionError(
                f"{number} replicas is outside of {self.least} to {self.most}, which "
                "--replicas MIN:MAX allows this job."
            )


@dataclass(frozen=True)
class Program:
    """What each replica runs.

    Attributes:
        kind: "script", "module", or "function" (in a file, for `elasticrun.launch`).
        target: The script's path, the module's name, or the function's folder.
        path: What stands first in `sys.path`.
    """

    kind: str
    target: str
    arguments: tuple[str, ...]
    path: tuple[str, ...]

    @property
    def label(self) -> str:
        """What to call it: the script's file name, or the module."""
        return self.target if self.kind == "module" else os.path.basename(self.target)

    @property
    def stem(self) -> str:
        """The label without `.py`, to name directories."""
        return self.label.removesuffix(".py")


@dataclass(frozen=True)
class NodeSettings:
    """How many machines take part, and where they meet.

    Attributes:
        patience: Seconds to wait for the endpoint, and for enough nodes.
    """

    least: int
    most: int
    host: str
    port: int
    patience: float = 600.0

    @property
    def endpoint(self) -> str:
        """Where they meet, as it was given."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True)
class Options:
    """Everything that `elasticrun run` was told.

    Attributes:
        local_dir: Where the launcher keeps its own lock and logs: the checkpoint
            directory, unless that is a URL.
        name: What `status`, `scale` and `stop` call the job.
        is_named: Whether the user gave the name, so that checkpoints get it too.
        hang_timeout: Seconds without a boundary; "auto"; None for never.
        lifeline: A descriptor; when its other end is closed, the job is to stop.
        is_linted: Whether errors that the linter finds in the script are shown.
        nodes: The machines of the job; None for this one alone.
    """

    program: Program
    replicas: Replicas
    name: str
    is_named: bool
    checkpoint_dir: Place
    local_dir: Path
    log_dir: Path
    is_fresh: bool = False
    max_restarts: int = 3
    grace: float = 60.0
    save_interval: str | None = None
    is_exec: bool = False
    hang_timeout: float | str | None = AUTO
    lifeline: int | None = None
    is_linted: bool = True
    nodes: NodeSettings | None = None

    @property
    def how_to_go_on(self) -> str:
        """What to say to who has stopped the job; nothing if nothing is kept."""
        if self.program.kind != "function":
            return "; the same command goes on"
        if self.checkpoint_dir.parent == Path(self.program.target):
            return ""
        return "; with the same checkpoint_dir it goes on"


def parse_replicas(text: str) -> Replicas:
    """Return what N, auto or MIN:MAX means on this machine.

    Raises:
        OptionError: `text` is none of them.
    """
    suggested = suggested_replicas()
    if text == AUTO:
        return Replicas(suggested, 1, 1 << 16)
    match = re.fullmatch(r"(\d{1,5})(?::(\d{1,5}))?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not match or not 1 <= least <= most:
        raise OptionError(
            f"--replicas {text}: give a number from 1 up, auto, or MIN:MAX with "
            "1 <= MIN <= MAX."
        )
    if match[2] is None:
        return Replicas(least, 1, 1 << 16)
    return Replicas(min(max(suggested, least), most), least, most)


def parse_nodes(nodes: str | None, endpoint: str | None) -> NodeSettings | None:
    """Return what `--nodes` and `--rdzv-endpoint` mean together.

    Raises:
        OptionError: One of them is missing, or is not what it should be.
    """
    if nodes is None and endpoint is None:
        return None
    match = re.fullmatch(r"(\d{1,5})(?::(\d{1,5}))?", nodes or "")
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if nodes is not None and not 1 <= least <= most:
        raise OptionError(
            f"--nodes {nodes}: give a number from 1 up, or MIN:MAX with "
            "1 <= MIN <= MAX."
        )
    if nodes is None or endpoint is None:
        raise OptionError(
            "--nodes MIN:MAX says how many machines take part, and --rdzv-endpoint "
            "HOST:PORT where they meet; one makes no sense without the other. HOST is "
            "the address of one of the machines, PORT a free one there."
        )
    host, colon, port = endpoint.rpartition(":")
    if not colon or endpoint.endswith("]"):
        host, port = endpoint, str(_RENDEZVOUS_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not re.fullmatch(r"[\w.:-]+", host) or not port.isdecimal():
        raise OptionError(
            f"--rdzv-endpoint {endpoint}: give HOST:PORT, where HOST is the name or "
            "the address of one of the machines."
        )
    if not 0 < int(port) < 1 << 16:
        raise OptionError(f"--rdzv-endpoint {endpoint}: ports go from 1 to 65535.")
    return NodeSettings(least, most, host, int(port))


def suggested_replicas() -> int:
    """Return one replica a GPU, else one a core, up to as many as share a CPU well."""
    return environment.num_gpus() or min(environment.num_cores(), _MOST_CORES)


def parse_hang_timeout(text: str) -> float | str | None:
    """Return seconds, "auto", or None for "off".

    Raises:
        OptionError: `text` is none of them.
    """
    if text == AUTO:
        return AUTO
    if text == "off":
        return None
    return parse_seconds("--hang-timeout", text, also=" (or auto, or off)")


def parse_seconds(name: str, text: str, *, also: str = "") -> float:
    """Return a number of seconds above 0.

    Raises:
        OptionError: `text` is no such number.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise OptionError(f"{name} {text}: give seconds above 0{also}.")
    return seconds


def make_program(target: str, arguments: list[str], *, is_module: bool) -> Program:
    """Return the program of a command line.

    Raises:
        OptionError: There is no such script or module.
    """
    if is_module:
        problem = why_not_runnable(target)
        if problem:
            raise OptionError(f"-m {target}: {problem}.")
        return Program("module", target, tuple(arguments), (os.getcwd(),))
    if not os.path.isfile(target):
        raise OptionError(
            f"{target}: there is no such script. To run a module, put -m before it."
        )
    folder = os.path.dirname(os.path.realpath(target))
    return Program("script", target, tuple(arguments), (folder,))
