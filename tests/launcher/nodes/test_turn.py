"""What a node makes of what is pinned to the board."""

from __future__ import annotations

import pytest

from elasticrun.launcher.nodes.nodes import (
    END,
    JOIN,
    LEAVE,
    SCALE,
    WISHES,
    Offer,
)
from elasticrun.launcher.nodes.turn import Turn
from elasticrun.launcher.verdict import How, Verdict

OFFERS = [Offer(1, (10, 11), 0), Offer(3, (30, 31), 0)]


def board(
    *,
    silent: tuple[int, ...] = (),
    waiting: int = 0,
    called: int = 0,
    prepared: int = 0,
    **notes: object,
) -> dict:
    pinned = {name.removeprefix("node"): note for name, note in notes.items()}
    return {
        "notes": pinned,
        "silent": list(silent),
        "num_waiting": waiting,
        "num_called": called,
        "num_prepared": prepared,
    }


def one_of_two() -> Turn:
    turn = Turn(0, node=0, num_nodes=2, hosts={})
    turn.own["offer"] = OFFERS[0].encode()
    return turn


def test_it_is_agreed_once_all_have_offered() -> None:
    turn = one_of_two()
    turn.read(board())
    assert not turn.is_agreed
    assert not turn.is_refused
    turn.read(board(node1={"offer": OFFERS[1].encode(), "host": "b"}))
    assert turn.is_agreed
    assert turn.offers == OFFERS
    assert turn.label(1) == "node 1 (b)"


def test_one_that_meets_anew_or_is_silent_refuses() -> None:
    for refused in (board(node1={"rejoins": True}), board(silent=(1,))):
        turn = one_of_two()
        turn.read(refused)
        assert turn.is_refused
        assert not turn.is_agreed


def test_a_wish_is_heard_once_and_gives_way_to_a_stronger_one() -> None:
    turn = one_of_two()
    told = board(node1={"wish": {"kind": SCALE, "cause": "more"}})
    for expected in ([(SCALE, "node 1: more")], []):
        turn.read(told)
        assert list(turn.new_wishes(*WISHES)) == expected
    turn.wish(LEAVE, "SIGTERM")
    turn.wish(JOIN, "another node has come")
    assert turn.own["wish"]["kind"] == LEAVE
    turn.wish(END, "the stop command")
    assert turn.own["wish"]["kind"] == END


def test_the_strongest_call_is_told_until_it_is_taken_back() -> None:
    turn = one_of_two()
    assert turn.called is None
    turn.read(board(node1={"calls": {SCALE: "more"}}))
    assert turn.called == (SCALE, "node 1: more")
    turn.call(JOIN, "another node has come")
    assert turn.called == (JOIN, "another node has come")
    assert turn.call_off(JOIN)
    assert not turn.call_off(JOIN)
    turn.read(board(node1={"calls": {}}))
    assert turn.called is None


@pytest.mark.parametrize(
    ("own", "other", "waiting", "prepared", "are_all"),
    [
        (True, True, 0, 0, True),
        (True, True, 1, 1, True),
        (True, True, 2, 1, False),
        (False, True, 0, 0, False),
        (True, False, 1, 1, False),
        (True, None, 0, 0, False),
    ],
)
def test_all_are_prepared_once_each_node_and_each_guest_is(
    own: bool, other: bool | None, waiting: int, prepared: int, are_all: bool
) -> None:
    turn = one_of_two()
    turn.own["is_prepared"] = own
    note = {} if other is None else {"is_prepared": other}
    turn.read(board(node1=note, waiting=waiting, prepared=prepared))
    assert turn.is_prepared is are_all


def test_a_guest_that_prepares_counts_before_the_rendezvous_knows_of_it() -> None:
    turn = one_of_two()
    turn.own["is_prepared"] = True
    note = {"is_prepared": True}
    turn.read(board(node1=note, waiting=1, called=2, prepared=1))
    assert not turn.is_prepared
    turn.read(board(node1=note, waiting=1, called=2, prepared=2))
    assert turn.is_prepared


@pytest.mark.parametrize(
    ("told", "changes"),
    [
        (
            board(node1={"ending": Verdict(How.STOPPED).encode()}),
            False,
        ),
        (
            board(node1={"ending": Verdict(How.LEFT).encode()}),
            True,
        ),
        (board(node1={"wish": {"kind": SCALE, "cause": ""}}), False),
        (board(node1={"wish": {"kind": JOIN, "cause": ""}}), True),
        (board(waiting=1), True),
        (board(silent=(1,)), True),
    ],
)
def test_members_stay_together_unless_they_change(told: dict, changes: bool) -> None:
    turn = one_of_two()
    turn.read(told)
    assert turn.changes_members is changes
