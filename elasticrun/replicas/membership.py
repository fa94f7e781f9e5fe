"""Joining the other replicas: rank, world size, store, process group."""

from __future__ import annotations

import math
import socket
import time
import uuid
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from elasticrun.errors import AgreementError
from elasticrun.logger import Logger
from elasticrun.replicas.devices import choose_device
from elasticrun.replicas.environment import Environment, keep_gloo_on_loopback
from elasticrun.replicas.exchange import HERE, Exchange
from elasticrun.replicas.gathering import gather
from elasticrun.replicas.links import Links, connect_all
from elasticrun.replicas.process_end import wait_for_threads_at_exit
from elasticrun.replicas.store import (
    ALL_LEAVE,
    LEAVING,
    PROCESS_GROUP,
    START_TIMEOUT,
    STEP,
    Address,
    JobStore,
    serve_store_at,
)
from elasticrun.replicas.wire import raise_limit_of_open_files

logger = Logger(__name__)

_LEAVING_SECONDS = 10.0
_PATIENCE = START_TIMEOUT  # For rank 0, which may import much before it comes.
_QUIET_SECONDS = 15.0
_LOOK_SECONDS = 0.05
_REACH_SECONDS = 30.0  # For an address where somebody listens, or did a moment ago.
_ELSEWHERE = "192.0.2.1"  # No machine has it (RFC 5737); so it is on no loopback.


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
    if environment.rank == 0:
        store = _serve_at(address, environment)
    else:
        _wait_for_rank_0(address)
        try:
            store = JobStore(address, None, patience=_PATIENCE)
        except ConnectionError as error:
            raise _unserved(address, error) from error
        _check_step(store, environment)
    _wait_for_all(store, environment)
    return store


def _wait_for_all(store: JobStore, environment: Environment) -> None:
    """Wait until all replicas have found the store. Collective."""
    rank, world_size = environment.rank, environment.world_size
    Exchange(store, rank=rank, world_size=world_size).agree(HERE, None, len)


def _check_step(store: JobStore, environment: Environment) -> None:
    """Refuse to write into the store of another job."""
    try:
        step = store.take(STEP, timeout=_PATIENCE)
    except TimeoutError as error:
        raise _unserved(store.address, error) from error
    if step != environment.step:
        raise AgreementError(
            f"the replicas of another job meet at {store.address} (MASTER_ADDR, "
            "MASTER_PORT). Give each job a port of its own."
        )


def _serve_at(address: Address, environment: Environment) -> JobStore:
    """Serve the store where the others were told that it is."""
    host = address.host
    is_one_machine = environment.local_world_size == environment.world_size
    if not is_one_machine and socket.gethostbyname(host).startswith("127."):
        host = "0.0.0.0"  # This machine's name, which means another address elsewhere.
    try:
        server = serve_store_at(host, address.port)
    except OSError as error:
        raise AgreementError(
            f"rank 0 cannot serve the job's store at {address}: {error.strerror}. Set "
            "MASTER_PORT to a free port, for all replicas alike"
            + ("; it was chosen by Slurm's step." if environment.step else ".")
        ) from error
    store = JobStore(address, server, interface=host)
    store.put(STEP, environment.step)
    return store


def _wait_for_rank_0(address: Address) -> None:
    """Wait until somebody listens where rank 0 is to serve the store."""
    begin = time.monotonic()
    quiet = begin + _QUIET_SECONDS
    while True:
        try:
            socket.create_connection((address.host, address.port), 5.0).close()
            return
        except OSError as error:
            now = time.monotonic()
            if now > quiet:
                quiet = math.inf
                logger.warning("waiting for rank 0 at %s: %s", address, error)
            if now - begin > _PATIENCE:
                raise _unserved(address, error) from error
        time.sleep(_LOOK_SECONDS)


def _unserved(address: Address, error: Exception) -> AgreementError:
    return AgreementError(
        f"rank 0 did not come within {_PATIENCE:g} s: nobody serves the job's store at "
        f"{address} (MASTER_ADDR, MASTER_PORT): {error}. Look at the log of rank 0."
    )


def _serve_anew(environment: Environment) -> JobStore:
    host = reachable = "127.0.0.1"
    if environment.local_world_size < environment.world_size:
        host = reachable = _outgoing_host(environment)
        # A name for this machine may stand for another address elsewhere.
        if host.startswith("127.") and environment.master_address != host:
            host, reachable = "0.0.0.0", environment.master_address or host
    server = serve_store_at(host)
    return JobStore(Address(reachable, server.port), server, interface=host)


def _outgoing_host(environment: Environment) -> str:
    """Return this machine's address on the way to the master; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((environment.master_address or _ELSEWHERE, 1))
        except OSError:  # No way out, as in a network of these machines alone.
            return socket.gethostbyname(socket.gethostname())
        return str(probe.getsockname()[0])


def _open_through_group(environment: Environment) -> JobStore:
    if environment.rank == 0:
        store = _serve_anew(environment)
        gather(str(store.address))
        return store
    return JobStore(Address.parse(gather("")[0]), None)


def _open_through_agent(environment: Environment) -> JobStore:
    """Find rank 0's store by its address in the agent's store.

    That store outlives generations: the address there may be that of an earlier one,
    whose rank 0 is gone, or not yet.
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
    key = f"elasticrun/{environment.world_size}"
    if environment.rank == 0:
        store = _serve_anew(environment)
        agent.set(key, str(store.address))
        _wait_for_all(store, environment)
        return store
    own, deadline = uuid.uuid4().hex, time.monotonic() + _PATIENCE
    while True:
        try:
            agent.wait([key], timedelta(seconds=_PATIENCE))
            address = Address.parse(agent.get(key).decode())
            return _join_at(address, environment, own)
        except (ConnectionError, dist.DistError) as error:
            if time.monotonic() > deadline:
                raise AgreementError(
                    f"rank 0 did not come within {_PATIENCE:g} s: its address, which "
                    f"is to be at {key!r} in the store of the agent (torchrun), is not "
                    f"there or another generation's ({error}). Look at its log."
                ) from error
        time.sleep(_LOOK_SECONDS)


def _join_at(address: Address, environment: Environment, own: str) -> JobStore:
    """Join the replicas that meet there.

    Args:
        own: What no other process calls itself.
    """
    _check_served(address)
    store = JobStore(address, None)
    rank = f"taken/{environment.rank}"
    if store.client.compare_set(rank, "", own).decode() != own:
        raise ConnectionError(f"the store at {address} is another generation's")
    _wait_for_all(store, environment)
    return store


def _check_served(address: Address) -> None:
    """Raise at once if nobody listens there: the rank 0 that said so is gone by now.

    A client of the store would go on trying for minutes.
    """
    try:
        socket.create_connection((address.host, address.port), _REACH_SECONDS).close()
    except OSError as error:
        raise ConnectionError(f"nobody serves the job's store at {address}") from error


@dataclass(frozen=True)
class Membership:
    """This replica among the others.

    Attributes:
        store: The job's store, or None for a replica that is alone.
        links: The connections to the other replicas' watchers, or None.
        owns_group: Whether the process group was started here, and ends with the job.
    """

    environment: Environment
    device: torch.device
    store: JobStore | None
    links: Links | None
    owns_group: bool

    @property
    def rank(self) -> int:
        return self.environment.rank

    @property
    def world_size(self) -> int:
        return self.environment.world_size

    @property
    def exchange(self) -> Exchange:
        """An end of the conversations with rank 0, for the training thread."""
        return self.exchange_over(self.store)

    def exchange_over(
        self, store: JobStore | None, *, gone: dict[int, str] | None = None
    ) -> Exchange:
        """Return an end of the conversations with rank 0 over a client of the store."""
        return Exchange(store, rank=self.rank, world_size=self.world_size, gone=gone)

    @property
    def waits_on_gpu(self) -> bool:
        """Whether collectives wait there; also of a script's own group on one GPU."""
        return self.device.type == "cuda" or "nccl" in dist.get_backend()

    def abort(self) -> None:
        """End the collectives that wait for a replica which is gone; on GPUs."""
        assert dist.group.WORLD is not None
        dist.group.WORLD.abort()

    def leave(self, *, is_whole: bool = True) -> None:
        """End the process group that was started here.

        NCCL's end waits for every collective under way, and so for replicas that wait
        in one for this replica. If not all come to their end, the group is left as it
        is: torch aborts it when the process ends.

        Args:
            is_whole: Whether no other replica is known to have died.
        """
        if not (self.owns_group and dist.is_initialized()):
            return
        if self.device.type == "cpu" or (is_whole and self._do_all_leave()):
            dist.destroy_process_group()

    def _do_all_leave(self) -> bool:
        """Return whether all replicas come here within some seconds."""
        assert self.store is not None
        try:
            if self.store.client.add(LEAVING, 1) == self.world_size:
                self.store.put(ALL_LEAVE, True)
            self.store.take(ALL_LEAVE, timeout=_LEAVING_SECONDS)
        except (TimeoutError, ConnectionError, dist.DistError):
            return False
        return True


def join(
    environment: Environment, *, backend: str, timeout: float | None = None
) -> Membership:
    """Meet the other replicas. Collective.

    A process group that the user has started decides about rank and world size; and
    where they differ from what the variables say, also who is on which machine.

    Args:
        timeout: Seconds that a collective may take; None for what torch finds right.
    """
    if dist.is_initialized() and dist.get_world_size() != environment.world_size:
        environment = _as_in_group(environment)
    if environment.world_size == 1:
        device = choose_device(
            environment, backend, Exchange(None, rank=0, world_size=1)
        )
        return Membership(environment, device, None, None, owns_group=False)
    if environment.rank == 0:
        raise_limit_of_open_files()
    wait_for_threads_at_exit()
    owns_group = not dist.is_initialized()
    store = open_store(environment)
    exchange = Exchange(store, rank=environment.rank, world_size=environment.world_size)
    device = choose_device(environment, backend, exchange)
    links = connect_all(store, rank=environment.rank, world_size=environment.world_size)
    if owns_group:
        _start_process_group(environment, store, device, timeout=timeout)
    return Membership(environment, device, store, links, owns_group)


def _as_in_group(environment: Environment) -> Environment:
    """Return where this replica stands in the process group. Collective."""
    rank, hosts = dist.get_rank(), gather(socket.gethostname())
    return replace(
        environment,
        rank=rank,
        local_rank=hosts[:rank].count(hosts[rank]),
        world_size=len(hosts),
        local_world_size=hosts.count(hosts[rank]),
    )


def _start_process_group(
    environment: Environment,
    store: JobStore,
    device: torch.device,
    *,
    timeout: float | None = None,
) -> None:
    """Start the default process group over this generation's own store. Collective."""
    if environment.local_world_size == environment.world_size:
        keep_gloo_on_loopback()
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore(PROCESS_GROUP, store.client),
        rank=environment.rank,
        world_size=environment.world_size,
        device_id=device if device.type == "cuda" else None,
        timeout=None if timeout is None else timedelta(seconds=timeout),
    )
