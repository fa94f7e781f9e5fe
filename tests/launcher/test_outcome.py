"""What the ends on all nodes are together."""

from __future__ import annotations

from elasticrun.launcher.endings import EndKind, Outcome, merged


def crash(text: str, when: float, *, own: bool = True, killed: bool = False) -> Outcome:
    return Outcome(
        EndKind.CRASHED,
        text=text,
        time=when,
        is_own_fault=own,
        is_by_launcher=killed,
    )


def test_it_is_finished_when_it_is_everywhere() -> None:
    done, stopped = (
        Outcome(EndKind.FINISHED),
        Outcome(EndKind.STOPPED, code=75),
    )
    assert merged([done, done], "").kind == EndKind.FINISHED
    assert merged([done, stopped], "") == stopped
    assert merged([done, done], "node 2: gone").kind == EndKind.LEFT


def test_the_first_cause_is_named_wherever_it_was() -> None:
    outcomes = [
        crash("lost a connection", 1.0, own=False),
        crash("later", 3.0),
        crash("first", 2.0),
        crash("killed", 0.5, own=False, killed=True),
    ]
    assert merged(outcomes, "").text == "first"
    assert merged([outcomes[3], outcomes[0]], "").text == "lost a connection"


def test_a_node_that_is_gone_is_no_crash() -> None:
    lost = crash("lost a connection", 1.0, own=False)
    strange = crash("a message nobody knows", 1.0)
    assert merged([lost, strange], "node 1: gone").kind == EndKind.LEFT
    assert merged([lost, Outcome(EndKind.LEFT, text="SIGTERM")], "").text == "SIGTERM"


def test_the_newest_checkpoint_is_known_to_all() -> None:
    outcome = merged(
        [
            Outcome(EndKind.STOPPED, newest=3),
            Outcome(EndKind.STOPPED, newest=5),
        ],
        "",
    )
    assert outcome.newest == 5


def test_why_nothing_was_rescued_is_known_to_all() -> None:
    """The first cause is on one machine, and the survivor that says why on another."""
    survivor = Outcome(EndKind.CRASHED, time=2.0, no_rescue="steps are too short")
    outcome = merged([crash("killed by SIGKILL", 1.0), survivor], "")
    assert outcome.text == "killed by SIGKILL"
    assert outcome.no_rescue == "steps are too short"


def test_what_was_elsewhere_says_so() -> None:
    told = crash("rank 3 exited with code 4", 1.0).encode()
    there = Outcome.decode(told, node="node 1 (b)")
    assert there.text == "on node 1 (b): rank 3 exited with code 4"
    assert not there.is_here
