"""Meeting the other replicas: opening the store of a generation, wherever it stands."""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from elasticrun.control.store import START_TIMEOUT, Address, JobStore
from elasticrun.env import Environment
from elasticrun.errors import AgreementError


def open_store(environment: Environment) -> JobStore:
    """Return the store of this generation, which rank 0 serves. Collective.

    Its address travels through the process group if the user has made one, else through
    the agent's store (torchrun); without an agent the store stands at MASTER_ADDR and
    MASTER_PORT itself. It listens on loopback when all replicas are on one machine.
    """
    if dist.is_initialized():
        return _open_through_group(environment)
    if environment.master_address is None or environment.master_port is None:
        raise ValueError(
            f"WORLD_SIZE is {environment.world_size}, but MASTER_ADDR or MASTER_PORT "
            "is not set, so the replicas cannot find each other. Start the script with "
            "torchrun, or set both."
        )
    if environment.has_agent_store:
        return _open_through_agent(environment)
    address = Address(environment.master_address, environment.master_port)
    server = _serve(address.host, address.port)[0] if environment.rank == 0 else None
    return JobStore(address, server)


def _serve(host: str, port: int) -> tuple[TCPStore, int]:
    listener = socket.create_server((host, port), backlog=1024)
    port = listener.getsockname()[1]
    server = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return server, port


def _serve_anew(environment: Environment) -> JobStore:
    host = reachable = "127.0.0.1"
    if environment.local_world_size < environment.world_size:
        host = reachable = _outgoing_host(environment)
        # A name for this machine may stand for another address elsewhere.
        if host.startswith("127.") and environment.master_address != host:
            host, reachable = "0.0.0.0", environment.master_address or host
    server, port = _serve(host, 0)
    return JobStore(Address(reachable, port), server, interface=host)


def _outgoing_host(environment: Environment) -> str:
    """Return this machine's address on the way to the master; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((environment.master_address or "127.0.0.1", 1))
        return str(probe.getsockname()[0])


def _open_through_group(environment: Environment) -> JobStore:
    store, text = None, b""
    if environment.rank == 0:
        store = _serve_anew(environment)
        text = str(store.address).encode()
    is_nccl = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if is_nccl else None
    buffer = torch.zeros(256, dtype=torch.uint8, device=device)
    buffer[: len(text)] = torch.tensor(list(text), dtype=torch.uint8, device=device)
    dist.broadcast(buffer, src=0)
    received = bytes(buffer.cpu().tolist()).rstrip(b"\0").decode()
    return store or JobStore(Address.parse(received), None)


def _open_through_agent(environment: Environment) -> JobStore:
    """Meet the other replicas of this generation through the agent's store.

    That store outlives generations, and a key of a dead one looks like any other. So
    each replica asks under a key that nobody has used, and rank 0 answers until all are
    here.
    """
    assert environment.master_address is not None
    assert environment.master_port is not None
    agent = TCPStore(
        environment.master_address,
        environment.master_port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=START_TIMEOUT),
    )
    deadline = time.monotonic() + START_TIMEOUT
    if environment.rank == 0:
        store = _serve_anew(environment)
        _answer_until_all_are_here(agent, store, environment, deadline)
        return store
    return _retry(lambda: _ask_for_store(agent, environment), deadline)


def _answer_until_all_are_here(
    agent: TCPStore, store: JobStore, environment: Environment, deadline: float
) -> None:
    others = range(1, environment.world_size)
    answered: set[bytes] = set()
    while not all(store.client.check([f"here/{rank}"]) for rank in others):
        for rank in others:
            key = f"elasticrun/ask/{environment.world_size}/{rank}"
            if not agent.check([key]):
                continue
            nonce = agent.get(key)
            if nonce not in answered:
                answered.add(nonce)
                agent.set(f"elasticrun/answer/{nonce.decode()}", str(store.address))
        if time.monotonic() > deadline:
            missing = [r for r in others if not store.client.check([f"here/{r}"])]
            raise AgreementError(
                f"ranks {missing} of {environment.world_size} did not come within "
                f"{START_TIMEOUT:.0f} s, so the job cannot start. Look at their logs."
            )
        time.sleep(0.002)
    store.put("everybody", True)


def _ask_for_store(agent: TCPStore, environment: Environment) -> JobStore:
    nonce = uuid.uuid4().hex
    agent.set(f"elasticrun/ask/{environment.world_size}/{environment.rank}", nonce)
    key = f"elasticrun/answer/{nonce}"
    agent.wait([key], timedelta(seconds=START_TIMEOUT))
    store = JobStore(Address.parse(agent.get(key).decode()), None)
    store.put(f"here/{environment.rank}", True)
    store.take("everybody")
    return store


def _retry(open_: Callable[[], JobStore], deadline: float) -> JobStore:
    """Ask again when the rank 0 that answered was one of a generation about to die."""
    while True:
        try:
            return open_()
        except (ConnectionError, dist.DistError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
