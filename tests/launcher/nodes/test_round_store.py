"""The store of one round."""

from __future__ import annotations

from torch.distributed import TCPStore

from elasticrun.launcher.nodes.rendezvous import RoundStore


def wait_until_noted(stores: list[RoundStore]) -> None:
    """Have the store answer each of them: it does so in order, and not to a `set`."""
    for store in stores:
        store.read(0)


def test_a_store_shows_what_is_noted_and_nothing_else() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [
        RoundStore(
            TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False),
            token=token,
            node=node,
            num_nodes=2,
        )
        for token, node in (("a", 0), ("a", 1), ("b", 1))
    ]
    assert stores[0].read(0) == {}
    stores[1].put_note(0, {"offer": 1})
    stores[1].put_note(1, {"offer": 2})
    stores[2].put_note(2, {"offer": 3})
    wait_until_noted(stores)
    assert [stores[0].read(number) for number in range(3)] == [
        {1: {"offer": 1}},
        {1: {"offer": 2}},
        {},
    ]
    stores[1].put_note(0, {"offer": 4})
    wait_until_noted(stores)
    assert stores[0].read(0) == {1: {"offer": 4}}
    assert stores[0].beat() == stores[1].beat() == []
    assert stores[0].staying([]) == {1}
    assert stores[0].staying([1]) == set()
    stores[1].say_goodbye()
    wait_until_noted(stores)
    assert stores[0].staying([]) == set()
