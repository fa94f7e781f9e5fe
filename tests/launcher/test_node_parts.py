"""What decides between nodes: options, addresses, shares, wishes, verdicts."""

from __future__ import annotations

import inspect
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from importlib import import_module

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import TCPStore

from elasticrun.launcher import endpoint
from elasticrun.launcher.board import Board
from elasticrun.launcher.crashes import CrashBook
from elasticrun.launcher.nodes import END, JOIN, LEAVE, SCALE, WISHES, Offer, plan_round
from elasticrun.launcher.options import OptionError, parse_nodes
from elasticrun.launcher.outcomes import (
    CRASHED,
    FINISHED,
    LEFT,
    STOPPED,
    Outcome,
    merged,
)
from elasticrun.launcher.turn import Turn
from tests.launcher.running import elasticrun
from tests.support.stage import Stage


class TestOptions:
    def test_a_number_or_a_range_and_where_they_meet(self) -> None:
        assert parse_nodes(None, None) is None
        for text, least, most in (("3", 3, 3), ("2:4", 2, 4)):
            settings = parse_nodes(text, "host-1.example:4000")
            assert settings is not None
            assert (settings.least, settings.most) == (least, most)
            assert settings.endpoint == "host-1.example:4000"
        for text, host, port in (
            ("10.0.0.1", "10.0.0.1", 29400),
            ("[fe80::1]:5", "fe80::1", 5),
            ("[fe80::1]", "fe80::1", 29400),
        ):
            settings = parse_nodes("2", text)
            assert settings is not None
            assert (settings.host, settings.port) == (host, port)

    @pytest.mark.parametrize(
        ("nodes", "where", "text"),
        [
            ("0", "host:1", "--nodes 0"),
            ("3:2", "host:1", "--nodes 3:2"),
            ("2", None, "--rdzv-endpoint"),
            (None, "host:1", "one makes no sense without the other"),
            ("2", "host:port", "give HOST:PORT"),
            ("2", "host:65536", "ports go from 1 to 65535"),
            ("2", ":29400", "give HOST:PORT"),
        ],
    )
    def test_nonsense_is_refused(
        self, nodes: str | None, where: str | None, text: str
    ) -> None:
        with pytest.raises(OptionError, match=re.escape(text)):
            parse_nodes(nodes, where)

    def test_a_fresh_start_of_many_is_refused(self, stage: Stage) -> None:
        options = ["--nodes", "2", "--rdzv-endpoint", "127.0.0.1:1", "--fresh"]
        script = stage.root / "script.py"
        script.touch()
        refused = elasticrun(stage, "run", *options, script)
        assert refused.returncode == 2
        assert "would move aside what another has begun" in refused.stderr


class TestEndpoint:
    def test_whoever_comes_first_serves_it(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            assert endpoint.listen("127.0.0.1", port) is None
        first = endpoint.listen("localhost", port)
        assert first is not None
        with first:
            assert first.getsockname()[0] == "127.0.0.1"

    def test_the_address_of_another_machine_is_not_served(self) -> None:
        assert endpoint.listen("192.0.2.1", 4000) is None

    def test_loopback_stays_on_loopback(self) -> None:
        own = endpoint.own_address("localhost", 4000)
        assert own == endpoint.OwnAddress("127.0.0.1", "127.0.0.1", "lo")

    def test_a_name_for_loopback_is_told_as_a_name(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = socket.getaddrinfo("127.0.1.1", 4000, type=socket.SOCK_STREAM)
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        own = endpoint.own_address("head", 4000)
        assert own == endpoint.OwnAddress("head", "0.0.0.0", "")


def offer(share: int, number: int = 0, **more: object) -> Offer:
    return replace(Offer(share, (10 * share, 10 * share + 1), number), **more)


class TestRounds:
    @given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    def test_every_rank_is_on_one_node(self, shares: list[int]) -> None:
        offers = [offer(share) for share in shares]
        addresses = [f"10.0.0.{node}" for node in range(len(shares))]
        rounds = [
            plan_round(offers, node, addresses=addresses, interface="eth0")
            for node in range(len(shares))
        ]
        ranks = [range(each.offset, each.offset + each.share) for each in rounds]
        assert [rank for each in ranks for rank in each] == list(range(sum(shares)))
        assert len({(r.number, r.size, r.address, r.port) for r in rounds}) == 1

    def test_one_node_meets_on_loopback_and_two_do_not(self) -> None:
        alone = plan_round([offer(2)], 0, addresses=["10.0.0.1"], interface="eth0")
        assert (alone.address, alone.port, alone.interface) == ("127.0.0.1", 20, "")
        both = plan_round(
            [offer(2), offer(3)], 1, addresses=["10.0.0.1", "10.0.0.2"], interface="e"
        )
        assert (both.address, both.port, both.interface) == ("10.0.0.1", 21, "e")

    def test_all_know_what_one_knows(self) -> None:
        offers = [
            offer(1, 4, newest_at_crash=7, num_used=1),
            offer(1, 6, has_trained=True, newest_at_crash=7, num_used=2),
            offer(1, 0, newest_at_crash=3, num_used=3),
        ]
        known = plan_round(offers, 2, addresses=["a", "b", "c"], interface="")
        assert (known.number, known.has_trained) == (6, True)
        assert (known.newest_at_crash, known.num_used) == (7, 2)


def crash(text: str, when: float, *, own: bool = True, killed: bool = False) -> Outcome:
    return Outcome(
        CRASHED, text=text, time=when, is_own_fault=own, is_by_launcher=killed
    )


class TestVerdicts:
    def test_it_is_finished_when_it_is_everywhere(self) -> None:
        done, stopped = Outcome(FINISHED), Outcome(STOPPED, code=75)
        assert merged([done, done], "").kind == FINISHED
        assert merged([done, stopped], "") == stopped
        assert merged([done, done], "node 2: gone").kind == LEFT

    def test_the_first_cause_is_named_wherever_it_was(self) -> None:
        outcomes = [
            crash("lost a connection", 1.0, own=False),
            crash("later", 3.0),
            crash("first", 2.0),
            crash("killed", 0.5, own=False, killed=True),
        ]
        assert merged(outcomes, "").text == "first"
        assert merged([outcomes[3], outcomes[0]], "").text == "lost a connection"

    def test_a_node_that_is_gone_is_no_crash(self) -> None:
        lost = crash("lost a connection", 1.0, own=False)
        strange = crash("a message nobody knows", 1.0)
        assert merged([lost, strange], "node 1: gone").kind == LEFT
        assert merged([lost, Outcome(LEFT, text="SIGTERM")], "").text == "SIGTERM"

    def test_the_newest_checkpoint_is_known_to_all(self) -> None:
        outcome = merged([Outcome(STOPPED, newest=3), Outcome(STOPPED, newest=5)], "")
        assert outcome.newest == 5

    def test_what_was_elsewhere_says_so(self) -> None:
        told = crash("rank 3 exited with code 4", 1.0).encode()
        there = Outcome.decode(told, node="node 1 (b)")
        assert there.text == "on node 1 (b): rank 3 exited with code 4"
        assert not there.is_here

    def test_a_newcomer_that_fails_at_once_fails_alone(self) -> None:
        veteran = CrashBook(3, newest_at_start=0)
        veteran.has_trained = True
        newcomer = CrashBook(3, newest_at_start=0)
        offers = [offer(1, has_trained=True), offer(1)]
        for node, book in enumerate((veteran, newcomer)):
            book.adopt(plan_round(offers, node, addresses=["a", "b"], interface=""))
        here = crash("no module named x", 1.0)
        assert veteran.decide(replace(here, is_here=False), 3)[0] == 0
        assert newcomer.decide(here, 3)[0] is None
        assert newcomer.decide(replace(here, is_here=False), 3)[0] == 0


def board(*, silent: tuple[int, ...] = (), waiting: int = 0, **notes: object) -> dict:
    pinned = {name.removeprefix("node"): note for name, note in notes.items()}
    return {"notes": pinned, "silent": list(silent), "num_waiting": waiting}


class TestTurns:
    def turn(self) -> Turn:
        turn = Turn(0, node=0, num_nodes=2, hosts={})
        turn.own["offer"] = offer(1).encode()
        return turn

    def test_it_is_agreed_once_all_have_offered(self) -> None:
        turn = self.turn()
        turn.read(board())
        assert not turn.is_agreed
        assert not turn.is_refused
        turn.read(board(node1={"offer": offer(3).encode(), "host": "b"}))
        assert turn.is_agreed
        assert turn.offers == [offer(1), offer(3)]
        assert turn.label(1) == "node 1 (b)"

    def test_one_that_meets_anew_or_is_silent_refuses(self) -> None:
        for refused in (board(node1={"rejoins": True}), board(silent=(1,))):
            turn = self.turn()
            turn.read(refused)
            assert turn.is_refused
            assert not turn.is_agreed

    def test_a_wish_is_heard_once_and_gives_way_to_a_stronger_one(self) -> None:
        turn = self.turn()
        told = board(node1={"wish": {"kind": SCALE, "cause": "more"}})
        for expected in ([(SCALE, "node 1: more")], []):
            turn.read(told)
            assert list(turn.new_wishes(*WISHES)) == expected
        turn.wish(LEAVE, "SIGTERM")
        turn.wish(JOIN, "another node has come")
        assert turn.own["wish"]["kind"] == LEAVE
        turn.wish(END, "the stop command")
        assert turn.own["wish"]["kind"] == END

    @pytest.mark.parametrize(
        ("told", "changes"),
        [
            (board(node1={"ending": Outcome(STOPPED).encode()}), False),
            (board(node1={"ending": Outcome(LEFT).encode()}), True),
            (board(node1={"wish": {"kind": SCALE, "cause": ""}}), False),
            (board(node1={"wish": {"kind": JOIN, "cause": ""}}), True),
            (board(waiting=1), True),
            (board(silent=(1,)), True),
        ],
    )
    def test_members_stay_together_unless_they_change(
        self, told: dict, changes: bool
    ) -> None:
        turn = self.turn()
        turn.read(told)
        assert turn.changes_members is changes


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


def test_torch_still_has_what_a_polite_leave_needs() -> None:
    """No public names; without them the others wait for the heartbeats to stop."""
    dynamic = import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    assert callable(dynamic._RendezvousExitOp())
    assert callable(dynamic.DynamicRendezvousHandler._stop_heartbeats)
    source = inspect.getsource(dynamic.DynamicRendezvousHandler.next_rendezvous)
    assert "self._op_executor.run(exit_op, deadline)" in source


@pytest.mark.slow
def test_a_clock_that_goes_wrong_is_named(stage: Stage) -> None:
    script = stage.root / "script.py"
    script.touch()
    server = TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
    )
    where = f"127.0.0.1:{server.port}"
    options = ["--replicas", 1, "--nodes", "2", "--rdzv-endpoint", where]
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(elasticrun, stage, "run", *options, script)
        while not running.done():
            server.set("elasticrun/clock", str(time.time() - 60))
            time.sleep(0.02)
        ended = running.result()
    assert ended.returncode == 1
    assert "the clock of this machine differs by" in ended.stderr
