"""What a node makes of what the others have noted."""

from __future__ import annotations

import pytest

from elasticrun.launcher.endings import EndKind, Outcome
from elasticrun.launcher.nodes.nodes import (
    END,
    JOIN,
    LEAVE,
    REASONS,
    SCALE,
    Attempt,
    Offer,
)

OFFERS = [Offer(1, (10, 11), 0), Offer(3, (30, 31), 0)]


def told(
    *,
    silent: tuple[int, ...] = (),
    waiting: int = 0,
    **notes: object,
) -> dict:
    noted = {name.removeprefix("node"): note for name, note in notes.items()}
    return {
        "notes": noted,
        "silent": list(silent),
        "num_waiting": waiting,
    }


def one_of_two() -> Attempt:
    attempt = Attempt(0, node=0, num_nodes=2, hosts={})
    attempt.own["offer"] = OFFERS[0].encode()
    return attempt


def test_it_is_agreed_once_all_have_offered() -> None:
    attempt = one_of_two()
    attempt.read(told())
    assert not attempt.is_agreed
    assert not attempt.is_refused
    attempt.read(told(node1={"offer": OFFERS[1].encode(), "host": "b"}))
    assert attempt.is_agreed
    assert attempt.offers == OFFERS
    assert attempt.label(1) == "node 1 (b)"


def test_one_that_meets_anew_or_is_silent_refuses() -> None:
    for refused in (told(node1={"rejoins": True}), told(silent=(1,))):
        attempt = one_of_two()
        attempt.read(refused)
        assert attempt.is_refused
        assert not attempt.is_agreed


def test_a_stop_request_is_heard_once_and_gives_way_to_a_stronger_one() -> None:
    attempt = one_of_two()
    heard = told(node1={"stop": {"kind": SCALE, "cause": "more"}})
    for expected in ([(SCALE, "node 1: more")], []):
        attempt.read(heard)
        assert list(attempt.new_stop_requests(*REASONS)) == expected
    attempt.request_stop(LEAVE, "SIGTERM")
    attempt.request_stop(JOIN, "another node has come")
    assert attempt.own["stop"]["kind"] == LEAVE
    attempt.request_stop(END, "the stop command")
    assert attempt.own["stop"]["kind"] == END


@pytest.mark.parametrize(
    ("heard", "changes"),
    [
        (
            told(node1={"ending": Outcome(EndKind.STOPPED).encode()}),
            False,
        ),
        (
            told(node1={"ending": Outcome(EndKind.LEFT).encode()}),
            True,
        ),
        (told(node1={"stop": {"kind": SCALE, "cause": ""}}), False),
        (told(node1={"stop": {"kind": JOIN, "cause": ""}}), True),
        (told(waiting=1), True),
        (told(silent=(1,)), True),
    ],
)
def test_members_stay_together_unless_they_change(heard: dict, changes: bool) -> None:
    attempt = one_of_two()
    attempt.read(heard)
    assert attempt.changes_members is changes
