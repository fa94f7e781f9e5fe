"""Spares: a whole generation waits for a crash of the one that trains.

They have imported what it has, and with `--spares` run the script as far as they can.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psutil
import pytest

from tests.launcher.program import NUM_EPOCHS, NUM_SAMPLES
from tests.launcher.running import (
    LEISURELY,
    REPOSITORY,
    Running,
    Start,
    check_trains,
    elasticrun,
    forkserver_of,
    is_replica,
    processes_of,
    running,
    wait_until_nothing_is_left,
)
from tests.launcher.supervisor.test_rehearsal import Rescaled, started
from tests.support.stage import Stage, wait_until
from tests.support.variants import in_wide

pytestmark = pytest.mark.slow


@pytest.fixture
def spared(stage: Stage) -> Iterator[Rescaled]:
    with started(stage, "--spares") as each:
        yield each


def ready(spared: Rescaled, number: int) -> list[int]:
    """Return the last two of so many that have begun, once they are ready."""
    pids = spared.pids(number)
    spared.stage.mark("prepare")
    wait_until(lambda: spared.job.status()["spares"] == 2, "spares")
    return sorted(pids[-2:])


def members(spared: Rescaled) -> list[int]:
    return sorted(each["pid"] for each in spared.job.status()["members"])


def spares_of(job: Running, number: int) -> list[int]:
    """Return the processes of a job's spares, once there are so many."""
    wait_until(lambda: job.status()["spares"] == number, "spares")
    trained = [each["pid"] for each in job.status()["members"]]
    children = [each.pid for each in psutil.Process(job.pid).children()]
    return [pid for pid in children if pid not in trained and is_replica(pid)]


def test_a_crash_is_followed_by_the_spares(spared: Rescaled) -> None:
    """And those by others: in the background, after a batch."""
    for number, last in enumerate((4, 6)):
        pids = ready(spared, last)
        assert spared.job.status()["spare_memory"] > 0
        os.kill(members(spared)[number], signal.SIGKILL)
        spared.job.wait_until_said(f"generation {number + 1}: 2 replicas started")
        assert members(spared) == pids
        spared.stage.wait_for(f"trains-{number + 1}")
    ready(spared, 8)
    spared.stop()


def test_a_spare_that_is_killed_is_replaced(spared: Rescaled) -> None:
    pids = ready(spared, 4)
    os.kill(pids[0], signal.SIGKILL)
    spared.job.wait_until_said("a spare failed; others take their place")
    assert not {*ready(spared, 6)} & {*pids}
    wait_until(lambda: not {*pids} & {*processes_of(spared.stage)}, "their end")
    check_trains(spared.stage)
    os.kill(spared.job.pid, signal.SIGKILL)
    wait_until_nothing_is_left(spared.stage)


@pytest.fixture
def imported(stage: Stage) -> Iterator[Rescaled]:
    site, script = stage.root / "site-packages", stage.root / "own"
    for folder, files in ((site, INSTALLED), (script, OWN)):
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
    more = {
        "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{site}",
        "NOTES": str(stage.root / "notes"),
        "IMPORT_REMOVES": "yes",
        "USER_SETS": "yes",
    }
    with (
        running(
            stage,
            "--replicas",
            2,
            script=script / "train.py",
            command=LEISURELY,
            **more,
        ) as job,
        ThreadPoolExecutor() as pool,
    ):
        yield Rescaled(job, pool)


NOTE = """
import os
with open(os.environ["NOTES"], "a") as file:
    file.write(f"{__name__} {os.getpid()}\\n")
"""
INSTALLED = {
    "noted.py": NOTE + "BACKEND = os.environ.get('BACKEND')\n",
    "late.py": NOTE,
    "opens.py": (
        "import os\nFILE = open(os.environ['NOTES'] + str(os.getpid()), 'w')\n"
        "FILE.write('flushed at the end')\n"
    ),
    "picks.py": "import os\nRANK = os.environ['RANK']\nos.environ['PICKED'] = RANK\n",
    "sets.py": (
        "import os\nos.environ.setdefault('USER_SETS', 'no')\n"
        "os.environ.setdefault('IMPORT_SETS', 'yes')\n"
        "os.environ.pop('IMPORT_REMOVES', None)\n"
    ),
    "raises.py": "import sys\nsys.exit(NoSuchName)\n",
    "own.py": "raise NotImplementedError\n",  # The program has another one.
}
OWN = {
    "own.py": NOTE,
    "train.py": """
import os
os.environ["BACKEND"] = os.environ.get("BACKEND", "") + "chosen"
import noted, opens, picks, sets, own
try:
    import raises
except NameError:
    pass
from pathlib import Path
from tests.support.stage import Stage, wait_until
import elasticrun

names = "BACKEND PICKED IMPORT_SETS USER_SETS IMPORT_REMOVES".split()
print(noted.BACKEND, picks.RANK, *map(os.environ.get, names), flush=True)
stage = Stage(Path(os.environ["LAUNCHER_TEST"]))
loader = elasticrun.AdaptiveDataLoader(range(600), 6)
for _ in elasticrun.remaining_epochs_until(2):
    for batch in loader:
        import late
        if elasticrun.generation() == 0 and loader.batch_index == 3:
            stage.mark("trains")
            wait_until(lambda: stage.has("free"))
""",
}


def makers(stage: Stage, module: str) -> list[int]:
    """Return the processes that have imported a module."""
    lines = map(str.split, (stage.root / "notes").read_text().splitlines())
    return [int(pid) for name, pid in lines if name == module]


def test_what_replicas_import_is_imported_before_a_crash(imported: Rescaled) -> None:
    """By each as its replica did; what is the program's own comes with the program."""
    stage = imported.stage
    stage.wait_for("trains")
    first, spares = members(imported), sorted(spares_of(imported.job, 2))
    assert sorted(makers(stage, "own")) == first
    os.kill(first[0], signal.SIGKILL)
    imported.job.wait_until_said("generation 1: 2 replicas started")
    imported.free()
    assert imported.job.wait() == 0, imported.job.events
    assert sorted(makers(stage, "own")[2:]) == sorted(makers(stage, "noted")[2:4])
    assert sorted(makers(stage, "noted")[2:4]) == spares
    for pid in spares:
        assert (stage.root / f"notes{pid}").read_text() == "flushed at the end"
    for rank in (0, 1):
        line = f"[{rank}] chosen {rank} chosen {rank} yes yes None"
        assert imported.job.output.count(line) == 2, imported.job.output
    wait_until_nothing_is_left(stage)


@pytest.mark.wide
def test_what_is_started_for_a_rescaling_imports_what_ran_before_it(
    stage: Stage,
) -> None:
    """What optimizers need, too."""
    script = stage.root / "train.py"
    script.write_text(OPTIMIZES)
    options = ("--replicas", 2)
    with running(stage, *options, script=script, command=LEISURELY) as job:
        stage.wait_for("trains")
        assert elasticrun(stage, "scale", "3", "--force", str(job.pid)).returncode == 0
        assert job.wait() == 75, job.events
    first, again = ([f"[{rank}] {e}" for rank in range(n)] for n, e in SAID)
    assert sorted(job.output.splitlines()) == sorted([*first, *again])


SAID = ((2, False), (3, True))
OPTIMIZES = """
import os, sys
from pathlib import Path
import torch
import elasticrun
from tests.support.stage import Stage, wait_until

elasticrun.init()
print("torch._dynamo" in sys.modules, flush=True)
net = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
stage = Stage(Path(os.environ["LAUNCHER_TEST"]))
loader = elasticrun.AdaptiveDataLoader(range(10**9), 2)
for _ in elasticrun.remaining_epochs_until(1):
    for batch in loader:
        if elasticrun.generation() == 0:
            stage.mark("trains")
        else:
            elasticrun.request_stop()
"""

UNLIKE = {
    # Another package of the name, which a spare would not find, and so it ends.
    "vendored": "import os, sys\nsys.path.insert(0, VENDOR)\n",
    "seeds": "import os, torch\ntorch.manual_seed(5)\nimport seeds\n",
    "stand_in": "import sys, types\nsys.modules['missing'] = types.ModuleType('x')\n",
    "folder": "import os\nos.chdir(VENDOR)\n",
    "variable": "import os\nos.environ['LATE'] = 'set'\n",
}
LOOKS = """
import os
try:
    import missing
except ImportError:
    missing = None
FOUND = (missing is not None, os.getcwd(), os.environ.get("LATE"))
with open(os.path.join(os.environ["LAUNCHER_TEST"], "looked"), "a") as file:
    file.write("looked\\n")
"""


@contextmanager
def unlike(stage: Stage, name: str, *, loop: str) -> Iterator[Running]:
    """Run a script that acts before it imports a package, or behind that."""
    site = stage.root / "site-packages"
    vendor = stage.root / "vendor" / "site-packages"
    for folder, source in ((site, "installed"), (vendor, "vendor")):
        folder.mkdir(parents=True)
        (folder / "looks.py").write_text(f"{LOOKS}SOURCE = {source!r}\n")
    (site / "seeds.py").write_text("import torch\ntorch.manual_seed(1)\n")
    (site / "first.py").write_text("import os\nLATE = os.environ.get('LATE')\n")
    script = stage.root / "train.py"
    act = UNLIKE[name].replace("VENDOR", repr(str(vendor)))
    script.write_text(
        f"import sys, first\n{act}import looks\n"
        "import torch\nprint('found', looks.SOURCE, first.LATE, *looks.FOUND, "
        "torch.rand(1).item() if 'seeds' in sys.modules else '', flush=True)\n" + loop
    )
    path = f"{REPOSITORY}{os.pathsep}{site}"
    with running(
        stage, "--replicas", 1, script=script, command=LEISURELY, PYTHONPATH=path
    ) as job:
        stage.wait_for("trains")
        yield job
        stage.mark("free")
        assert job.wait() == 0, job.events
    first, again = [e for e in job.output.splitlines() if e.startswith("[0] found")]
    assert first == again


@pytest.mark.wide
@pytest.mark.parametrize("name", UNLIKE)
def test_an_import_finds_what_it_found(stage: Stage, name: str) -> None:
    """Whatever the script has done before it, or behind it."""
    with unlike(stage, name, loop=DIES) as job:
        if name in ("vendored", "seeds"):
            looked = stage.root / "looked"
            wait_until(lambda: len(looked.read_text().split()) == 2, "a spare")
        else:
            spares_of(job, 1)


@pytest.mark.wide
@pytest.mark.parametrize("name", UNLIKE)
def test_an_import_finds_what_it_found_in_a_rescaling(stage: Stage, name: str) -> None:
    loop = DIES.replace("            os.kill(os.getpid(), signal.SIGKILL)\n", "")
    with unlike(stage, name, loop=loop) as job, ThreadPoolExecutor() as pool:
        asked = pool.submit(job.ask, "scale", 2)
        wait_until(lambda: job.status()["state"] == "rescaling")
        stage.mark("free")
        assert asked.result().returncode == 0, asked.result().stderr
    assert "failed" not in job.events


DIES = """
import os
import signal
from pathlib import Path
import elasticrun
from tests.support.stage import Stage, wait_until

stage = Stage(Path(os.environ["LAUNCHER_TEST"]))
loader = elasticrun.AdaptiveDataLoader(range(60), 6)
for _ in elasticrun.remaining_epochs_until(1):
    for batch in loader:
        if elasticrun.generation() == 0 and loader.batch_index == 3:
            stage.mark("trains")
            wait_until(lambda: stage.has("free"))
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("who", "number"),
    [
        ("launcher", signal.SIGKILL),
        *in_wide(("launcher", signal.SIGHUP)),
        ("forkserver", signal.SIGKILL),
        *in_wide(("spare", signal.SIGKILL)),
    ],
)
def test_nothing_is_left_of_spares_whoever_ends(
    stage: Stage, who: str, number: signal.Signals
) -> None:
    with started(stage) as spared:
        launcher = spared.job.pid
        pids = {"launcher": launcher, "forkserver": forkserver_of(launcher)}
        pids["spare"], _ = spares_of(spared.job, 2)
        os.kill(pids[who], number)
        if who != "launcher":
            check_trains(stage)
            spared.stop()
        spared.free()
        spared.job.wait()
        wait_until_nothing_is_left(stage)


def test_spares_of_every_node_follow_a_crash_on_one(stage: Stage, start: Start) -> None:
    options = ["--", "--hold", "0:9"]
    nodes = [start(*options, nodes="2", command=LEISURELY) for _ in range(2)]
    stage.wait_for("held-0-0", "held-0-1")
    spares = [pid for node in nodes for pid in spares_of(node, 1)]
    os.kill(nodes[0].pid_of(0, 1), signal.SIGKILL)
    assert [node.wait() for node in nodes] == [0, 0]
    assert {nodes[0].pid_of(1, rank) for rank in (0, 1)} == {*spares}
    for epoch in range(NUM_EPOCHS):
        assert stage.delivered(epoch=epoch) == list(range(NUM_SAMPLES))
