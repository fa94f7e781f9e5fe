"""The options of a job, checked before anything is started."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from elasticrun.checkpoint.storage.place import Place
from elasticrun.errors import counted
from elasticrun.launcher import environment
from elasticrun.saving.settings import Settings

AUTO = "auto"
_TORCHRUNS_AUTO = ("gpu", "cpu")
_RENDEZVOUS_PORT = 29400  # torchrun has the same.
_HOST = r"[\w.:-]+"
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
        if number < 1:
            raise OptionError(f"{number} replicas: give a number from 1 up.")
        if not self.least <= number <= self.most:
            raise OptionError(
                f"{counted(number, 'replica')}: --replicas MIN:MAX allows this job "
                f"{self.least} to {self.most}."
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
        return self.target if self.kind == "module" else os.path.basename(self.target)

    @property
    def file(self) -> Path | None:
        """The file that is run, if it can be told without importing anything."""
        if self.kind != "module":
            return Path(self.target) if self.kind == "script" else None
        name = self.target.replace(".", "/")
        for folder in (os.getcwd(), *sys.path):
            for file in (f"{name}/__main__.py", f"{name}.py"):
                if (path := Path(folder, file)).is_file():
                    return path
        return None


@dataclass(frozen=True)
class NodeSettings:
    """How many machines take part, and where they meet.

    Attributes:
        host: Who serves the endpoint; empty if they find that in `place`.
        place: The checkpoint directory, if no endpoint is given.
        address: At which the others reach this node, if it is given.
        patience: Seconds to wait for the endpoint, and for enough nodes.
    """

    least: int
    most: int
    host: str = ""
    port: int = 0
    place: str = ""
    address: str = ""
    patience: float = 600.0

    @property
    def endpoint(self) -> str:
        if self.place:
            return f"the endpoint in {self.place}/rendezvous"
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
        spares: How far those are that wait for a crash: "imported", "prepared" by the
            script, or "" without any.
        settings: What the launcher needs to know of its replicas' settings.
        variables: What tells them the settings that were given as options.
        lifeline: A descriptor; when its other end is closed, the job is to stop.
        nodes: The machines of the job; None for this one alone.
        notice: Who says that this machine is about to be taken away, if anybody.
        is_quiet: Whether what replicas print is kept in logs, and not shown.
        on_event: A command that is told of what becomes of the job, as JSON.
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
    is_exec: bool = False
    hang_timeout: float | str | None = AUTO
    spares: str = "imported"
    settings: Settings = field(default_factory=Settings)
    variables: Mapping[str, str] = field(default_factory=dict)
    lifeline: int | None = None
    is_linted: bool = True
    nodes: NodeSettings | None = None
    notice: str | None = None
    is_quiet: bool = False
    on_event: str | None = None

    @property
    def how_to_go_on(self) -> str:
        """What to say to who has stopped the job; nothing if nothing is kept."""
        if self.program.kind != "function":
            return "; the same command resumes"
        if self.checkpoint_dir.parent == Path(self.program.target):
            return ""
        return "; the same checkpoint_dir resumes"


def parse_replicas(text: str, *, num_shares: int | None = None) -> Replicas:
    """Return what N, auto or MIN:MAX means on this machine.

    Args:
        num_shares: Virtual replicas; None without.
    """
    # One a GPU, else one a core, up to as many as share a CPU well.
    suggested = environment.num_gpus() or min(environment.num_cores(), _MOST_CORES)
    suggested = min(suggested, num_shares or suggested)
    if text in (AUTO, *_TORCHRUNS_AUTO):
        return Replicas(suggested, 1, 1 << 16)
    least, most = _parse_range(text)
    if not 1 <= least <= most:
        raise OptionError(
            f"--replicas {text}: give a number from 1 up, auto, or MIN:MAX with "
            "1 <= MIN <= MAX."
        )
    check_shares(least, 0, num_shares)
    if ":" not in text:
        return Replicas(least, 1, 1 << 16)
    return Replicas(min(max(suggested, least), most), least, most)


def _parse_range(text: str) -> tuple[int, int]:
    """Return both ends of N or MIN:MAX, zeros for anything else."""
    match = re.fullmatch(r"(\d{1,5})(?::(\d{1,5}))?", text)
    return (int(match[1]), int(match[2] or match[1])) if match else (0, 0)


def parse_nodes(
    nodes: str | None, endpoint: str | None, *, place: Place, address: str | None = None
) -> NodeSettings | None:
    """Return what `--nodes`, `--rdzv-endpoint` and `--address` mean together."""
    if nodes is None:
        if endpoint is None and address is None:
            return None
        raise OptionError(
            "--rdzv-endpoint and --address are for a job on several machines. Add "
            "--nodes MIN:MAX, how many take part."
        )
    least, most = _parse_range(nodes)
    if not 1 <= least <= most:
        raise OptionError(
            f"--nodes {nodes}: give a number from 1 up, or MIN:MAX with "
            "1 <= MIN <= MAX."
        )
    if most == 1 and endpoint is None:
        return None  # There is nobody to meet.
    if address is not None and not re.fullmatch(_HOST, address):
        raise OptionError(
            f"--address {address}: give the name or the address of this machine, "
            "without a port."
        )
    if endpoint is None:
        return NodeSettings(least, most, place=str(place), address=address or "")
    host, colon, port = endpoint.rpartition(":")
    if not colon or endpoint.endswith("]"):
        host, port = endpoint, str(_RENDEZVOUS_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not re.fullmatch(_HOST, host) or not port.isdecimal():
        raise OptionError(
            f"--rdzv-endpoint {endpoint}: give HOST:PORT, where HOST is the name or "
            "the address of one of the machines."
        )
    if not 0 < int(port) < 1 << 16:
        raise OptionError(f"--rdzv-endpoint {endpoint}: ports go from 1 to 65535.")
    return NodeSettings(least, most, host, int(port), address=address or "")


# torchrun takes what is not given as an option from these, and Kubeflow sets them in
# each pod; what they are called here.
_TORCHRUNS = {
    "PET_NNODES": "nodes",
    "PET_NPROC_PER_NODE": "replicas",
    "PET_RDZV_ENDPOINT": "rdzv_endpoint",
    "PET_MAX_RESTARTS": "max_restarts",
}


def options_of_torchrun(process: Mapping[str, str]) -> dict[str, str]:
    """Return what torchrun's variables say, by the names of options here.

    An address without an endpoint (PET_MASTER_ADDR) is not needed: nodes find each
    other.
    """
    found = {option: process.get(name) for name, option in _TORCHRUNS.items()}
    if _parse_range(found["nodes"] or "1") == (1, 1):
        found["nodes"] = found["rdzv_endpoint"] = None
    return {option: text for option, text in found.items() if text}


def parse_max_restarts(text: str | None) -> int:
    """Return a number of restarts, 3 if none is given."""
    text = "3" if text is None else text
    if not text.isdecimal():
        raise OptionError(f"--max-restarts {text}: give 0 or more.")
    return int(text)


def parse_hang_timeout(text: str) -> float | str | None:
    """Return seconds, "auto", or None for "off"."""
    if text == AUTO:
        return AUTO
    if text == "off":
        return None
    return parse_seconds("--hang-timeout", text, also=" (or auto, or off)")


# These settings are options of `elasticrun run`, too.
SETTINGS_BY_OPTION = ("grace", "save_interval", "stop_signals", "virtual_replicas")


def read_settings(
    process: Mapping[str, str], **given: str | None
) -> tuple[Settings, dict[str, str]]:
    """Return what replicas are told, and the variables that tell them what is given."""
    called = {name: "--" + name.replace("_", "-") for name in given}
    variables = {f.name: f.metadata["variable"] for f in fields(Settings)}
    # A program may give what other variables have wrong; these it cannot.
    needed = ("grace", "stop_signals", "virtual_replicas")
    own = {variables[name] for name in needed}
    process = {name: text for name, text in process.items() if name in own}
    for name, text in given.items():
        if text == "":
            raise OptionError(f"{called[name]} is ''; give a value, or leave it out.")
    try:
        settings = Settings.read(process, called, **given)
    except ValueError as error:
        raise OptionError(str(error)) from error
    return settings, {variables[name]: text for name, text in given.items() if text}


def parse_seconds(name: str, text: str, *, also: str = "") -> float:
    """Return a number of seconds above 0."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise OptionError(f"{name} {text}: give seconds above 0{also}.")
    return seconds


def check_name(path: str) -> None:
    """Refuse a name that messages and files of a job could not hold."""
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise OptionError(
            f"{path!a}: this name is no UTF-8, so it can be written neither into "
            "messages nor into a checkpoint. Rename it."
        ) from error


def make_program(target: str, arguments: list[str], *, is_module: bool) -> Program:
    """Return the program of a command line."""
    if is_module:
        return Program("module", target, tuple(arguments), (os.getcwd(),))
    if not os.path.isfile(target):
        raise OptionError(
            f"{target}: there is no such script. To run a module, put -m before it."
        )
    folder = os.path.dirname(os.path.realpath(target))
    check_name(f"{folder}/{target}")
    return Program("script", target, tuple(arguments), (folder,))


def check_processors(size: int, *, uses_gpus: bool) -> None:
    """Refuse more replicas than GPUs, or than two for each core without GPUs."""
    num_gpus = environment.num_gpus()
    if uses_gpus and 0 < num_gpus < size:  # None where they cannot be counted.
        raise OptionError(
            f"{size} replicas: the job trains on GPUs, and each replica needs its own, "
            f"or all would train on the CPU. {num_gpus} can be seen here. Ask for at "
            f"most {num_gpus}; --force asks for more all the same."
        )
    num_cores = environment.num_cores()
    most = max(2 * num_cores, num_gpus)
    if size > most:
        raise OptionError(
            f"{size} replicas: this machine has {counted(num_cores, 'core')} for them, "
            f"so they would wait for each other, and for memory. Ask for at most "
            f"{most}; --force asks for more all the same."
        )


def check_shares(size: int, elsewhere: int, num_shares: int | None) -> None:
    """Refuse more replicas than virtual ones.

    Args:
        elsewhere: Replicas on other nodes.
        num_shares: Virtual replicas; None if there are none, or it is not known.
    """
    if num_shares is not None and size + elsewhere > num_shares:
        others = f" and {elsewhere} on other nodes" if elsewhere else ""
        raise OptionError(
            f"{counted(size, 'replica')}{others}: the job has "
            f"{counted(num_shares, 'virtual replica')}, so each global batch has no "
            f"more shares, of which each replica trains one or more. Ask for at most "
            f"{max(num_shares - elsewhere, 0)}."
        )


def check_batch(size: int, elsewhere: int, batch_size: int) -> None:
    """Refuse more replicas than a global batch has samples."""
    if batch_size and size + elsewhere > batch_size:
        others = f" and {elsewhere} on other nodes" if elsewhere else ""
        raise OptionError(
            f"{size} replicas{others}: the global batch has "
            f"{counted(batch_size, 'sample')}, so some would never get one. Ask for "
            "fewer, or raise the loader's batch_size; --force asks for as many all "
            "the same."
        )
