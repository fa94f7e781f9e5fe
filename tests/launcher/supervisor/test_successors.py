"""When what runs gives way to successors, in one process, and in which order."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticrun.launcher import processes
from elasticrun.launcher.event_loop import EventLoop
from elasticrun.launcher.forks.waiting import ForkedReplica
from elasticrun.launcher.options import NodeSettings, Options, Program, Replicas
from elasticrun.launcher.supervisor import successors
from elasticrun.launcher.supervisor.generation import NO_IMPORTS
from elasticrun.launcher.supervisor.replica_reports import ReplicaReports
from elasticrun.launcher.supervisor.restart_policy import CrashHistory
from elasticrun.launcher.supervisor.successors import Successors
from elasticrun.replicas.wire import Channel

PROGRAM = Program("script", "train.py", (), ())


class Stage:
    """A generation of two replicas, and successors whose part the test plays."""

    def __init__(self, folder: Path, **given: Any) -> None:
        self.loop = EventLoop()
        self.said: list[str] = []
        self.asked: list[tuple[int, Callable[[list[ForkedReplica]], None]]] = []
        self.ends: list[Channel] = []
        self.writers: list[int] = []
        options = Options(
            program=PROGRAM,
            replicas=Replicas(2, 1, 8),
            name="job",
            is_named=False,
            checkpoint_dir=folder,
            local_dir=folder,
            log_dir=folder,
            **given,
        )
        console: Any = SimpleNamespace(event=self.said.append)
        self.reports = ReplicaReports(console, CrashHistory(3, newest_at_start=0))
        starter: Any = SimpleNamespace(
            fork=lambda size, on_forked: self.asked.append((size, on_forked)),
            tell_groups=lambda pids: None,
        )
        self.stops: list[str] = []  # Of the generation that runs.
        self.successors = Successors(
            options,
            self.loop,
            starter=starter,
            console=console,
            reports=self.reports,
            on_ready=lambda: None,
            on_prepared=self.stops.append,
        )
        running: Any = [
            SimpleNamespace(pid=2**22 + rank, imports=NO_IMPORTS) for rank in range(2)
        ]
        self.generation: Any = SimpleNamespace(
            size=2,
            members=running,
            running=running,
            has_job=True,
            has_trained=True,
            uses_gpus=False,
            batch_size=0,
            num_shares=None,
            started_at=0.0,
        )
        self.successors.beside = self.generation

    def train(self) -> None:
        """Let the generation train for a while."""
        for call in self.reports.on_trained:
            call(self.generation)
        self.loop.run_once()

    def fork(self) -> None:
        """Fork all that were asked for last."""
        size, on_forked = self.asked.pop()
        forked = []
        for rank in range(size):
            own, other = socket.socketpair()
            outputs = []
            for _ in range(2):
                reader, writer = os.pipe()
                outputs.append(reader)
                self.writers.append(writer)
            self.ends.append(Channel(other))
            out, err = outputs
            pid = 2**22 + 10 + rank
            forked.append(ForkedReplica(rank, pid, Channel(own), (out, err), (1,)))
        on_forked(forked)

    def wait(self) -> None:
        """Let all successors come to where they wait."""
        for end in self.ends:
            end.send({"type": "waiting"})
            self.loop.run_once()

    def fail(self) -> None:
        """Let the script of one of them raise."""
        self.ends[0].send({"type": "failure", "summary": "no such file", "trace": ""})
        self.loop.run_once()

    def close(self) -> None:
        self.successors.take_back()
        for end in self.ends:
            end.close()
        for writer in self.writers:
            os.close(writer)


Open = Callable[..., Stage]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    monkeypatch.setattr(successors, "_CALM_SECONDS", 0.0)
    stages: list[Stage] = []

    def open_(**given: Any) -> Stage:
        stages.append(Stage(tmp_path, **given))
        return stages[-1]

    yield open_
    for stage in stages:
        stage.close()


def test_what_runs_gives_way_once_the_successors_wait(opened: Open) -> None:
    stage = opened()
    text = stage.successors.scale(3, stage.generation)
    assert text == "rescaling from 2 to 3 replicas"
    assert stage.successors.is_rescaling
    stage.fork()
    assert stage.stops == []
    stage.wait()
    assert stage.stops == [text]


def test_what_runs_gives_way_to_successors_that_cannot_run_beside_it(
    opened: Open,
) -> None:
    stage = opened()
    stage.generation.has_job = False
    stage.successors.scale(3, stage.generation)
    stage.fork()
    assert len(stage.stops) == 1


def test_a_rescaling_taken_back_leaves_no_successor(opened: Open) -> None:
    stage = opened()
    stage.successors.scale(3, stage.generation)
    stage.fork()
    text = stage.successors.scale(2, stage.generation)
    assert text == "staying at 2 replicas, not 3"
    assert (stage.successors.size, stage.successors.is_rescaling) == (2, False)
    assert stage.successors.pids == set()


def test_those_that_nobody_needs_any_more_are_not_kept_once_they_are_forked(
    opened: Open,
) -> None:
    """By a rescaling that is taken back, by another size, and by a stop."""
    stage = opened()
    stage.successors.scale(3, stage.generation)
    assert stage.successors.scale(2, stage.generation).startswith("staying at 2")
    stage.fork()
    stage.successors.scale(4, stage.generation)
    stage.successors.scale(3, stage.generation)
    last = stage.asked.pop()
    stage.fork()
    assert stage.successors.pids == set()
    stage.asked.append(last)
    stage.successors.discard()
    stage.fork()
    assert (stage.successors.pids, stage.stops) == (set(), [])


def test_a_crash_before_they_wait_is_followed_by_them(opened: Open) -> None:
    stage = opened()
    stage.successors.scale(3, stage.generation)
    stage.generation.running = []
    stage.successors.beside = None
    stage.fork()
    assert (stage.successors.is_requested, stage.stops) == (True, [])
    assert len(stage.successors.offer()) == 3


def test_what_runs_goes_on_when_a_successor_fails(opened: Open) -> None:
    stage = opened()
    told: list[tuple[str, bool]] = []
    stage.reports.on_message.append(lambda *what: told.append(what))
    stage.successors.scale(3, stage.generation)
    stage.fork()
    stage.fail()
    assert (stage.successors.size, stage.successors.is_rescaling) == (2, False)
    text = (
        "a new replica failed, so the running ones go on; the next rescaling stops "
        "them first. It was local rank 0: no such file"
    )
    assert (told, stage.said[-1]) == ([(text, True)], text)
    stage.successors.scale(3, stage.generation)
    stage.fork()  # Not beside what runs any more.
    assert len(stage.stops) == 1


def test_among_nodes_what_runs_gives_way_at_once(opened: Open) -> None:
    stage = opened(nodes=NodeSettings(1, 2, "localhost", 29400))
    text = stage.successors.scale(3, stage.generation)
    assert stage.stops == [text]


@pytest.mark.parametrize("spares", ["imported", "prepared"])
def test_spares_become_successors_of_a_crash_and_not_of_a_rescaling(
    opened: Open, spares: str
) -> None:
    stage = opened(spares=spares)
    stage.train()
    stage.fork()
    stage.wait()
    pids = stage.successors.spares
    assert (len(pids), stage.successors.num_ready_spares) == (2, 2)
    assert stage.stops == []  # Nobody waits for them.
    stage.successors.beside = None
    stage.successors.prepare()
    assert (stage.successors.is_requested, stage.asked) == (True, [])
    assert [each.pid for each in stage.successors.offer()] == pids


def test_a_script_that_cannot_run_beside_itself_has_no_spares(opened: Open) -> None:
    """One that was killed while it waited has others in its place."""
    stage = opened(spares="prepared")
    stage.train()
    stage.fork()
    stage.wait()
    stage.ends.pop(0).close()
    stage.loop.run_once()
    assert stage.said[-1].startswith("a spare failed; others take their place. It was")
    stage.ends.pop().close()
    stage.fork()
    stage.fail()
    assert stage.said[-1] == (
        "a spare failed; there are no more. It was local rank 0: no such file"
    )
    assert (stage.asked, stage.successors.spares) == ([], [])


def test_nobody_waits_for_a_spare_whose_imports_have_no_end(opened: Open) -> None:
    stage = opened()
    stage.train()
    stage.fork()
    assert stage.successors.num_ready_spares == 0
    stage.successors.beside = None
    stage.successors.prepare()
    assert [size for size, _ in stage.asked] == [2]  # Others are forked.


IMPORTS = {"modules": [["package", 1]], "path": [], "variables": []}


@pytest.mark.parametrize("spares", ["", "prepared"])
def test_where_imports_ahead_do_not_suit_they_are_left_to_the_script(
    opened: Open, spares: str
) -> None:
    stage = opened(spares=spares)
    for member in stage.generation.members:
        member.imports = IMPORTS
    if spares:
        stage.train()
    else:
        stage.successors.scale(3, stage.generation)
    for imports in (IMPORTS, NO_IMPORTS):
        stage.fork()
        order = stage.ends[0].receive_one()
        assert order is not None
        assert order["imports"] == imports
        if imports is IMPORTS:
            stage.ends[0].send({"type": "unlike"})
            stage.loop.run_once()
            while stage.ends:
                stage.ends.pop().close()
    stage.wait()
    assert len(stage.stops) == (not spares)
    assert "failed" not in " ".join(stage.said)


def test_among_nodes_successors_import_nothing_ahead(opened: Open) -> None:
    """Their generation may begin first, when it is too late for others."""
    stage = opened(nodes=NodeSettings(1, 2, "localhost", 29400))
    for member in stage.generation.members:
        member.imports = IMPORTS
    stage.successors.scale(3, stage.generation)
    stage.fork()
    order = stage.ends[0].receive_one()
    assert order is not None
    assert order["imports"] == NO_IMPORTS


def test_spares_that_only_import_end_in_silence(opened: Open) -> None:
    """And the program may still rehearse."""
    stage = opened()
    stage.train()
    stage.fork()
    stage.ends[0].close()
    stage.loop.run_once()
    assert (stage.successors.spares, stage.asked, stage.said) == ([], [], [])
    stage.ends.pop().close()
    stage.ends.pop()
    stage.successors.scale(3, stage.generation)
    stage.fork()
    assert stage.stops == []  # It goes on until they wait.


@pytest.mark.parametrize(
    ("num_bytes", "spares", "num_asked"),
    [(2**30 - 1, "imported", 0), (2**30, "imported", 1), (2**40, "", 0)],
)
def test_spares_wait_only_where_memory_and_the_user_allow_it(
    opened: Open,
    monkeypatch: pytest.MonkeyPatch,
    num_bytes: int,
    spares: str,
    num_asked: int,
) -> None:
    monkeypatch.setattr(processes, "available_memory", lambda: num_bytes)
    stage = opened(spares=spares)
    stage.train()
    assert (len(stage.asked), stage.said) == (num_asked, [])
