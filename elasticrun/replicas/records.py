"""What each replica records at its boundaries, for others to read if it dies.

A record is memory without a name (`memfd_create`), which the replicas of one machine
open when the job starts. It stays while one of them has it open, so it outlives a
replica that is killed, and nothing is left when all have ended. Replicas of other
machines have no access to it.

    texts     two, in turn: what a boundary has
    journals  one for each text: what has happened since, line by line
    offer     what this replica can do after another one's death
    cells     bytes that texts and lines name by their numbers, such as generators
    anchors   two, in turn: what the generators were at places of the program

Whatever is written is of no account until one last store of four bytes: of how many
texts or anchors there were, or of where an area ends. So a kill at any moment leaves
all or nothing.
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
from collections.abc import Container
from typing import Any, NamedTuple

import psutil

from elasticrun.replicas.store import JobStore

_TOKEN = slice(0, 16)
_NUMBER, _NUMBER_OF_ANCHORS = 16, 20  # Of the last text, and of the last anchors.
_AREA = 1 << 20
_TEXTS, _JOURNALS, _OFFER = (
    (64, 64 + _AREA),
    (64 + 2 * _AREA, 64 + 3 * _AREA),
    64 + 4 * _AREA,
)
_CELLS = range(64 + 5 * _AREA, 64 + 5 * _AREA + (1 << 18), 1 << 16)
_ANCHORS = (_CELLS.stop, _CELLS.stop + _AREA)
_SIZE = _CELLS.stop + 2 * _AREA  # Pages that are not touched take no memory.
_WORD = 4  # Bytes of a number, and of where an area ends, in front of it.
_MOST = _AREA - _WORD
_FULL = _AREA  # The end of a journal that could not take more.


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
        neighbours: The other ranks on this machine.
        store: At which they tell each other where their records are.
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
        self._number = self._end = 0  # Of texts; of the last one's journal.
        store.put(_key(rank), [os.getpid(), self._descriptor, token.hex()])
        self._others: dict[int, _Other] = {}
        for other in neighbours:
            where = None if other == rank else store.take(_key(other))
            if where is not None and (found := _open(*where)) is not None:
                self._others[other] = found

    @property
    def ranks(self) -> list[int]:
        return sorted([self.rank, *self._others])

    def write(self, text: str) -> None:
        """Record JSON text in place of that before and its journal."""
        data = text.encode()
        if len(data) > _MOST:
            raise RecordTooLargeError(
                f"what this replica has added up takes {len(data)} bytes, more than "
                "1 MiB: keep fewer sums"
            )
        number = self._number + 1
        text_area = _TEXTS[number % 2]  # Of no account until its number is stored.
        data = len(data).to_bytes(_WORD, "little") + data
        self._memory[text_area : text_area + len(data)] = data
        self._store(_JOURNALS[number % 2], 0)
        self._store(_NUMBER, number)
        self._number, self._end = number, 0

    def add(self, line: bytes) -> None:
        """Add a line to the journal of what was written last."""
        journal = _JOURNALS[self._number % 2]
        begin = journal + _WORD + self._end
        self._end += len(line) + 1
        if self._end > _MOST:
            self._end = _FULL
        else:
            self._memory[begin : begin + len(line) + 1] = line + b"\n"
        self._store(journal, self._end)

    def offer(self, data: bytes) -> None:
        """Tell the others, once, what this replica can do."""
        self._fill(_OFFER, data)

    def fill_cell(self, data: bytes, *, but: Container[int]) -> int:
        """Put bytes into a cell; return its number.

        Args:
            but: The numbers of cells whose bytes are still needed.
        """
        number = next(n for n in range(len(_CELLS)) if n not in but)
        self._fill(_CELLS[number], data)
        return number

    def put_anchors(self, data: bytes) -> None:
        """Record anchors in place of those before."""
        number = _load(self._memory, _NUMBER_OF_ANCHORS) + 1
        self._fill(_ANCHORS[number % 2], data)
        self._store(_NUMBER_OF_ANCHORS, number)

    def _fill(self, area: int, data: bytes) -> None:
        room = _CELLS.step if area in _CELLS else _AREA
        if len(data) > room - _WORD:
            raise RecordTooLargeError(f"{len(data)} bytes have no room in a record")
        self._memory[area + _WORD : area + _WORD + len(data)] = data
        self._store(area, len(data))

    def _store(self, place: int, number: int) -> None:
        # Four bytes at a multiple of four: a kill leaves the old ones or the new ones.
        self._memory[place : place + _WORD] = number.to_bytes(_WORD, "little")

    def read(self, rank: int) -> tuple[Any, list[bytes] | None]:
        """Return what a rank has written last, and the lines that it has added since.

        None for what it has not written, and for lines for which there was no room.
        """
        memory = self._memory_of(rank)
        number = -1
        while number != (number := _load(memory, _NUMBER)):  # It lives, and writes on.
            text = _area_of(memory, _TEXTS[number % 2])
            is_full = _load(memory, _JOURNALS[number % 2]) == _FULL
            lines = _area_of(memory, _JOURNALS[number % 2]).splitlines()
        return json.loads(text or b"null"), None if is_full else lines

    def read_offer(self, rank: int) -> bytes:
        """Return what a rank has offered; nothing if it has not."""
        return _area_of(self._memory_of(rank), _OFFER)

    def read_cell(self, rank: int, number: int) -> bytes:
        """Return the bytes that a rank has put into a cell."""
        return _area_of(self._memory_of(rank), _CELLS[number])

    def read_anchors(self, rank: int) -> bytes:
        """Return the anchors that a dead rank has recorded; nothing if it has none."""
        memory = self._memory_of(rank)
        return _area_of(memory, _ANCHORS[_load(memory, _NUMBER_OF_ANCHORS) % 2])

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


def _load(memory: mmap.mmap, place: int) -> int:
    return int.from_bytes(memory[place : place + _WORD], "little")


def _area_of(memory: mmap.mmap, area: int) -> bytes:
    begin = area + _WORD
    return memory[begin : begin + _load(memory, area)]


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
