"""Meeting the other replicas: opening the store of a generation, wherever it stands."""

from __future__ import annotations

import logging
import math
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore

from elasticrun.errors import AgreementError
from elasticrun.replicas.environment import Environment
from elasticrun.replicas.gathering import gather
from elasticrun.replicas.store import (
    EVERYBODY,
    NUM_HERE,
    NUM_TOLD,
    START_TIMEOUT,
    STEP,
    Address,
    JobStore,
    here,
    serve_store_at,
)

logger = logging.getLogger(__name__)

_PATIENCE = START_TIMEOUT  # For another replica, which may import much before it comes.
_QUIET_SECONDS = 15.0
_LOOK_SECONDS = 0.5
_REACH_SECONDS = 30.0  # For an address where somebody listens, or did a moment ago.
_TELLING_SECONDS = 5.0
_FOR_EVER = 24 * 3600.0  # Rank 0 ends it, or its store is gone.
_ELSEWHERE = "192.0.2.1"  # No machine has it (RFC 5737); so it is on no loopback.


def open_store(environment: Environment) -> JobStore:
    """Return the store of this generation, which rank 0 serves. Collective.

    Its address travels through the process group if the user has made one, else through
    the agent's store (torchrun); without an agent the store stands at MASTER_ADDR and
    MASTER_PORT itself. It listens on loopback when all replicas are on one machine.

    Raises:
        AgreementError: A replica did not come; the text names it.
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
        _call_roll(store, environment, seconds=_LOOK_SECONDS / 20)
        return store
    _wait_for_rank_0(address)
    try:
        store = JobStore(address, None, patience=_PATIENCE)
    except ConnectionError as error:
        raise _unserved(address, error) from error
    _check_step(store, environment)
    _answer_roll(store, environment)
    return store


def _check_step(store: JobStore, environment: Environment) -> None:
    """Refuse to write into the store of another job."""
    try:
        step = store.take(STEP, timeout=_PATIENCE)
    except TimeoutError as error:
        raise _absent([0], environment) from error
    if step != environment.step:
        raise AgreementError(
            f"the replicas of another job meet at {store.address} (MASTER_ADDR, "
            "MASTER_PORT). Give each job a port of its own."
        )


def _serve_at(address: Address, environment: Environment) -> JobStore:
    """Serve the store where the others were told that it is."""
    host = address.host
    if environment.local_world_size < environment.world_size and _is_loopback(host):
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


def _is_loopback(host: str) -> bool:
    return socket.gethostbyname(host).startswith("127.")


def _call_roll(
    store: JobStore,
    environment: Environment,
    *,
    seconds: float,
    look: Callable[[], None] = lambda: None,
) -> None:
    """On rank 0, wait until all others are here, and tell them so, or who is not.

    Args:
        seconds: Between two looks.
        look: Called before each of them.
    """
    others = range(1, environment.world_size)
    num_here = 0
    last_came = time.monotonic()
    quiet = last_came + _QUIET_SECONDS
    while True:
        look()
        now = time.monotonic()
        # One number, however many there are; who lost the store has come twice.
        if (number := store.client.add(NUM_HERE, 0)) > num_here:
            num_here, last_came = number, now
        missing: list[int] | None = None
        if num_here >= len(others) or now > quiet or now - last_came > _PATIENCE:
            missing = _missing_of(store, others)
        if missing == []:
            break
        if now > quiet and missing:
            quiet = math.inf
            logger.warning("waiting for %s", _describe(missing, environment))
        if now - last_came > _PATIENCE and missing:
            store.put(EVERYBODY, missing)
            _wait_until_told(store, len(others) - len(missing))
            raise _absent(missing, environment)
        time.sleep(seconds)
    store.put(EVERYBODY, [])


def _missing_of(store: JobStore, ranks: Sequence[int]) -> list[int]:
    """Return the ranks that are not here, by halving: few of them cost few calls."""
    if store.has([here(rank) for rank in ranks]):
        return []
    if len(ranks) == 1:
        return list(ranks)
    half = len(ranks) // 2
    return _missing_of(store, ranks[:half]) + _missing_of(store, ranks[half:])


def _answer_roll(store: JobStore, environment: Environment) -> None:
    """Say that this replica is here, and wait until all are."""
    store.put(here(environment.rank), True)
    store.client.add(NUM_HERE, 1)
    missing = store.take(EVERYBODY, timeout=_FOR_EVER)
    if missing:
        store.client.add(NUM_TOLD, 1)
        raise _absent(missing, environment, is_told=True)


def _wait_until_told(store: JobStore, number: int) -> None:
    """Serve the store until the others know why the job ends."""
    deadline = time.monotonic() + _TELLING_SECONDS
    while store.client.add(NUM_TOLD, 0) < number and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS / 10)


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
        time.sleep(_LOOK_SECONDS / 10)


def _unserved(address: Address, error: OSError) -> AgreementError:
    return AgreementError(
        f"rank 0 did not come within {_PATIENCE:g} s: nobody serves the job's store at "
        f"{address} (MASTER_ADDR, MASTER_PORT): {error}. Look at the log of rank 0."
    )


def _absent(
    missing: list[int], environment: Environment, *, is_told: bool = False
) -> AgreementError:
    within = "" if is_told else f" within {_PATIENCE:g} s after the others"
    return AgreementError(
        f"{_describe(missing, environment)} did not come{within}, so the job cannot "
        "start. Look at their logs: they may have died before they joined."
    )


def _describe(ranks: list[int], environment: Environment) -> str:
    shown = ", ".join(map(str, ranks[:20])) + (", ..." if len(ranks) > 20 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown} of {environment.world_size}"


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
    if environment.rank == 0:
        store = _serve_anew(environment)
        _answer_until_all_are_here(agent, store, environment)
        return store
    deadline = time.monotonic() + START_TIMEOUT
    while True:
        try:
            return _ask_for_store(agent, environment)
        except (ConnectionError, dist.DistError):
            # The rank 0 that answered was one of a generation about to die.
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOOK_SECONDS / 50)


def _answer_until_all_are_here(
    agent: TCPStore, store: JobStore, environment: Environment
) -> None:
    asks = _asks(environment.world_size)
    answered = f"{asks}/answered"
    num_seen = agent.add(answered, 0)
    open_asks: dict[str, int] = {}

    def answer() -> None:
        # Each that has asked is answered before the others have, also what one of a
        # dead generation has asked: who that was cannot be told.
        nonlocal num_seen
        num_asked = agent.add(asks, 0)
        open_asks.update(
            (f"{asks}/{number}", number)
            for number in range(num_seen + 1, num_asked + 1)
        )
        num_seen = num_asked
        present = list(open_asks)
        if not agent.check(present):  # One has its number, and has not asked yet.
            present = [key for key in present if agent.check([key])]
        if present:
            answers = [_answer(nonce.decode()) for nonce in agent.multi_get(present)]
            agent.multi_set(answers, [str(store.address)] * len(answers))  # type: ignore[attr-defined]
            for key in present:
                del open_asks[key]

    _call_roll(store, environment, seconds=0.002, look=answer)
    agent.set(answered, str(min(open_asks.values(), default=num_seen + 1) - 1))


def _asks(world_size: int) -> str:
    """Return the key in the agent's store that counts who has asked.

    With that number behind it, it is the key under which one has asked, by a nonce.
    """
    return f"elasticrun/asks/{world_size}"


def _answer(nonce: str) -> str:
    """Return the key there under which rank 0 answers who has asked with this nonce."""
    return f"elasticrun/answer/{nonce}"


def _ask_for_store(agent: TCPStore, environment: Environment) -> JobStore:
    nonce = uuid.uuid4().hex
    asks = _asks(environment.world_size)
    agent.set(f"{asks}/{agent.add(asks, 1)}", nonce)
    key = _answer(nonce)
    try:
        agent.wait([key], timedelta(seconds=_PATIENCE))
    except dist.DistStoreError as error:
        raise _absent([0], environment) from error
    address = Address.parse(agent.get(key).decode())
    _check_served(address)
    store = JobStore(address, None)
    _answer_roll(store, environment)
    return store


def _check_served(address: Address) -> None:
    """Raise at once if nobody listens there: the rank 0 that said so is gone by now.

    A client of the store would go on trying for minutes.
    """
    try:
        socket.create_connection((address.host, address.port), _REACH_SECONDS).close()
    except OSError as error:
        raise ConnectionError(f"nobody serves the job's store at {address}") from error
