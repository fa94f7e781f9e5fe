"""Which failure is the first cause, and how it reads."""

from __future__ import annotations

import pytest

from elasticrun.launcher.endings import (
    Ending,
    Failure,
    describe,
    explain_kill,
    first_cause,
)


def ending(rank: int, code: int, time: float, text: str = "", *, killed: bool = False):
    failure = Failure(text, "") if text else None
    return Ending(rank, code, time, failure, killed)


def test_a_stop_and_an_end_are_no_failures() -> None:
    codes = [0, 75, 130, 143, 129]
    assert first_cause([ending(i, c, i) for i, c in enumerate(codes)]) is None


def test_a_lost_connection_follows_from_something() -> None:
    lost = "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:1234"
    dead = "AgreementError: the process of rank 2 died."
    endings = [
        ending(0, 1, 1.0, lost),
        ending(1, 1, 1.1, dead),
        ending(2, 1, 1.2, "ValueError: nan"),
        ending(3, -9, 0.9, killed=True),
    ]
    cause = first_cause(endings)
    assert cause is not None
    assert describe(cause) == "rank 2 raised ValueError: nan"


@pytest.mark.parametrize("code", [0, 75])
def test_who_left_the_others_is_named(code: int) -> None:
    lost = "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:1234"
    endings = [ending(0, 1, 1.0, lost), ending(1, code, 1.1), ending(2, code, 1.2)]
    cause = first_cause(endings)
    assert cause is not None
    assert cause.is_own_fault
    assert describe(cause) == (
        f"rank 1 ended with exit code {code} while the others were still training"
    )
    own = first_cause([*endings, ending(3, 1, 1.3, "ValueError: nan")])
    assert own is not None
    assert own.rank == 3


def test_a_signal_comes_before_what_it_led_to() -> None:
    lost = "DistBackendError: remote process exited"
    cause = first_cause([ending(0, 1, 1.0, lost), ending(1, -11, 1.1)])
    assert cause is not None
    assert describe(cause) == "rank 1 was killed by signal 11 (SIGSEGV)"


def test_an_abort_stands_behind_what_failed_by_itself() -> None:
    """NCCL's watchdog aborts replicas that waited for another one."""
    aborted = [ending(0, -6, 1.0), ending(1, -6, 1.1)]
    fault = ending(2, 1, 1.2, "ValueError: nan")
    for endings, rank in (([*aborted, fault], 2), (aborted, 0)):
        cause = first_cause(endings)
        assert cause is not None
        assert cause.rank == rank
    assert "NCCL" in describe(aborted[0])


def test_what_the_launcher_killed_is_the_last_to_be_named() -> None:
    lost = "ConnectionError: the job's store is gone"
    cause = first_cause([ending(0, -9, 0.5, killed=True), ending(1, 1, 1.0, lost)])
    assert cause is not None
    assert cause.rank == 1


def test_the_first_of_two_faults_is_named() -> None:
    cause = first_cause([ending(0, 3, 2.0), ending(1, 4, 1.9)])
    assert cause is not None
    assert describe(cause) == "rank 1 exited with code 4"


def test_a_full_memory_is_a_hint() -> None:
    assert "out-of-memory" in explain_kill(3, 4)
    assert explain_kill(3, 3) == explain_kill(None, None) == ""
    text = describe(ending(1, -9, 0.0), hint="probably by the out-of-memory killer")
    assert text.endswith("(SIGKILL): probably by the out-of-memory killer")


def test_a_program_without_a_gpu_is_told_of_the_device() -> None:
    asked = "RuntimeError: Found no NVIDIA driver on your system."
    assert "elasticrun.device() is this replica's" in describe(ending(0, 1, 1.0, asked))
    assert "device()" not in describe(ending(0, 1, 1.0, "ValueError: nan"))
