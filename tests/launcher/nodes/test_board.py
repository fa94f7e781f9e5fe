"""The board of one round, and the lobby before it."""

from __future__ import annotations

from torch.distributed import TCPStore

from elasticrun.launcher.nodes.board import Board, Lobby


def wait_until_pinned(boards: list[Board]) -> None:
    """Have the store answer each of them: it does so in order, and not to a `set`."""
    for board in boards:
        board.read(0)


def test_a_board_shows_what_is_pinned_and_nothing_else() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    boards = [
        Board(
            TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False),
            token=token,
            node=node,
            num_nodes=2,
        )
        for token, node in (("a", 0), ("a", 1), ("b", 1))
    ]
    assert boards[0].read(0) == {}
    boards[1].pin(0, {"offer": 1})
    boards[1].pin(1, {"offer": 2})
    boards[2].pin(2, {"offer": 3})
    wait_until_pinned(boards)
    assert [boards[0].read(turn) for turn in range(3)] == [
        {1: {"offer": 1}},
        {1: {"offer": 2}},
        {},
    ]
    boards[1].pin(0, {"offer": 4})
    wait_until_pinned(boards)
    assert boards[0].read(0) == {1: {"offer": 4}}
    assert boards[0].beat() == boards[1].beat() == []
    assert boards[0].num_staying([]) == 1
    assert boards[0].num_staying([1]) == 0
    boards[1].say_goodbye()
    wait_until_pinned(boards)
    assert boards[0].num_staying([]) == 0


def test_a_lobby_counts_who_is_prepared_for_a_call_of_its_job() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    lobby, other = Lobby(store, "train"), Lobby(store, "other")
    assert (lobby.called, lobby.count("prepared", "a/0")) == ("", 0)
    lobby.call("a/0")
    assert (lobby.called, other.called) == ("a/0", "")
    for _ in range(2):
        lobby.note("called", "a/0")
        assert lobby.count("called", "a/0") > lobby.count("prepared", "a/0")
        lobby.note("prepared", "a/0")
    assert [lobby.count("prepared", turn) for turn in ("a/0", "a/1")] == [2, 0]
    assert other.count("prepared", "a/0") == 0
    lobby.call("")
    assert lobby.called == ""
