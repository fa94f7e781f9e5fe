"""Training goes on while a thread writes what was captured at the boundary."""

from __future__ import annotations

import errno
import io
import os
import threading
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

from elasticrun import (
    ElasticRunError,
    Variables,
    current_job,
    load_state,
    register,
    remaining_epochs_until,
    request_checkpoint,
    request_stop,
    save_all_states,
)
from elasticrun.checkpoint.files import durable
from elasticrun.checkpoint.files.durable import StoreUnreachableError
from elasticrun.checkpoint.storage.local import LocalStorage
from elasticrun.checkpoint.storage.place import UNFORCED_NAME
from elasticrun.errors import CheckpointWarning
from elasticrun.replicas.agreement import Gate
from elasticrun.replicas.environment import Environment
from elasticrun.replicas.watcher import Watcher
from elasticrun.saving.schedule import AutoInterval
from elasticrun.testing import Job, Settings, use_job
from tests.support.generations import JOB, Crash, generation, run_once
from tests.support.held import Held
from tests.support.in_flight import (
    Text,
    batches,
    committed,
    is_writing,
    list_paths,
    loop_with_save_in_flight,
    read_checkpoint,
)
from tests.support.stage import wait_until

# What is saved


def test_what_is_saved_is_what_was_at_the_boundary(tmp_path: Path, held: Held) -> None:
    """Training changes everything in place while the writer is held."""

    def train() -> list[Any]:
        parameter = torch.nn.Parameter(torch.arange(3_000_000.0))  # Some threads copy.
        small = torch.nn.Parameter(torch.zeros(3))
        net = torch.nn.ParameterList([parameter, small])
        optimizer = torch.optim.Adam(net.parameters(), lr=0.5)
        register(net=net, optimizer=optimizer)
        text, best = Text(), Variables(steps=0)
        kept: list[Any] = []

        def now() -> list[Any]:
            moments = optimizer.state[parameter]["exp_avg"].clone()
            position = current_job().progress.position.index
            return [
                *(p.detach().clone() for p in net),
                *(moments, text.text, best.steps, torch.get_rng_state(), position),
            ]

        for _ in (loader := batches(8)):
            if loader.batch_index == 3:
                held.wait_for_writer()
                kept = now()
            if loader.batch_index == 2:
                request_checkpoint()
            (parameter.mean() + small.sum()).backward()
            optimizer.step()
            text.text, best.steps = f"step {loader.batch_index}", loader.batch_index
            torch.rand(7)
            if loader.batch_index == 6:
                assert committed(tmp_path) == []
                held.let_go()
        return kept

    kept = run_once(train, tmp_path)
    assert committed(tmp_path) == [1]
    path = list_paths(tmp_path)[0]
    first, second, moments, text, steps, generator, position = kept
    net = torch.load(path / "net", weights_only=True)
    assert torch.equal(net["0"], first)
    assert torch.equal(net["1"], second)
    state = torch.load(path / "optimizer", weights_only=True)["state"]
    assert torch.equal(state["net.0"]["exp_avg"], moments)
    assert (path / "text").read_text() == text == "step 2"
    assert torch.load(path / "variables", weights_only=True) == {"steps": steps}
    of_ranks = torch.load(path / "random.ranks-0", weights_only=True)
    random = torch.load(io.BytesIO(of_ranks[0]), weights_only=True)
    assert torch.equal(random["torch"], generator)
    assert read_checkpoint(path).manifest.position["index"] == position == 3


def test_files_are_the_same_bytes_as_without(tmp_path: Path) -> None:
    def script() -> None:
        torch.manual_seed(3)
        net = torch.nn.Linear(300, 7000)
        optimizer = torch.optim.Adam(net.parameters())
        register(net=net, optimizer=optimizer)
        Variables(loss=0.5, names=["a", "b"])
        Text("plain")
        for _ in batches(4):
            net(torch.rand(2, 300)).sum().backward()
            optimizer.step()
            request_checkpoint()

    for directory, async_save in (("async", True), ("sync", False)):
        torch.manual_seed(0)
        with generation(tmp_path / directory, keep=10, async_save=async_save):
            current_job()._generators.save = lambda file: file.write(b"the same")  # type: ignore[method-assign]
            script()
    one, other = (
        {
            path.relative_to(tmp_path / name): path.read_bytes()
            for path in (tmp_path / name).glob("checkpoint-*/*")
            if path.name != "manifest.json"
        }
        for name in ("async", "sync")
    )
    assert len(one) == 4 * 6
    assert one == other
    for number in (1, 4):
        manifests = [
            read_checkpoint(tmp_path / name / f"checkpoint-{number:08d}").manifest
            for name in ("async", "sync")
        ]
        assert manifests[0].files == manifests[1].files
        assert manifests[0].position == manifests[1].position


def test_without_it_training_waits_and_no_memory_is_kept(
    tmp_path: Path, held: Held
) -> None:
    def script() -> None:
        for _ in (loader := batches(3)):
            assert committed(tmp_path) == list(range(1, loader.batch_index + 1))
            request_checkpoint()
            assert current_job()._saver._capturer._memory is None  # type: ignore[union-attr]

    run_once(script, tmp_path, async_save=False)
    assert committed(tmp_path) == [1, 2, 3]


def test_a_user_that_writes_in_odd_ways_is_understood(tmp_path: Path) -> None:
    class Odd(Text):
        def save(self, fileobj: BinaryIO) -> None:
            assert fileobj.write(b"") == 0
            assert fileobj.write(torch.zeros(3).numpy()) == 12
            fileobj.writelines([b"ab", bytearray(b"cd"), memoryview(b"ef")])
            fileobj.write(torch.zeros((0, 4)).numpy())
            fileobj.flush()
            assert not hasattr(fileobj, "name")
            with pytest.raises(OSError, match="fileno"):
                fileobj.fileno()
            fileobj.close()

    def script() -> None:
        Odd()
        save_all_states()

    run_once(script, tmp_path)
    assert (list_paths(tmp_path)[0] / "text").read_bytes() == bytes(12) + b"abcdef"


def test_training_goes_on_while_the_disk_works(tmp_path: Path, held: Held) -> None:
    """A boundary does not wait for what a thread writes."""

    def script() -> None:
        for index in loop_with_save_in_flight(held, 1000):
            if index == 999:
                assert committed(tmp_path) == []
                held.let_go()

    run_once(script, tmp_path)
    assert committed(tmp_path) == [1]


# One at a time


def test_the_next_save_waits_for_the_one_in_flight(tmp_path: Path, held: Held) -> None:
    order: list[str] = []

    class Noting(Text):
        def save(self, fileobj: BinaryIO) -> None:
            order.append(f"captured, committed: {committed(tmp_path)}")
            super().save(fileobj)

    def script() -> None:
        Noting()
        for _ in (loader := batches(4)):
            if loader.batch_index in (0, 2):
                request_checkpoint()
            if loader.batch_index == 2:
                held.wait_for_writer()
                assert committed(tmp_path) == []
                helper = held.let_go_when_awaited()
        helper.join()

    run_once(script, tmp_path)
    assert order == ["captured, committed: []", "captured, committed: [1]"]
    assert committed(tmp_path) == [1, 2]


def test_save_all_states_waits_for_both(tmp_path: Path, held: Held) -> None:
    def script() -> None:
        for index in loop_with_save_in_flight(held):
            if index == 2:
                helper = held.let_go_when_awaited()
                path = save_all_states()
                helper.join()
                assert path == tmp_path / "checkpoint-00000002"
                assert committed(tmp_path) == [1, 2]
                assert not is_writing()

    run_once(script, tmp_path)


def test_what_is_due_by_time_is_put_off_until_none_is_in_flight() -> None:
    gate = Gate()
    asked = []

    def is_saving() -> bool:
        asked.append(gate.number)
        return len(asked) < 20

    watcher = Watcher(
        gate,
        rank=0,
        world_size=1,
        links=None,
        grace=60.0,
        save_interval=1e-9,
        describe=lambda: "at the test",
        gone={},
        is_saving=is_saving,
    )
    gate.number = 1
    watcher.start()
    try:
        wait_until(lambda: (watcher._pipe.wake(), gate._due)[1])
    finally:
        watcher.close()
    assert len(asked) >= 20


def test_a_save_by_time_comes_after_the_one_in_flight(
    tmp_path: Path, held: Held
) -> None:
    def script() -> None:
        for _ in batches(10**9):
            if not held._is_there.is_set():
                continue
            if not held._may_go_on.is_set():
                assert current_job()._saver.is_busy  # type: ignore[union-attr]
                held.let_go()
            if len(committed(tmp_path)) == 3:
                raise Crash

    run_once(script, tmp_path, save_interval=0.001)
    assert len(committed(tmp_path)) == 3


def test_the_interval_is_no_shorter_than_a_save_takes() -> None:
    interval = AutoInterval()
    interval.note_cost(0.001)
    assert interval.next_interval() < 100
    interval.note_duration(1000.0)
    assert interval.next_interval() == 1000.0


# Ends


def test_the_end_of_the_epochs_waits_for_its_own(tmp_path: Path, held: Held) -> None:
    def script() -> None:
        for _ in remaining_epochs_until(1):
            for _ in batches(2):
                pass
            helper = held.let_go_when_awaited()
        helper.join()
        assert committed(tmp_path) == [1]  # By the epoch's end, and no second one.

    run_once(script, tmp_path, save_every="epoch")


def test_a_stop_waits_and_saves_its_own(tmp_path: Path, held: Held) -> None:
    helpers: list[threading.Thread] = []

    def script() -> None:
        for index in loop_with_save_in_flight(held, 9):
            if index == 3:
                request_stop()
                helpers.append(held.let_go_when_awaited())

    run_once(script, tmp_path)
    helpers[0].join()
    assert committed(tmp_path) == [1, 2]
    newest = read_checkpoint(list_paths(tmp_path)[0])
    assert newest.manifest.position["index"] == 4


def test_a_stop_goes_without_a_disk_that_hangs(
    tmp_path: Path, held: Held, caplog: pytest.LogCaptureFixture
) -> None:
    def script() -> None:
        for index in loop_with_save_in_flight(held, 9):
            if index == 3:
                request_stop()

    job = Job(settings=Settings.read(checkpoint_dir=tmp_path, grace=0.05))
    with use_job(job), pytest.raises(SystemExit) as stopped:
        script()
    assert stopped.value.code == 75
    assert "stopping without a new checkpoint: the save of checkpoint 1" in caplog.text
    assert "did not end within 0.05 s. The disk may hang" in caplog.text
    held.let_go()
    wait_until(lambda: not is_writing())


@pytest.mark.parametrize("end", ["exception", "return"])
def test_the_end_of_the_program_finishes_what_is_in_flight(
    tmp_path: Path, held: Held, end: str
) -> None:
    def script() -> None:
        for index in loop_with_save_in_flight(held):
            if index == 1:
                helpers.append(held.let_go_when_awaited())
                if end == "exception":
                    raise Crash

    helpers: list[threading.Thread] = []
    run_once(script, tmp_path)
    helpers[0].join()
    assert committed(tmp_path) == [1]
    assert not is_writing()


def test_a_program_that_ends_waits_no_longer_than_its_grace(
    tmp_path: Path, held: Held
) -> None:
    job = Job(settings=Settings.read(checkpoint_dir=tmp_path, grace=0.05))

    def script() -> None:
        for _ in (loader := batches(2)):
            request_checkpoint()
            if loader.batch_index == 1:
                held.wait_for_writer()
                break

    with (
        pytest.raises(ElasticRunError, match="did not end within 0.05 s"),
        use_job(job),
    ):
        script()
    held.let_go()
    wait_until(lambda: not is_writing())


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_fork_has_neither_the_thread_nor_the_memory(
    tmp_path: Path, held: Held
) -> None:
    def script() -> None:
        Text("x" * 5000)
        for index in loop_with_save_in_flight(held):
            if index == 1:
                job = current_job()
                memory = job._saver._capturer._memory  # type: ignore[union-attr]
                assert memory is not None
                chunk = memory._chunks[0]
                assert b"xxx" in bytes(chunk[:100_000])
                child = os.fork()
                if child == 0:
                    job.close()
                    is_alone = threading.active_count() == 1
                    is_wiped = not any(bytes(chunk[:100_000]))
                    os._exit(0 if is_alone and is_wiped else 1)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
                assert b"xxx" in bytes(chunk[:100_000])
                held.let_go()

    run_once(script, tmp_path)
    assert committed(tmp_path) == [1]


# Loading meanwhile


def test_who_registers_in_flight_loads_from_what_it_leaves(
    tmp_path: Path, held: Held
) -> None:
    """With keep=1 the checkpoint before goes while the state is being registered."""

    def first() -> None:
        Text("early", name="late")
        save_all_states()

    def second() -> None:
        for index in loop_with_save_in_flight(held):
            if index == 1:
                assert committed(tmp_path) == [1]
                helper = held.let_go_when_awaited()
                assert Text(name="late").text == "early"
                helper.join()
                assert committed(tmp_path) == [2]

    run_once(first, tmp_path)
    run_once(second, tmp_path, keep=1)


def test_load_state_in_flight_loads_what_is_being_saved(
    tmp_path: Path, held: Held
) -> None:
    def script() -> None:
        text = Text()
        for _ in (loader := batches(3)):
            if loader.batch_index == 0:
                text.text = "at the boundary"
                request_checkpoint()
            if loader.batch_index == 1:
                text.text = "later"
                held.wait_for_writer()
                helper = held.let_go_when_awaited()
                assert load_state(text)
                helper.join()
                assert text.text == "at the boundary"

    run_once(script, tmp_path)


# Settings


@pytest.mark.parametrize(("text", "value"), [("on", True), ("off", False), ("", True)])
def test_the_setting_comes_from_a_variable_too(text: str, value: bool) -> None:
    assert Settings.read({"ELASTICRUN_ASYNC_SAVE": text}).async_save is value


def test_a_malformed_setting_is_named() -> None:
    with pytest.raises(ValueError, match=r"\(ELASTICRUN_ASYNC_SAVE\) is 'no'; give"):
        Settings.read({"ELASTICRUN_ASYNC_SAVE": "no"})


# What is left to successors


def stop_for_successors() -> None:
    current_job().boundary.is_followed = True  # As the launcher says.
    for _ in batches(8):
        request_stop()


def leave(directory: Path) -> Path:
    """Be two generations, of which successors follow each; return the second's mark."""
    run_once(stop_for_successors, directory, keep=1)
    run_once(stop_for_successors, directory, keep=1)
    assert committed(directory) == [1, 2]  # The older one is what a power cut leaves.
    return directory / "checkpoint-00000002" / UNFORCED_NAME


def test_the_first_checkpoint_is_forced_to_the_disk(tmp_path: Path) -> None:
    run_once(stop_for_successors, tmp_path)
    assert committed(tmp_path) == [1]
    assert not (tmp_path / "checkpoint-00000001" / UNFORCED_NAME).exists()


@pytest.mark.parametrize("how", ["trains", "saves", "ends"])
def test_what_was_left_is_forced_to_the_disk(tmp_path: Path, how: str) -> None:
    mark = leave(tmp_path)

    def follow() -> None:
        loader = batches(8)
        assert mark.exists()
        if how == "saves":
            save_all_states()
            assert not mark.exists()
        for _ in loader if how == "trains" else ():
            if loader.batch_index == 2:
                assert mark.exists()  # Not while it has not come so far.
            elif loader.batch_index == 3:
                wait_until(lambda: not mark.exists())

    run_once(follow, tmp_path, keep=1)
    assert not mark.exists()
    assert len(committed(tmp_path)) == 1


def test_a_disk_that_does_not_take_it_is_told_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = leave(tmp_path)

    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def follow() -> None:
        for _ in (loader := batches(8)):
            if loader.batch_index == 2:
                monkeypatch.setattr(os, "fsync", fail)
            if loader.batch_index == 3:
                wait_until(lambda: not is_writing())
                monkeypatch.undo()
                save_all_states()

    with pytest.warns(CheckpointWarning, match="may not survive a power cut"):
        run_once(follow, tmp_path, keep=1)
    assert not mark.exists()  # It has gone: the next one is on the disk.
    assert committed(tmp_path) == [3]


def test_training_looks_for_no_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a look may fail for a moment, and nobody would be there to repeat it."""

    def fail(*_: object) -> bool:
        raise StoreUnreachableError(errno.ESTALE, os.strerror(errno.ESTALE))

    def script() -> int:
        monkeypatch.setattr(LocalStorage, "is_unforced", fail)
        return len([*batches(4)])

    run_once(save_all_states, tmp_path)
    assert run_once(script, tmp_path) == 4


def test_a_disk_that_hangs_over_what_was_left_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, goes_on = leave(tmp_path), threading.Event()
    monkeypatch.setattr(durable, "fsync_file", lambda _: goes_on.wait())
    job = Job(settings=Settings.read({}, job=JOB, checkpoint_dir=tmp_path, grace=0.05))
    text = "checkpoint 2, from which .* forced to the disk within 0.05 s"
    with pytest.raises(ElasticRunError, match=text), use_job(job):
        batches(8)
    assert mark.exists()
    goes_on.set()
    wait_until(lambda: not is_writing())


@pytest.mark.parametrize("is_followed", [True, False])
def test_who_saves_alone_leaves_it_to_successors_that_will_come(
    tmp_path: Path, is_followed: bool
) -> None:
    settings = Settings.read({}, job=JOB, checkpoint_dir=tmp_path)
    with use_job(Job(Environment(is_followed_here=is_followed), settings)) as job:
        assert job._saver is not None
        for number in range(2):  # Behind the first one.
            made = job._saver.save_alone(
                {**job.progress.position.encode(), "finished_epochs": number},
                {"random": {0: b"as they were"}},
                why="test",
                is_owner=True,
                timeout=5.0,
            )
            is_left = (Path(made.path) / UNFORCED_NAME).exists()
            assert is_left is (is_followed and number > 0)
