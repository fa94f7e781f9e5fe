"""The coordinator turns requests into one decision, whatever comes twice or late."""

from __future__ import annotations

import json

import pytest

from elasticrun.replicas.agreement import (
    CHECKPOINT,
    STOP,
    Coordinator,
    Decision,
    GiveUp,
    Request,
    agreed_boundary,
    decode,
    encode,
)


def stop(at: int = 0, cause: str = "SIGTERM", exit_code: int = 143) -> Request:
    return Request(STOP, cause, exit_code, at)


def save(at: int = 0) -> Request:
    return Request(CHECKPOINT, "save_interval", 0, at)


def decide(
    coordinator: Coordinator, request: Request, boundaries: list[int]
) -> Decision | None:
    question = coordinator.on_request(request, now=0.0)
    assert question is not None
    decision = None
    for rank, boundary in enumerate(boundaries):
        assert decision is None
        decision = coordinator.on_answer(question.number, rank, boundary)
    return decision


def test_the_agreed_boundary_is_the_first_that_nobody_can_have_passed() -> None:
    assert agreed_boundary([4, 7, 5]) == 8


def test_a_request_travels_as_json() -> None:
    request = stop(at=3)
    message = json.loads(json.dumps(encode(request)))
    assert message["type"] == "Request"
    assert decode(message) == request


def test_a_request_becomes_a_question_and_the_last_answer_a_decision() -> None:
    coordinator = Coordinator(3, grace=10.0)
    assert decide(coordinator, stop(), [4, 7, 5]) == Decision(8, STOP, "SIGTERM", 143)
    assert coordinator.deadline is None


def test_an_answer_given_twice_counts_once() -> None:
    coordinator = Coordinator(2, grace=10.0)
    question = coordinator.on_request(stop(), now=0.0)
    assert question is not None
    assert coordinator.on_answer(question.number, 1, 4) is None
    assert coordinator.on_answer(question.number, 1, 4) is None
    decision = coordinator.on_answer(question.number, 0, 9)
    assert decision is not None
    assert decision.boundary == 10
    assert coordinator.on_answer(question.number, 0, 9) is None


def test_requests_that_come_while_one_is_open_ask_nothing_more() -> None:
    coordinator = Coordinator(2, grace=10.0)
    assert coordinator.on_request(stop(), now=0.0) is not None
    assert coordinator.on_request(stop(cause="SIGINT", exit_code=130), now=1.0) is None
    assert coordinator.on_request(save(), now=1.0) is None
    assert coordinator.deadline == 10.0
    coordinator.on_answer(1, 0, 0)
    decision = coordinator.on_answer(1, 1, 0)
    assert decision is not None
    assert (decision.kind, decision.exit_code) == (STOP, 143)


def test_a_stop_takes_over_the_agreement_on_a_checkpoint() -> None:
    coordinator = Coordinator(2, grace=10.0)
    assert coordinator.on_request(save(), now=0.0) is not None
    coordinator.on_answer(1, 0, 5)
    assert coordinator.on_request(stop(), now=1.0) is None
    decision = coordinator.on_answer(1, 1, 5)
    assert decision is not None
    assert (decision.kind, decision.exit_code) == (STOP, 143)


def test_after_a_stop_is_decided_nothing_more_is_asked() -> None:
    coordinator = Coordinator(2, grace=10.0)
    decide(coordinator, stop(), [4, 5])
    assert coordinator.on_request(stop(at=100), now=1.0) is None
    assert coordinator.on_request(save(at=100), now=1.0) is None


@pytest.mark.parametrize(("at", "is_served"), [(5, True), (6, False), (7, False)])
def test_a_checkpoint_serves_the_requests_made_before_it(
    at: int, is_served: bool
) -> None:
    coordinator = Coordinator(2, grace=10.0)
    decision = decide(coordinator, save(), [4, 5])
    assert decision is not None
    assert decision.boundary == 6
    assert (coordinator.on_request(save(at=at), now=1.0) is None) is is_served


def test_a_checkpoint_to_come_does_not_serve_a_stop() -> None:
    coordinator = Coordinator(2, grace=10.0)
    decide(coordinator, save(), [4, 5])
    assert coordinator.on_request(stop(at=5), now=1.0) is not None


def test_a_silent_replica_is_named_when_the_grace_is_over() -> None:
    coordinator = Coordinator(4, grace=10.0)
    question = coordinator.on_request(stop(), now=100.0)
    assert question is not None
    coordinator.on_answer(question.number, 0, 5)
    coordinator.on_answer(question.number, 2, 5)
    assert coordinator.on_time(109.9) is None
    assert coordinator.on_time(110.0) == GiveUp(
        STOP, 143, "rank 1, 3 never answered within 10 s of SIGTERM"
    )
    assert coordinator.on_time(200.0) is None


def test_a_death_ends_an_open_agreement_at_once() -> None:
    coordinator = Coordinator(2, grace=10.0)
    assert coordinator.on_death(1) is None
    coordinator.on_request(stop(), now=100.0)
    assert coordinator.on_death(1) == GiveUp(STOP, 143, "rank 1 died after SIGTERM")
    assert coordinator.deadline is None


def test_an_answer_to_a_question_given_up_does_not_count_for_the_next() -> None:
    coordinator = Coordinator(2, grace=10.0)
    first = coordinator.on_request(save(), now=0.0)
    assert first is not None
    coordinator.on_answer(first.number, 0, 5)
    assert coordinator.on_time(10.0) is not None
    assert coordinator.on_answer(first.number, 1, 5) is None
    second = coordinator.on_request(save(), now=20.0)
    assert second is not None
    assert second.number != first.number
    assert coordinator.deadline == 30.0
    coordinator.on_answer(second.number, 0, 8)
    assert coordinator.on_answer(first.number, 1, 3) is None
    decision = coordinator.on_answer(second.number, 1, 9)
    assert decision is not None
    assert decision.boundary == 10


def test_time_alone_decides_nothing() -> None:
    assert Coordinator(2, grace=0.0).on_time(1e9) is None
