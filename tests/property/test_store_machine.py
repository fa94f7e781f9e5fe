"""Registry and store over any history of starts, saves, failures and damage."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, ClassVar
from unittest import mock

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from elasticrun.checkpoint.files import durable
from elasticrun.checkpoint.registry import Registry
from elasticrun.checkpoint.states.state import BaseState
from elasticrun.checkpoint.storage.objects import Objects
from elasticrun.checkpoint.store import CheckpointStore
from elasticrun.errors import CheckpointError, CheckpointWarning, StateNameError
from elasticrun.replicas.environment import Environment
from elasticrun.replicas.membership import Membership
from elasticrun.saving.opening import open_checkpoints
from elasticrun.saving.saver import Saver
from tests.support import places

NAMES = st.sampled_from(["a", "b", "c"])
VALUES = st.binary(max_size=20)
ALONE = Membership(Environment(), torch.device("cpu"), None, None, owns_group=False)
Content = dict[str, bytes]


class Value(BaseState):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.value = b"initial"

    def save(self, fileobj: BinaryIO) -> None:
        fileobj.write(self.value)

    def load(self, fileobj: BinaryIO) -> None:
        self.value = fileobj.read()


class Histories(RuleBasedStateMachine):
    """What is on the disk is in `kept`; what the running program knows in the rest.

    Attributes:
        writers: What writes files; those of a group fail together.
        kept: The content of each committed checkpoint, by number.
        damaged: Those whose bytes were changed; True if their sizes were, too.
        newest: What the running program resumed from or saved last.
        bad: Those that the running program found damaged at its start.
    """

    kind = "local"
    writers: ClassVar[list[list[tuple[object, str]]]] = [
        [(durable, "write_file"), (durable, "write_blocks")],
        [(durable, "write_atomically")],
    ]

    def __init__(self) -> None:
        super().__init__()
        parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(dir=parent))
        self.place = places.make_place(self.kind, self.folder)
        self.disk = places.Content(self.place)
        self.kept: dict[int, Content] = {}
        self.damaged: dict[int, bool] = {}
        self.newest: int | None = None
        self.content: Content = {}
        self.bad: set[int] = set()
        self.generation = -1
        self.states: dict[str, Value] = {}
        self.store: CheckpointStore | None = None
        self.keep = 1

    @initialize(keep=st.integers(1, 3))
    def choose(self, keep: int) -> None:
        self.keep = keep

    def teardown(self) -> None:
        self.end()
        shutil.rmtree(self.folder)

    def end(self) -> None:
        if self.store is not None:
            self.store.release()
        self.store, self.states = None, {}

    @property
    def is_running(self) -> bool:
        return self.store is not None

    # The life of a program.

    @precondition(lambda self: not self.is_running)
    @rule(is_async=st.booleans())
    def start(self, is_async: bool) -> None:
        store = CheckpointStore(self.place, job="job", keep=self.keep)
        good = [number for number in self.kept if number not in self.damaged]
        skipped = {n for n in self.kept if not good or n > max(good)}
        if self.kept and not good:
            with pytest.raises(CheckpointError, match="is good"):
                open_checkpoints(store, ALONE)
            for name in self.disk.checkpoints():
                self.disk.remove(name)
            self.kept, self.damaged = {}, {}
            return
        start, told = warned(lambda: open_checkpoints(store, ALONE))
        assert [f"checkpoint-{n:08d}" for n in sorted(skipped, reverse=True)] == [
            text.split()[0] for text in told
        ]
        assert start.generation > self.generation
        assert (start.newest.number if start.newest else None) == max(
            good, default=None
        )
        self.generation = start.generation
        self.newest = max(good, default=None)
        self.content = self.kept[self.newest] if self.newest is not None else {}
        self.bad = skipped
        self.resumed_with = set(self.content)
        self.not_found: set[str] = set()
        self.has_saved = False
        self.store, self.registry = store, Registry(0)
        self.saver = Saver(store, self.registry, ALONE, start, is_async=is_async)

    @precondition(lambda self: self.is_running)
    @rule(leaves_draft=st.booleans())
    def die(self, leaves_draft: bool) -> None:
        assert self.store is not None
        if leaves_draft:
            draft = self.store.begin(self.store.next_number())
            draft.write("a", lambda file: file.write(b"half"))
        self.end()

    @precondition(lambda self: self.is_running)
    @rule(name=NAMES)
    def register(self, name: str) -> None:
        state = Value(name)
        if name in self.states:
            with pytest.raises(StateNameError):
                self.registry.add(state)
            return
        if self.newest in self.damaged and name in self.content:
            return  # Whether the damage is in this file is not known here.
        self.registry.add(state)
        was_there = self.registry.load(state, self.saver.newest)
        assert was_there == (name in self.content)
        assert state.value == self.content.get(name, b"initial")
        self.states[name] = state
        if self.newest is not None and not was_there:
            self.not_found.add(name)

    @precondition(lambda self: self.states)
    @rule(data=st.data(), value=VALUES)
    def change(self, data: st.DataObject, value: bytes) -> None:
        name = data.draw(st.sampled_from(sorted(self.states)))
        self.states[name].value = value

    # Saving.

    @precondition(lambda self: self.is_running)
    @rule(is_awaited=st.booleans())
    def save(self, is_awaited: bool) -> None:
        carried = {n: v for n, v in self.content.items() if n not in self.states}
        if carried and self.newest in self.damaged:
            return
        before = self.saver.newest
        told = self.told_by_save(is_awaited=is_awaited)
        checkpoint = self.saver.newest
        assert checkpoint is not None
        assert checkpoint != before
        assert told == []
        self.content = {n: state.value for n, state in self.states.items()} | carried
        self.newest = checkpoint.number
        self.kept[checkpoint.number] = self.content
        self.forget_old()

    def told_by_save(self, *, is_awaited: bool) -> list[str]:
        """Save; return the warnings, but for the first save's of a renamed state."""
        left = self.resumed_with - set(self.states)
        seems_renamed = bool(left and self.not_found) and not self.has_saved
        self.has_saved = True
        _, told = warned(lambda: self.save_now(is_awaited=is_awaited))
        if seems_renamed:
            assert "Was a state renamed?" in told.pop(0)
        return told

    def save_now(self, *, is_awaited: bool) -> None:
        """Save, in a thread or not; what changes meanwhile is not in the checkpoint."""
        self.saver.save({}, timeout=60, is_awaited=is_awaited)
        values = {name: state.value for name, state in self.states.items()}
        for state in self.states.values():
            state.value = b"changed since"
        self.saver.finish(timeout=60)
        for name, value in values.items():
            self.states[name].value = value

    def forget_old(self) -> None:
        num_good = 0
        for number in sorted(self.kept, reverse=True):
            if num_good < self.keep:
                has_wrong_size = self.damaged.get(number, False)
                num_good += number not in self.bad and not has_wrong_size
            else:
                del self.kept[number]
                self.damaged.pop(number, None)

    @precondition(lambda self: self.states)
    @rule(
        data=st.data(),
        code=st.sampled_from([errno.EIO, errno.ENOSPC]),
        is_awaited=st.booleans(),
    )
    def fail_to_save(self, data: st.DataObject, code: int, is_awaited: bool) -> None:
        writers = data.draw(st.sampled_from(self.writers))

        def fail(*_: Any, **__: Any) -> None:
            raise OSError(code, os.strerror(code))

        before, num_failed = self.saver.newest, self.saver.num_failed
        with ExitStack() as stack:
            for writer in writers:
                stack.enter_context(mock.patch.object(*writer, fail))
            told = self.told_by_save(is_awaited=is_awaited)
        assert self.saver.newest is before
        assert self.saver.num_failed == num_failed + 1
        assert "was not saved" in told[0]

    # The disk.

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), truncates=st.booleans())
    def damage(self, data: st.DataObject, truncates: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.kept)))
        folder = f"checkpoint-{number:08d}"
        names = [f"{folder}/{name}" for name in self.disk.names(folder)]
        name = data.draw(st.sampled_from([n for n in names if self.disk.read(n)]))
        content = bytearray(self.disk.read(name))
        if truncates:
            del content[-1]
        else:
            # Not up to the length, which the time in a manifest decides.
            content[data.draw(st.integers(0, 10_000)) % len(content)] ^= 1
        if number in self.damaged:
            return  # A second change could undo the first.
        self.disk.write(name, bytes(content))
        # A manifest tells its damage whether its size changed or not.
        self.damaged[number] = truncates or name.endswith("/manifest.json")

    @invariant()
    def the_disk_has_what_is_kept(self) -> None:
        for number, content in self.kept.items():
            if number not in self.damaged:
                folder = f"checkpoint-{number:08d}"
                found = {
                    name: self.disk.read(f"{folder}/{name}")
                    for name in self.disk.names(folder)
                }
                found.pop("manifest.json")
                assert found == content
        if self.is_running:
            names = set(self.disk.checkpoints())
            assert names == {f"checkpoint-{number:08d}" for number in self.kept}


def warned(act: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Return what `act` returns, and the warnings about checkpoints that it gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = act()
    return result, [
        str(w.message) for w in caught if issubclass(w.category, CheckpointWarning)
    ]


class RemoteHistories(Histories):
    """The same in an object store, through fsspec."""

    kind = "memory"
    writers: ClassVar[list[list[tuple[object, str]]]] = [
        [(Objects, "put_stream")],
        [(Objects, "put")],
    ]


TestHistories = pytest.mark.slow(Histories.TestCase)
TestRemoteHistories = pytest.mark.slow(RemoteHistories.TestCase)
TestHistories.settings = TestRemoteHistories.settings = settings(
    max_examples=60, stateful_step_count=40
)
