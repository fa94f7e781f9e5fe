"""Two hosts, as network namespaces, that lose their link and get it back."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from tests.launcher.program import NUM_EPOCHS, NUM_SAMPLES
from tests.launcher.running import HOLDS, running, sizes, wait_until_nothing_is_left
from tests.support.stage import Stage, wait_until

pytestmark = [pytest.mark.slow(40), pytest.mark.wide]

ADDRESSES = ("10.213.77.1", "10.213.77.2")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@dataclass
class Hosts:
    """Two namespaces, each with an end of one cable."""

    names: tuple[str, str]
    ends: tuple[str, str]

    def start(self, number: int) -> tuple[str, ...]:
        """Return what starts a command on one of them."""
        return ("ip", "netns", "exec", self.names[number])

    def cut(self) -> None:
        ip("-n", self.names[1], "link", "set", self.ends[1], "down")

    def mend(self) -> None:
        ip("-n", self.names[1], "link", "set", self.ends[1], "up")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if shutil.which("ip") is None:
        pytest.skip("`ip` is missing (Debian: iproute2), which makes namespaces")
    own = os.getpid()
    names, ends = (f"er-{own}-0", f"er-{own}-1"), (f"er{own}a", f"er{own}b")
    with ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "delete", name)
            ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            for name, end, address in zip(names, ends, ADDRESSES, strict=True):
                ip("link", "set", end, "netns", name)
                ip("-n", name, "address", "add", f"{address}/24", "dev", end)
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", end, "up")
            ip("netns", "exec", names[0], "true")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr}")
        yield Hosts(names, ends)


@pytest.mark.parametrize("where", ["--rdzv-endpoint", "--address"])
def test_a_node_that_loses_its_link_comes_back_with_it(
    stage: Stage, hosts: Hosts, where: str
) -> None:
    """Whether they meet at an endpoint or find each other, as who stays serves."""
    options = ["--nodes", "1:2", "--replicas", 1, "--max-restarts", 0]
    options += ["--save-interval", 0, "--", *HOLDS, "--workers", 1]
    told = [f"{ADDRESSES[0]}:29400"] * 2 if where == "--rdzv-endpoint" else ADDRESSES
    own = [[where, each] for each in told]
    with (
        running(stage, *own[0], *options, name="-0", before=hosts.start(0)) as stays,
        ExitStack() as stack,
    ):
        stays.wait_until_held(0, 1)
        lost = stack.enter_context(
            running(stage, *own[1], *options, name="-1", before=hosts.start(1))
        )
        stays.wait_until_said("another node has come")
        stage.mark("stop-0")
        stays.wait_until_held(1, 2)
        hosts.cut()
        lost.wait_until_said("generation 1 ends: this node lost")
        stays.wait_until_said("generation 1 has lost a node: node 1")
        stays.wait_until_held(2, 1)
        hosts.mend()
        wait_until(lambda: stays.events.count("another node has come: saving") == 2)
        stage.mark("stop-2")
        assert [stays.wait(), lost.wait()] == [0, 0]
        wait_until_nothing_is_left(stage)
    assert sizes(stage) == {0: 1, 1: 2, 2: 1, 3: 2}
    assert "crashed" not in stays.events + lost.events
    for epoch in range(NUM_EPOCHS):
        assert stage.delivered(epoch=epoch) == list(range(NUM_SAMPLES))
