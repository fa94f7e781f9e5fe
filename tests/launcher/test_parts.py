"""The launcher's parts that decide: causes, budgets, hangs, lines, messages."""

from __future__ import annotations

import errno
import itertools
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrun.launcher import directory, environment, processes, sockets
from elasticrun.launcher.causes import (
    Ending,
    Failure,
    describe,
    explain_kill,
    first_cause,
)
from elasticrun.launcher.generation import Member
from elasticrun.launcher.hangs import HangClock, held_up_by
from elasticrun.launcher.loop import Loop
from elasticrun.launcher.options import (
    OptionError,
    Program,
    Replicas,
    parse_hang_timeout,
    parse_replicas,
)
from elasticrun.launcher.output import LineReader, Log, find_logs, log_path, marked
from elasticrun.launcher.parked import Parked
from elasticrun.launcher.restarts import Budget
from elasticrun.launcher.table import render
from elasticrun.launcher.wire import Channel, WireError


def ending(rank: int, code: int, time: float, text: str = "", *, killed: bool = False):
    failure = Failure(text, "") if text else None
    return Ending(rank, code, time, failure, killed)


class TestCauses:
    def test_a_stop_and_an_end_are_no_failures(self) -> None:
        codes = [0, 75, 130, 143]
        assert first_cause([ending(i, c, i) for i, c in enumerate(codes)]) is None

    def test_a_lost_connection_follows_from_something(self) -> None:
        lost = "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:1234"
        dead = "AgreementError: the process of rank 2 died."
        endings = [
            ending(0, 1, 1.0, lost),
            ending(1, 1, 1.1, dead),
            ending(2, 1, 1.2, "ValueError: nan"),
            ending(3, -9, 0.9, killed=True),
        ]
        cause = first_cause(endings)
        assert cause is not None
        assert describe(cause) == "rank 2 raised ValueError: nan"

    @pytest.mark.parametrize("code", [0, 75])
    def test_who_left_the_others_is_named(self, code: int) -> None:
        lost = "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:1234"
        endings = [ending(0, 1, 1.0, lost), ending(1, code, 1.1), ending(2, code, 1.2)]
        cause = first_cause(endings)
        assert cause is not None
        assert cause.is_own_fault
        assert describe(cause) == (
            f"rank 1 ended with exit code {code} while the others were still training"
        )
        own = first_cause([*endings, ending(3, 1, 1.3, "ValueError: nan")])
        assert own is not None
        assert own.rank == 3

    def test_a_signal_comes_before_what_it_led_to(self) -> None:
        lost = "DistBackendError: remote process exited"
        cause = first_cause([ending(0, 1, 1.0, lost), ending(1, -11, 1.1)])
        assert cause is not None
        assert describe(cause) == "rank 1 was killed by signal 11 (SIGSEGV)"

    def test_what_the_launcher_killed_is_the_last_to_be_named(self) -> None:
        lost = "ConnectionError: the job's store is gone"
        cause = first_cause([ending(0, -9, 0.5, killed=True), ending(1, 1, 1.0, lost)])
        assert cause is not None
        assert cause.rank == 1

    def test_the_first_of_two_faults_is_named(self) -> None:
        cause = first_cause([ending(0, 3, 2.0), ending(1, 4, 1.9)])
        assert cause is not None
        assert describe(cause) == "rank 1 exited with code 4"

    def test_a_full_memory_is_a_hint(self) -> None:
        assert "out-of-memory" in explain_kill(3, 4, 0.5)
        assert "5% of the memory is free" in explain_kill(3, 3, 0.05)
        assert explain_kill(3, 3, 0.5) == explain_kill(None, None, 0.5) == ""
        text = describe(ending(1, -9, 0.0), hint="likely the out-of-memory killer")
        assert text.endswith("(SIGKILL): likely the out-of-memory killer")

    def test_kills_of_the_own_control_group_count_before_the_machines(
        self, tmp_path: Path
    ) -> None:
        proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
        (proc / "self").mkdir(parents=True)
        (cgroups / "jobs" / "7").mkdir(parents=True)
        places = {"proc": proc, "cgroups": cgroups}
        assert processes.num_out_of_memory_kills(**places) is None
        (proc / "vmstat").write_text("nr_free_pages 5\noom_kill 12\n")
        assert processes.num_out_of_memory_kills(**places) == 12
        (proc / "self" / "cgroup").write_text("1:cpu:/other\n0::/jobs/7\n")
        assert processes.num_out_of_memory_kills(**places) == 12
        events = cgroups / "jobs" / "7" / "memory.events"
        events.write_text("low 0\noom 9\noom_kill 3\noom_group_kill 0\n")
        assert processes.num_out_of_memory_kills(**places) == 3


class TestBudget:
    def test_delays_double_up_to_a_minute(self) -> None:
        budget = Budget(10)
        delays = [budget.on_crash(0) for _ in range(11)]
        assert delays == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60, None]

    def test_a_newer_checkpoint_makes_it_full_again(self) -> None:
        budget = Budget(2)
        assert [budget.on_crash(n) for n in (1, 1, 2, 2, 2)] == [0, 1, 0, 1, None]

    def test_none_is_none(self) -> None:
        assert Budget(0).on_crash(5) is None


class TestHangs:
    def test_it_learns_what_is_usual_and_looks_at_loops_only(self) -> None:
        clock = HangClock("auto")
        assert not clock.is_hung(599, is_in_loop=True)
        assert clock.is_hung(601, is_in_loop=True)
        assert not clock.is_hung(10_000, is_in_loop=False)
        clock.note_gap(100)
        assert not clock.is_hung(1999, is_in_loop=True)
        assert clock.is_hung(2001, is_in_loop=True)

    def test_it_is_more_patient_after_a_hang(self) -> None:
        clock = HangClock("auto")
        clock.note_hang()
        assert clock.timeout == 1200

    def test_it_takes_seconds_and_off(self) -> None:
        assert HangClock(parse_hang_timeout("30")).is_hung(31, is_in_loop=False)
        assert not HangClock(parse_hang_timeout("off")).is_hung(1e9, is_in_loop=True)
        with pytest.raises(OptionError, match="auto, or off"):
            parse_hang_timeout("never")

    @pytest.mark.parametrize(
        ("reports", "culprit"),
        [
            ([((0, 0, 30), 6), ((0, 0, 30), 5)], 1),
            ([((0, 0, 36), 6), ((0, 0, 30), 6)], 1),
            ([((0, 0, 30), 5), ((0, 0, 36), 6), ((0, 0, 36), 6)], 0),
            ([((0, 0, 30), 5), ((0, 0, 30), 5)], None),
            ([((0, 0, 30), 5), None], 1),
            ([None, None], None),
            ([((0, 0, 30), 5)], 0),
        ],
    )
    def test_who_is_behind_holds_the_others_up(
        self, reports: list[Any], culprit: int | None
    ) -> None:
        silent = []
        for rank, each in enumerate(reports):
            left, right = socket.socketpair()
            left.close()
            right.close()
            member = Member(
                rank,
                pid=0,
                parked=Parked(rank, 0, Channel(left), (0, 0), ()),
                pidfd=0,
                started_at=0.0,
                log=Log(Path(os.devnull), pytest.fail),
            )
            if each is not None:
                member.report = {"place": list(each[0]), "num_steps": each[1]}
            member.log.close()
            silent.append(member)
        found = held_up_by(silent)
        assert (None if found is None else found.rank) == culprit


class TestReplicas:
    def test_a_number_a_range_and_auto(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(environment, "num_gpus", lambda: 0)
        monkeypatch.setattr(environment, "num_cores", lambda: 4)
        assert parse_replicas("3").initial == 3
        assert parse_replicas("1:2") == Replicas(2, 1, 2)
        assert parse_replicas("6:9") == Replicas(6, 6, 9)
        assert parse_replicas("auto").initial == 4
        monkeypatch.setattr(environment, "num_gpus", lambda: 2)
        assert parse_replicas("auto").initial == 2

    @pytest.mark.parametrize("text", ["0", "-1", "2:1", "many", "1:2:3", "0:4"])
    def test_nonsense_is_refused(self, text: str) -> None:
        with pytest.raises(OptionError, match=re.escape(text)):
            parse_replicas(text)

    def test_visible_gpus_are_counted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for text, number in (("0,1,2", 3), ("", 0), ("-1", 0), ("GPU-8f, GPU-9a", 2)):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
            assert environment.num_gpus() == number


class TestOutput:
    @given(
        text=st.lists(st.binary(min_size=0, max_size=30), max_size=10),
        cuts=st.lists(st.integers(0, 300), max_size=8),
    )
    def test_lines_are_whole_however_they_come(
        self, text: list[bytes], cuts: list[int]
    ) -> None:
        data = b"\n".join(text)
        reader, writer = os.pipe()
        lines: list[bytes] = []
        pipe = LineReader(reader, lines.append)
        places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
        for begin, end in itertools.pairwise(places):
            os.write(writer, data[begin:end])
            pipe.read()
        os.close(writer)
        pipe.close()
        assert all(line.endswith(b"\n") for line in lines)
        assert b"".join(lines).removesuffix(b"\n") == data.removesuffix(b"\n")

    def test_an_endless_line_is_not_kept_in_memory(self) -> None:
        reader, writer = os.pipe()
        lines: list[bytes] = []
        pipe = LineReader(reader, lines.append)
        os.set_blocking(writer, False)
        for _ in range(4):
            os.write(writer, b"x" * 60_000)
            pipe.read()
        os.close(writer)
        pipe.close()
        assert len(lines) > 1
        assert sum(map(len, lines)) == 240_000

    def test_who_goes_on_to_print_is_not_waited_for(self) -> None:
        reader, writer = os.pipe()
        os.write(writer, b"the last words\n" + b"x" * 50_000)
        lines: list[bytes] = []

        def take(line: bytes) -> None:
            lines.append(line)
            os.write(writer, b"y" * 30_000 + b"\n")

        pipe = LineReader(reader, take)
        pipe.close()
        os.close(writer)
        assert lines[0] == b"the last words\n"
        assert sum(map(len, lines)) > 50_000

    def test_a_progress_bar_shows_what_it_drew_last(self) -> None:
        assert marked(3, b"10%|#\r50%|##\n") == "[3] 50%|##"
        assert marked(0, b"\xff\n") == "[0] \N{REPLACEMENT CHARACTER}"

    def test_a_log_that_cannot_be_written_is_done_without(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        errors: list[OSError] = []
        for folder, name in ((tmp_path / "file", "rank-0.log"), (tmp_path, "full")):
            log = Log(folder / "generation-0000" / name, errors.append)
            log.write(b"line\n")
            log.close()
        assert [type(error) for error in errors] == [NotADirectoryError]
        full = Log(Path("/dev/full"), errors.append)
        full.write(b"line\n")
        full.write(b"line\n")
        full.close()
        assert [error.errno for error in errors[1:]] == [errno.ENOSPC]

    def test_logs_are_appended_and_found_in_order(self, tmp_path: Path) -> None:
        for generation, rank in ((10, 0), (2, 11), (2, 3), (2, 3)):
            path = log_path(tmp_path, generation=generation, rank=rank)
            log = Log(path, pytest.fail)
            log.write(b"line\n")
            log.close()
        found = find_logs(tmp_path)
        assert [(g, list(ranks)) for g, ranks in found.items()] == [
            (2, [3, 11]),
            (10, [0]),
        ]
        assert found[2][3].read_bytes() == b"line\nline\n"


class TestWire:
    def test_messages_come_through_whatever_they_hold(self) -> None:
        left, right = map(Channel, socket.socketpair())
        message = {"type": "start", "environment": {"A": "\udcff\n", "B": "x" * 50_000}}
        left.send(message)
        left.send({"type": "end"})
        left.close()
        received = []
        while right.is_open:
            received += right.receive()
        assert received == [message, {"type": "end"}]
        right.close()

    @pytest.mark.parametrize("data", [b"x" * 300, b"7\n", b"{]\n", b"[" * 250 + b"\n"])
    def test_nonsense_is_an_error(self, data: bytes) -> None:
        left, right = socket.socketpair()
        with left, right:
            left.sendall(data)
            with pytest.raises(WireError):
                Channel(right, limit=256).receive()

    def test_nobody_there_is_no_error(self) -> None:
        left, right = map(Channel, socket.socketpair())
        right.close()
        left.send({"type": "stop"})
        assert left.receive_one() is None
        left.close()


class TestLoop:
    def test_a_cancelled_timer_does_not_fire(self) -> None:
        loop, fired = Loop(), []
        loop.call_later(0.0, lambda: fired.append(1)).cancel()
        loop.call_later(0.0, lambda: fired.append(2))
        loop.turn()
        assert fired == [2]

    def test_what_was_forgotten_is_not_called(self) -> None:
        loop, called = Loop(), []
        pipes = [os.pipe() for _ in range(2)]

        def on_readable(own: int, other: int) -> None:
            called.append(own)
            loop.forget(other)

        first, second = pipes[0][0], pipes[1][0]
        loop.watch(first, lambda: on_readable(first, second))
        loop.watch(second, lambda: on_readable(second, first))
        for _, writer in pipes:
            os.write(writer, b"x")
        loop.turn()
        assert len(called) == 1
        for descriptor in (*pipes[0], *pipes[1]):
            os.close(descriptor)


class TestDirectory:
    def commit(self, path: Path, number: int) -> None:
        folder = path / f"checkpoint-{number:08d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()

    def test_only_the_same_program_is_finished(self, tmp_path: Path) -> None:
        script = tmp_path / "train.py"
        script.write_text("epochs = 3")
        own = tmp_path / "own"
        self.commit(own, 7)
        program = Program("script", str(script), ("--lr", "1"), ())
        assert directory.finished_at(own, program) is None
        directory.note_finished(own, program)
        assert directory.finished_at(own, program) is not None
        other = Program("script", str(script), ("--lr", "2"), ())
        assert directory.finished_at(own, other) is None
        script.write_text("epochs = 4")
        assert directory.finished_at(own, program) is None
        script.write_text("epochs = 3")
        self.commit(own, 8)
        assert directory.finished_at(own, program) is None

    @pytest.mark.parametrize("name", ["pack.train", "pack"])
    def test_a_module_that_has_changed_is_not_finished(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "pack").mkdir()
        for file in ("__main__.py", "train.py"):
            (tmp_path / "pack" / file).write_text("epochs = 3")
        own = tmp_path / "own"
        self.commit(own, 7)
        program = Program("module", name, (), (str(tmp_path),))
        directory.note_finished(own, program)
        assert directory.finished_at(own, program) is not None
        file = "train.py" if name == "pack.train" else "__main__.py"
        (tmp_path / "pack" / file).write_text("epochs = 4")
        assert directory.finished_at(own, program) is None

    def test_a_directory_in_use_is_not_moved(self, tmp_path: Path) -> None:
        own = tmp_path / "own"
        self.commit(own, 1)
        lock = own / "launcher.lock"
        code = (
            "import fcntl, sys; file = open(sys.argv[1], 'r+');"
            "fcntl.lockf(file, fcntl.LOCK_EX); print('held', flush=True);"
            "sys.stdin.read()"
        )
        lock.touch()
        with subprocess.Popen(
            [sys.executable, "-c", code, str(lock)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            with pytest.raises(OptionError, match="a live job uses .*/own "):
                directory.move_aside(own)
            holder.communicate()
        assert directory.move_aside(own) == tmp_path / "own.old-1"
        self.commit(own, 1)
        assert directory.move_aside(own) == tmp_path / "own.old-2"


def test_a_directory_that_others_own_or_enter_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    own = tmp_path / "elasticrun"
    own.mkdir(mode=0o750)
    with pytest.raises(sockets.SocketDirectoryError, match="mode 750"):
        list(sockets.connections())
    own.rmdir()
    (tmp_path / "real").mkdir(mode=0o700)
    own.symlink_to(tmp_path / "real")
    with pytest.raises(sockets.SocketDirectoryError), sockets.listening():
        pass


def test_a_status_reads_as_text() -> None:
    status = {
        "job": "train.py",
        "pid": 7,
        "state": "rescaling",
        "replicas": 2,
        "target": 3,
        "generation": 4,
        "position": "epoch 1, loop 0, sample 64 of `train`",
        "num_samples": 1000,
        "samples_per_second": 812.4,
        "checkpoint": 5,
        "seconds_since_checkpoint": 600.0,
        "failed_saves": 2,
        "checkpoint_dir": "/c",
        "restarts": 1,
        "causes": ["generation 3: rank 1 exited with code 4"],
        "members": [
            {"rank": 0, "pid": 8, "memory": 2**30, "cpu": 0.5, "gpu_memory": None},
            {"rank": 1, "pid": 9, "memory": 2**30, "cpu": 0.5, "gpu_memory": 2**31},
        ],
    }
    assert render([status]).splitlines() == [
        "train.py (7): rescaling, 2 replicas (going to 3), generation 4",
        "  position     epoch 1, loop 0, sample 64 of `train` of 1000",
        "  speed        812 samples/s",
        "  checkpoint   5, 10 min ago (2 saves failed), in /c",
        "  restarts     1 after crashes",
        "               generation 3: rank 1 exited with code 4",
        "  rank 0       process 8, 1024 MiB, 50% CPU",
        "  rank 1       process 9, 1024 MiB, 50% CPU, 2048 MiB on the GPU",
    ]
