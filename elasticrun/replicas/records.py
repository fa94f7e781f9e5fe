"""What each replica records at its boundaries, for others to read if it dies.

A record is memory without a name (`memfd_create`), which the replicas of one machine
open when the job starts. It stays while one of them has it open, so it outlives a
replica that is killed, and nothing is left when all have ended. Replicas of other
machines have no access to it.

    slots     two, in turn: what a boundary has, as text
    journals  one for each slot: what has happened since, line by line
    cells     bytes that lines and texts name by their numbers, such as generators

Whatever is written is of no account until one last store: of the byte that says which
slot counts, or of where its journal ends. So a kill at any moment leaves all of a thing
or nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import secrets
import select
import socket
import struct
import zlib
from collections.abc import Container, Iterable
from typing import Any, NamedTuple

import psutil

from elasticrun.replicas.store import JobStore

_TOKEN = slice(0, 16)
_CURRENT = 16  # The byte that says which of two slots was written last.
_SLOTS = 64, (1 << 20) + 64
_JOURNALS = (1 << 21) + 64, (1 << 21) + (1 << 20) + 64
_CELLS = range((1 << 22) + 64, (1 << 22) + (1 << 18) + 64, 1 << 16)
_SIZE = _CELLS.stop  # Pages that are not touched take no memory.
_HEADER = struct.Struct("<II")  # Of a slot: the size and the checksum of its text.
_END = struct.Struct("<I")  # Of a journal, and of a cell.
_FULL = (1 << 32) - 1  # The end of a journal that could not take more.
_MOST = (1 << 20) - _HEADER.size


class RecordTooLargeError(ValueError):
    """Raised for what has no room in a record."""


class _Other(NamedTuple):
    memory: mmap.mmap
    descriptor: int
    process: int  # A descriptor that becomes readable when the process ends.
    pid: int


class Records:
    """This replica's record, and those of the others on this machine.

    Args:
        rank: This replica's.
        neighbours: The other ranks on this machine.
        store: At which they tell each other where their records are.

    Raises:
        OSError: This replica may have no such memory, as under a limit of the size of
            files.
    """

    def __init__(self, rank: int, neighbours: range, store: JobStore) -> None:
        self.rank = rank
        self._store_port = store.address.port
        self._descriptor = os.memfd_create("elasticrun-record")
        try:
            os.ftruncate(self._descriptor, _SIZE)
            self._memory = mmap.mmap(self._descriptor, _SIZE)
        except OSError:
            os.close(self._descriptor)
            store.put(_key(rank), None)
            raise
        token = secrets.token_bytes(16)
        self._memory[_TOKEN] = token
        self._next = 1
        self._end = 0  # Of the journal.
        store.put(_key(rank), [os.getpid(), self._descriptor, token.hex()])
        self._others: dict[int, _Other] = {}
        for other in neighbours:
            where = None if other == rank else store.take(_key(other))
            if where is not None and (found := _open(*where)) is not None:
                self._others[other] = found

    @property
    def ranks(self) -> list[int]:
        """The ranks whose records can be read, this one's included."""
        return sorted([self.rank, *self._others])

    def write(self, text: str, journal: Iterable[bytes] = ()) -> None:
        """Record values, as JSON text, in place of those before and their journal.

        A kill at any moment leaves the ones or the others.

        Raises:
            RecordTooLargeError: They take more than 1 MiB.
        """
        data = text.encode()
        if len(data) > _MOST:
            raise RecordTooLargeError(
                f"what this replica has added up takes {len(data)} bytes"
            )
        at = _SLOTS[self._next]
        slot = _HEADER.pack(len(data), zlib.crc32(data)) + data
        self._memory[at : at + len(slot)] = slot
        self._end = 0
        _END.pack_into(self._memory, _JOURNALS[self._next], 0)
        for line in journal:
            self._add(line, _JOURNALS[self._next])
        self._memory[_CURRENT] = self._next
        self._next = 1 - self._next

    def add(self, line: bytes) -> None:
        """Add a line to the journal of what was written last."""
        self._add(line, _JOURNALS[1 - self._next])

    def _add(self, line: bytes, journal: int) -> None:
        at = journal + _END.size + self._end
        self._end += len(line) + 1
        if self._end > _MOST:
            self._end = _FULL
        else:
            self._memory[at : at + len(line) + 1] = line + b"\n"
        _END.pack_into(self._memory, journal, self._end)

    def fill_cell(self, data: bytes, *, but: Container[int]) -> int:
        """Put bytes into a cell; return its number.

        Args:
            but: The numbers of cells whose bytes are still needed.

        Raises:
            RecordTooLargeError: They take more than 64 KiB.
        """
        number = next(n for n in range(len(_CELLS)) if n not in but)
        if len(data) > _CELLS.step - _END.size:
            raise RecordTooLargeError(f"random generators take {len(data)} bytes")
        at = _CELLS[number]
        self._memory[at : at + _END.size + len(data)] = _END.pack(len(data)) + data
        return number

    def read(self, rank: int) -> Any:
        """Return what a rank has recorded last; None if it has recorded nothing."""
        memory = self._memory_of(rank)
        at = _SLOTS[memory[_CURRENT]]
        size, checksum = _HEADER.unpack_from(memory, at)
        at += _HEADER.size
        text = memory[at : at + size]
        return json.loads(text) if size and zlib.crc32(text) == checksum else None

    def read_journal(self, rank: int) -> list[bytes] | None:
        """Return the lines that a rank has added since; None if it had no room."""
        memory = self._memory_of(rank)
        at = _JOURNALS[memory[_CURRENT]]
        (end,) = _END.unpack_from(memory, at)
        at += _END.size
        return None if end == _FULL else memory[at : at + end].splitlines()

    def read_cell(self, rank: int, number: int) -> bytes:
        """Return the bytes that a rank has put into a cell."""
        memory = self._memory_of(rank)
        (size,) = _END.unpack_from(memory, _CELLS[number])
        at = _CELLS[number] + _END.size
        return memory[at : at + size]

    def _memory_of(self, rank: int) -> mmap.mmap:
        return self._memory if rank == self.rank else self._others[rank].memory

    def is_alive(self, rank: int) -> bool:
        """Return whether the process of a rank on this machine still runs."""
        if rank == self.rank:
            return True
        poll = select.poll()
        poll.register(self._others[rank].process, select.POLLIN)
        return not poll.poll(0)

    def break_off(self) -> None:
        """Shut down the connections to the other replicas of this machine.

        But for those to the job's store, at which they may still hear why all end. In a
        collective that has lost a replica, one of the others may wait for this
        one, which lives, and would wait for it. Gloo has nothing to end it with.
        """
        ends = set()
        for other in self._others.values():
            with contextlib.suppress(psutil.Error):  # It has ended.
                ends |= {each.laddr for each in _connections(other.pid)}
        for each in _connections(os.getpid()):
            is_of_store = self._store_port in (each.laddr.port, each.raddr.port)
            if each.raddr in ends and not is_of_store:
                _shut_down(each.fd, each.raddr)

    def claim(self) -> bool:
        """Return whether this replica is the first one on this machine to ask so."""
        first = self.ranks[0]
        own = self._descriptor
        descriptor = own if first == self.rank else self._others[first].descriptor
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Close this replica's descriptors; the others keep theirs."""
        for other in self._others.values():
            other.memory.close()
            os.close(other.descriptor)
            os.close(other.process)
        self._others.clear()
        self._memory.close()
        os.close(self._descriptor)


def _shut_down(descriptor: int, peer: Any) -> None:
    """Shut a connection down, unless the other end was faster and it is gone."""
    with (
        contextlib.suppress(OSError),
        socket.socket(fileno=os.dup(descriptor)) as connection,
    ):
        if connection.getpeername()[:2] == peer:
            connection.shutdown(socket.SHUT_RDWR)


def _connections(pid: int) -> list[Any]:
    process: Any = psutil.Process(pid)
    find = getattr(process, "net_connections", None) or process.connections
    return [each for each in find("tcp") if each.raddr]


def _key(rank: int) -> str:
    return f"record/{rank}"


def _open(pid: int, descriptor: int, token: str) -> _Other | None:
    """Return another replica's record; None if it is not to be had here.

    So it is in a container of its own, where this replica does not see its process, and
    of one that has ended already.
    """
    opened = []
    try:
        opened.append(os.pidfd_open(pid))
        opened.append(os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))
        memory = mmap.mmap(opened[1], _SIZE)
    except (OSError, ValueError):
        memory = None
    if memory is not None and memory[_TOKEN] == bytes.fromhex(token):
        return _Other(memory, opened[1], opened[0], pid)
    for each in opened:
        os.close(each)
    return None
