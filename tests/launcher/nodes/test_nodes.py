"""What all nodes start, from what each of them offers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elasticrun.launcher.nodes.nodes import (
    plan_round,
)
from tests.launcher.offers import offer


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_every_rank_is_on_one_node(shares: list[int]) -> None:
    offers = [offer(share) for share in shares]
    addresses = [f"10.0.0.{node}" for node in range(len(shares))]
    rounds = [
        plan_round(offers, node, addresses=addresses, interface="eth0")
        for node in range(len(shares))
    ]
    ranks = [range(each.offset, each.offset + each.share) for each in rounds]
    assert [rank for each in ranks for rank in each] == list(range(sum(shares)))
    assert len({(r.number, r.size, r.address, r.port) for r in rounds}) == 1


def test_one_node_meets_on_loopback_and_two_do_not() -> None:
    alone = plan_round([offer(2)], 0, addresses=["10.0.0.1"], interface="eth0")
    assert (alone.address, alone.port, alone.interface) == ("127.0.0.1", 20, "")
    both = plan_round(
        [offer(2), offer(3)], 1, addresses=["10.0.0.1", "10.0.0.2"], interface="e"
    )
    assert (both.address, both.port, both.interface) == ("10.0.0.1", 21, "e")


def test_all_know_what_one_knows() -> None:
    offers = [
        offer(1, 4, newest_at_crash=7, num_used=1),
        offer(1, 6, has_trained=True, newest_at_crash=7, num_used=2),
        offer(1, 0, newest_at_crash=3, num_used=3),
    ]
    known = plan_round(offers, 2, addresses=["a", "b", "c"], interface="")
    assert (known.number, known.has_trained) == (6, True)
    assert (known.newest_at_crash, known.num_used) == (7, 2)
