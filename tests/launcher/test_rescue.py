"""A replica dies, and a survivor saves what was trained: nothing is trained twice."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elasticrun.checkpoint.events import read_events
from elasticrun.report.command import Timeline
from elasticrun.testing import read_trace
from tests.launcher.running import (
    LEISURELY,
    Running,
    Start,
    impatient,
    run,
    running,
    take_for_hung,
    variables,
    wait_until_nothing_is_left,
)
from tests.support.stage import Stage, wait_until

SCRIPT = Path(__file__).parents[1] / "support" / "scripts" / "mortal.py"
RESUMED = re.compile(r"generation \d+: .*resumed at (.*)")

pytestmark = pytest.mark.slow(30)

Death = tuple[int, str, int, int]  # Rank, place, epoch, batch.


def mortal(
    stage: Stage,
    deaths: Sequence[Death],
    *options: object,
    num_replicas: int = 3,
    **more: object,
) -> Running:
    own = {"ELASTICRUN_RESCUE": "always", "DEATHS": json.dumps(deaths), **more}
    job = run(stage, "--replicas", num_replicas, *options, script=SCRIPT, **own)
    assert job.wait() == 0, job.events
    return job


def end_of(job: Running) -> str:
    [end] = re.findall(r"END .*", job.output)
    return end


def resumed_at(job: Running) -> list[str]:
    return RESUMED.findall(job.events)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the end of a training in which nobody dies."""
    end = end_of(mortal(Stage(tmp_path_factory.mktemp("calm")), []))
    assert end.endswith(" 600 600 600 3 0")
    return end


@pytest.mark.slow(30)
def test_whoever_dies_wherever_nothing_is_trained_twice(
    stage: Stage, calm: str
) -> None:
    deaths = [
        (0, "forward", 0, 4),
        (2, "loss", 0, 6),
        (1, "backward", 1, 2),
        (0, "step", 1, 7),
        (1, "between", 1, 0),
        (2, "valid", 1, 1),
        (0, "step", 2, 9),
    ]
    job = mortal(stage, deaths)
    assert end_of(job) == calm
    *in_training, in_validation, last = resumed_at(job)
    assert [*in_training, last] == [
        "epoch 0, loop 0, sample 80 of `loader-0`",
        "epoch 0, loop 0, sample 120 of `loader-0`",
        "epoch 1, loop 0, sample 60 of `loader-0`",
        "epoch 1, loop 0, sample 160 of `loader-0`",
        "epoch 1, loop 0, sample 200 of `loader-0`",
        "epoch 2, loop 0, sample 200 of `loader-0`",
    ]
    # There replicas do not wait for each other: who is ahead goes back to where the
    # dead one was seen, or to the last step.
    assert in_validation in (
        "epoch 1, loop 0, sample 200 of `loader-0`",
        "epoch 1, loop 1, sample 50 of `loader-1`",
    )
    assert "rank 0 was killed by signal 9 (SIGKILL); rank 1 saved epoch 0" in job.events
    assert "Traceback" not in job.events  # Of who lost the connection, in the logs.
    assert "after the death of" not in job.events  # The crash says who saved.
    rescue = stage.committed()[-2]["rescue"]
    assert rescue == "by rank 1 after the death of rank 0"
    history = Timeline(read_events(stage.checkpoints))
    saved = [each["rescue"] for each in history.checkpoints if each["rescue"]]
    assert len(saved) == len(history.crashes) == len(deaths)
    # As the report counts it, too: of validation 50 samples may come again.
    assert max(each.repeated for each in history.generations) <= 50
    wait_until_nothing_is_left(stage)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("program", "num_replicas", "save_interval", "num_kills"),
    [
        ("", 3, 1, 300),
        *(("long", n, 0, 100) for n in (2, 3)),  # Each boundary is saved.
        ("long", 3, "off", 100),
        ("scaled", 3, 1, 100),
    ],
)
def test_kills_at_random_cost_no_step_and_change_no_bit(
    stage: Stage,
    tmp_path: Path,
    program: str,
    num_replicas: int,
    save_interval: object,
    num_kills: int,
) -> None:
    """Kill replicas whenever, also while they start, save, or rescue.

    Spares run the script; or they import, and every fifth time the job is rescaled.
    """
    drawn = random.Random(5)
    is_scaled, is_long = program == "scaled", program == "long"
    script = SCRIPT.with_name("mortal_programs.py") if is_long else SCRIPT
    options = ["--replicas", num_replicas, "--max-restarts", num_kills]
    own: dict[str, Any] = {"script": script, "PROGRAM": program}
    own |= {"ELASTICRUN_RESCUE": "on", "ELASTICRUN_SAVE_INTERVAL": save_interval}
    if is_scaled:
        own |= {"ELASTICRUN_VIRTUAL_REPLICAS": 6, "command": LEISURELY}
    else:
        options += ["--spares"]
    with (
        running(stage, *options, EPOCHS=10**9, **own) as job,
        ThreadPoolExecutor() as pool,
    ):
        wait_until(lambda: stage.num_delivered(0) > 5)
        for number in range(num_kills):
            num_resumed = len(resumed_at(job))
            if is_scaled and number % 5 == 4:
                pool.submit(job.ask, "scale", drawn.choice((2, 3)), "--force")
            most = 3.0 if is_scaled else 1.0  # So long do imports take.
            time.sleep(drawn.uniform(0.1, most))  # A moment, which is what is drawn.
            kill_one(job, drawn)
            wait_until(partial(has_resumed, job, num_resumed + 1))
        stage.mark("enough")
        assert job.wait() == 0, job.events
    lost = steps_lost(stage)
    print(f"steps lost by {len(lost)} kills: {lost}")
    print(*re.findall(r"crashed at (?!.*; rank \d+ saved ).*", job.events), sep="\n")
    epochs = 1 + max(line["epoch"] for line in read_trace(stage.trace))
    (tmp_path / "calm").mkdir()
    calm = Stage(tmp_path / "calm")
    with running(calm, "--replicas", num_replicas, EPOCHS=epochs, **own) as other:
        assert other.process.wait() == 0  # It has as many epochs as the kills took.
    assert end_of(other) == end_of(job)
    assert sum(each == 0 for each in lost) >= 0.95 * len(lost)


def kill_one(job: Running, drawn: random.Random) -> None:
    members: list[dict[str, Any]] = []

    def is_begun() -> bool:
        members[:] = job.status()["members"]
        return bool(members)

    wait_until(is_begun, "the next generation")
    with contextlib.suppress(ProcessLookupError):  # That one has ended since.
        os.kill(drawn.choice(members)["pid"], signal.SIGKILL)


def has_resumed(job: Running, times: int) -> bool:
    assert job.process.poll() is None, job.events
    return len(resumed_at(job)) >= times


def steps_lost(stage: Stage) -> list[int]:
    """Return how many finished steps each generation did once more."""
    batches: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for line in read_trace(stage.trace):
        if line["loop"] == 0:
            batches[line["generation"]].add((line["epoch"], line["batch"]))
    pairs = itertools.pairwise(sorted(batches))
    # One batch was under way.
    return [
        max(0, sum(each >= min(batches[after]) for each in batches[before]) - 1)
        for before, after in pairs
    ]


@pytest.mark.wide
def test_sums_after_a_rescue_are_exact_or_there_is_none(
    stage: Stage, calm: str
) -> None:
    # The second one dies with its step made, and what it would add in it unknown.
    deaths = [(1, "forward", 0, 4), (2, "backward", 1, 2)]
    job = mortal(stage, deaths, SUMS=1)
    assert end_of(job) == calm
    assert resumed_at(job) == ["epoch 0, loop 0, sample 80 of `loader-0`"] * 2


@pytest.mark.wide
def test_a_program_that_catches_the_error_of_a_collective_loses_no_batch(
    stage: Stage,
) -> None:
    """Nor a part of one: of two models, one has made its step."""
    job = mortal(stage, [(1, "forward", 0, 4), (0, "backward", 1, 2)], CATCHES=1)
    assert end_of(job).endswith(" 600 600 600 3 0")


@pytest.mark.wide
def test_it_can_be_left_out(stage: Stage, calm: str) -> None:
    job = mortal(stage, [(1, "forward", 1, 4)], ELASTICRUN_RESCUE="off")
    assert end_of(job) == calm
    assert resumed_at(job) == []  # It began anew: nothing was saved before.


@pytest.mark.wide
def test_the_survivor_of_another_machine_saves(
    stage: Stage, calm: str, start: Start
) -> None:
    """Each node has a replica, and none can read another one's record."""
    own = {
        "ELASTICRUN_RESCUE": "always",
        "DEATHS": json.dumps([(0, "backward", 0, 4), (1, "forward", 1, 2)]),
        "script": SCRIPT,
    }
    nodes = [start(nodes="3:3", **own) for _ in range(3)]
    assert [node.wait() for node in nodes] == [0, 0, 0], nodes[0].events
    [end] = [line for node in nodes for line in re.findall(r"END .*", node.output)]
    assert end == calm
    assert resumed_at(nodes[0]) == [
        "epoch 0, loop 0, sample 100 of `loader-0`",
        "epoch 1, loop 0, sample 40 of `loader-0`",
    ]


@pytest.mark.parametrize(("rank", "saver"), [(0, 2), (3, 0)])
@pytest.mark.wide
def test_when_a_machine_dies_a_replica_of_another_one_saves(
    stage: Stage, tmp_path: Path, rank: int, saver: int
) -> None:
    """Also the machine with rank 0, and maybe with what all others had met at."""
    (tmp_path / "calm").mkdir()
    calm = end_of(mortal(Stage(tmp_path / "calm"), [], "--replicas", 4))
    own = {
        "ELASTICRUN_RESCUE": "always",
        "DEATHS": json.dumps([(rank, "backward", 1, 4)]),
        "WITH_MACHINE": 1,
        "script": SCRIPT,
    }
    options = ["--nodes", 2, "--address", "127.0.0.1", "--replicas", 2]
    with ExitStack() as stack:
        nodes = [  # The third one waits for the place of the one that dies.
            stack.enter_context(running(stage, *options, name=f"-{n}", **own))
            for n in range(3)
        ]
        assert sorted(node.wait() for node in nodes) == [-signal.SIGKILL, 0, 0]
        stay = [node for node in nodes if node.wait() == 0]
        ends = [end for node in stay for end in re.findall(r"END .*", node.output)]
        assert ends == [calm]
        assert "epoch 1, loop 0, sample 100 of `loader-0`" in resumed_at(stay[0])
        wait_until_nothing_is_left(stage)
    [rescue] = [each["rescue"] for each in stage.committed() if "rescue" in each]
    assert rescue.startswith(f"by rank {saver} after the death of rank ")


@pytest.mark.wide
def test_torchrun_waits_for_the_survivor(stage: Stage, calm: str) -> None:
    deaths = [(0, "backward", 0, 4), (2, "forward", 1, 2)]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node=3", "--max-restarts=2", str(SCRIPT)),
    ]
    more = variables(stage, ELASTICRUN_RESCUE="always", DEATHS=json.dumps(deaths))
    done = subprocess.run(
        command, env=more, cwd=stage.root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"END .*", done.stdout) == [calm]
    rescues = [each.get("rescue") for each in stage.committed()]
    assert rescues[:2] == [
        "by rank 1 after the death of rank 0",
        "by rank 0 after the death of rank 2",
    ]


@pytest.mark.wide
def test_a_survivor_that_is_killed_while_it_saves_leaves_the_last_checkpoint(
    stage: Stage, calm: str
) -> None:
    """It is a generation more that begins where the one before did."""
    deaths = [(1, "forward", 0, 4), (1, "forward", 1, 4), (2, "loss", 2, 3)]
    job = mortal(stage, deaths, DIES_SAVING=1)
    assert end_of(job) == calm
    assert resumed_at(job) == [
        "epoch 0, loop 0, sample 80 of `loader-0`",
        "epoch 0, loop 0, sample 80 of `loader-0`",
        "epoch 2, loop 0, sample 60 of `loader-0`",
    ]


def is_held_up(job: Running) -> bool:
    """Return whether the launcher knows that the others are a boundary further."""
    places = [each["position"] or "" for each in job.status()["members"]]
    return [place.partition("sample ")[2][:3] for place in places] == [
        "100",
        "80 ",
        "100",
    ]


@pytest.mark.wide
def test_a_hang_is_rescued_by_who_does_not(stage: Stage, calm: str) -> None:
    own = {"ELASTICRUN_RESCUE": "always", "DEATHS": json.dumps([(1, "hang", 1, 4)])}
    options = ["--replicas", 3]
    command = impatient(stage)
    with running(stage, *options, script=SCRIPT, command=command, **own) as job:
        wait_until(lambda: stage.num_delivered(1))
        since = time.monotonic()
        wait_until(lambda: stage.has("hangs") and is_held_up(job))
        take_for_hung(stage, since)
        log = stage.checkpoints / "logs" / "generation-0000" / "rank-1.log"
        wait_until(lambda: "in maybe_die" in log.read_text(), "a stack")
        stage.mark("dumped")
        assert job.wait() == 0, job.events
    assert end_of(job) == calm
    assert resumed_at(job) == ["epoch 1, loop 0, sample 100 of `loader-0`"]
    assert "rank 1 passed no boundary for" in job.events
