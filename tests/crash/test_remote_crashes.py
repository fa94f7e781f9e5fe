"""An object store that fails, or a job that dies, at any call to the store."""

from __future__ import annotations

import contextlib
import json
import secrets
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from elasticrun.checkpoint.draft import (
    Checkpoint,
    is_committed,
    list_numbers,
    read_checkpoint,
)
from elasticrun.checkpoint.files.durable import StoreUnreachableError
from elasticrun.checkpoint.inspection.listing import find_problems
from elasticrun.checkpoint.registry import Registry
from elasticrun.checkpoint.states.state import BaseState
from elasticrun.checkpoint.storage import remote
from elasticrun.checkpoint.storage.remote import storage_at
from elasticrun.checkpoint.store import CheckpointStore
from elasticrun.errors import CheckpointError, CheckpointWarning
from elasticrun.replicas.environment import Environment
from elasticrun.replicas.membership import Membership
from elasticrun.saving.opening import Start, open_checkpoints
from elasticrun.saving.saver import Saver
from tests.support.generations import Crash
from tests.support.places import Content

ALONE = Membership(Environment(), torch.device("cpu"), None, None, owns_group=False)
LARGE = 10_000


class Unreachable(Exception):
    """As the libraries behind fsspec raise them: no OSError."""


class Failing(MemoryFileSystem):
    """A store in which one call fails, or from one on all do.

    Attributes:
        left: Calls until then; None for never.
        error: What is raised.
        is_lasting: Whether all later calls fail, too.
    """

    protocol = "failing"
    left: ClassVar[int | None] = None
    error: ClassVar[type[BaseException]] = Unreachable
    is_lasting: ClassVar[bool] = False

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return super()._strip_protocol(str(path).removeprefix("failing://"))

    @classmethod
    def count(cls) -> None:
        if cls.left is None:
            return
        cls.left -= 1
        if cls.left == -1 or (cls.is_lasting and cls.left < 0):
            raise cls.error("503 Slow Down")

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self.count()
        return super().ls(path, detail, **options)

    def info(self, path: str, **options: Any) -> Any:
        self.count()
        return super().info(path, **options)

    def cat_file(self, path: str, *limits: Any, **options: Any) -> Any:
        self.count()
        return super().cat_file(path, *limits, **options)

    def pipe_file(self, path: str, value: bytes, *mode: Any, **options: Any) -> None:
        self.count()
        super().pipe_file(path, value, *mode, **options)

    def rm_file(self, path: str) -> None:
        self.count()
        super().rm_file(path)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "data" in options:  # From `pipe_file`.
            return super()._open(path, mode, **options)
        self.count()
        file = super()._open(path, mode, **options)
        if mode == "wb":
            write = file.write

            def write_half(data: Any) -> int:
                with memoryview(data) as view:
                    half = view.nbytes // 2
                    done: int = write(view[:half])
                    self.count()
                    return done + int(write(view[half:]))

            file.write = write_half
        return file


fsspec.register_implementation("failing", Failing, clobber=True)


class Value(BaseState):
    def __init__(self, name: str, value: bytes = b"initial") -> None:
        super().__init__(name)
        self.value = value

    def save(self, fileobj: BinaryIO) -> None:
        # Torch's writer turns an error of the file into another one, of its own.
        torch.save(torch.tensor(list(self.value), dtype=torch.uint8), fileobj)

    def load(self, fileobj: BinaryIO) -> None:
        self.value = bytes(torch.load(fileobj, weights_only=True).tolist())


@pytest.fixture
def url() -> str:
    return f"failing://{secrets.token_hex(8)}/job"


@contextmanager
def failing(
    after: int, error: type[BaseException] = Unreachable, *, is_lasting: bool = False
) -> Iterator[None]:
    """Fail at a call to the store in the block."""
    Failing.left, Failing.error, Failing.is_lasting = after, error, is_lasting
    try:
        yield
    finally:
        Failing.left = None


def num_calls_left() -> int:
    assert Failing.left is not None
    return Failing.left


class Life:
    """One generation of a job with two states, one of which nobody claims."""

    def __init__(self, url: str) -> None:
        self.store = CheckpointStore(url, job="job", keep=2)
        self.start: Start = open_checkpoints(self.store, ALONE)
        self.state = Value("model")
        self.registry = Registry(0)
        self.registry.add(self.state)
        self.registry.load(self.state, self.start.newest)
        self.saver = Saver(self.store, self.registry, ALONE, self.start)

    def save(self, value: bytes) -> bool:
        self.state.value = value
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            return self.saver.save({}, timeout=60) is not None


def value(number: int) -> bytes:
    return bytes([number]) * LARGE


@contextmanager
def living(url: str) -> Iterator[Life]:
    life = Life(url)
    try:
        yield life
    finally:
        life.store.release()


def prepare(url: str) -> None:
    """Leave two checkpoints, with values 1 and 2."""
    with living(url) as life:
        life.registry.add(Value("other", b"carried over"))
        for number in (1, 2):
            assert life.save(value(number))


def read(checkpoint: Checkpoint, name: str) -> bytes:
    state = Value(name)
    with checkpoint.open(name) as file:
        state.load(file)
    return state.value


def let_die(url: str) -> None:
    """Let the newest claim be that of a machine that is gone for long."""
    content = Content(url)
    name = max(each for each in content.names() if each.startswith("claim-"))
    fields = {**json.loads(content.read(name)), "machine": "elsewhere", "time": 0.0}
    content.write(name, json.dumps(fields).encode())


def check_whole(url: str, *possible: bytes) -> None:
    """Check that a start finds one of these values, and that saving goes on."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*is taken over from")
        with living(url) as life:
            assert life.state.value in possible
            assert life.save(value(9))
        with living(url) as life:
            assert life.state.value == value(9)
            assert life.start.newest is not None
            assert read(life.start.newest, "other") == b"carried over"
    folders = Content(url).checkpoints()
    assert len(folders) == 2


def check_committed_are_whole(url: str) -> None:
    storage = storage_at(url)
    for number in list_numbers(storage):
        if is_committed(storage, number):
            assert find_problems(read_checkpoint(storage, number)) == []


@pytest.mark.parametrize("is_lasting", [False, True])
def test_a_save_during_which_the_store_fails_leaves_the_old_one_or_the_new(
    url: str, is_lasting: bool
) -> None:
    prepare(url)
    newest, number, num_failed = value(2), 3, 0
    with living(url) as life:
        for after in range(1000):
            with failing(after, is_lasting=is_lasting):
                is_saved = life.save(value(number))
                has_ended = num_calls_left() >= 0
            if has_ended:
                assert is_saved
                break
            num_failed += not is_saved
            # A manifest whose put was not acknowledged may be there all the same.
            with_it = CheckpointStore(url, job="job").find_newest()
            assert with_it is not None
            newest = read(with_it, "model")
            assert newest in (life.state.value, value(2), value(number))
            number = number % 100 + 3
    assert num_failed > 5
    check_whole(url, life.state.value)


@pytest.mark.slow(9)
def test_a_job_that_dies_at_any_call_leaves_the_old_one_or_the_new(url: str) -> None:
    num_old = num_new = 0
    for after in range(1000):
        place = f"{url}-{after}"
        prepare(place)
        life = Life(place)
        with failing(after, Crash, is_lasting=True):
            with contextlib.suppress(Crash):
                life.save(value(3))
            has_ended = num_calls_left() >= 0
        found = CheckpointStore(place, job="job").find_newest()
        assert found is not None
        num_old += found.number == 2
        num_new += found.number == 3
        check_committed_are_whole(place)
        let_die(place)
        check_whole(place, value(2), value(3))
        life.store.release()
        if has_ended:
            break
    assert num_old > 5
    assert num_new > 1


@pytest.mark.parametrize("is_lasting", [False, True])
def test_a_start_at_which_the_store_fails_begins_with_the_newest_or_not_at_all(
    url: str, is_lasting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_LIST_SECONDS", 0.0)
    prepare(url)
    num_refused, generation = 0, 0
    for after in range(1000):
        store = CheckpointStore(url, job="job", keep=2)
        with failing(after, is_lasting=is_lasting), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*is taken over from")
            try:
                start = open_checkpoints(store, ALONE)
            except CheckpointError as error:
                refusal: Exception | None = error
            else:
                refusal = None
            has_ended = num_calls_left() >= 0
        if refusal is None:
            assert start.newest is not None
            assert start.newest.number == 2
            assert start.generation > generation
            generation = start.generation
            store.release()
        else:
            num_refused += 1
            assert "503 Slow Down" in str(refusal)
            let_die(url)
        if has_ended:
            break
    assert refusal is None
    assert num_refused > 5


def test_a_list_that_does_not_show_what_was_written_is_not_believed(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_LIST_SECONDS", 0.0)
    prepare(url)
    store = CheckpointStore(url, job="job")
    store.acquire(timeout=0)
    with monkeypatch.context() as patch:
        patch.setattr(Failing, "ls", lambda *_, **__: [])
        with pytest.raises(StoreUnreachableError, match="does not show claim-00000002"):
            store.find_newest()
    assert store.find_newest() is not None
    store.release()


def test_numbers_that_a_lost_job_may_still_write_are_left_to_it(url: str) -> None:
    prepare(url)
    lost = Life(url)
    draft = lost.store.begin(lost.store.next_number())
    let_die(url)
    with pytest.warns(CheckpointWarning, match="is taken over from"):
        life = Life(url)
    assert life.start.number == 4
    late = draft.write("model", lambda file: file.write(b"late"))
    assert life.save(value(4))
    with pytest.raises(CheckpointError, match="another job has taken over failing://"):
        draft.commit(
            type(life.start.newest.manifest)(  # type: ignore[union-attr]
                **{**vars(life.start.newest.manifest), "number": 3, "files": (late,)}  # type: ignore[union-attr]
            )
        )
    life.store.release()
    lost.store.release()
    with living(url) as life:
        assert life.state.value == value(4)


def test_a_job_that_was_taken_over_stops_at_its_next_save(url: str) -> None:
    prepare(url)
    lost = Life(url)
    let_die(url)
    with pytest.warns(CheckpointWarning, match="is taken over from"):
        life = Life(url)
    with pytest.raises(CheckpointError, match="another job has taken over"):
        lost.save(value(3))
    assert life.save(value(4))
    lost.store.release()
    life.store.release()
    with living(url) as life:
        assert life.state.value == value(4)
