"""At a rescaling the new replicas run their script beside those that train."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, CompletedProcess, Popen

import pytest

from elasticrun.launcher import interpreter
from elasticrun.launcher.supervisor.generation import NO_IMPORTS
from elasticrun.replicas.wire import Channel
from elasticrun.testing import read_trace
from tests.launcher.running import (
    LEISURELY,
    REPOSITORY,
    Running,
    check_trains,
    processes_of,
    running,
    variables,
    wait_until_nothing_is_left,
)
from tests.support.stage import DEADLINE, Stage, wait_until
from tests.support.variants import in_wide

pytestmark = pytest.mark.slow

SCRIPT = """
import os, sys
from pathlib import Path
from tests.support.stage import Stage, wait_until

stage = Stage(Path(os.environ["LAUNCHER_TEST"]))
mine = Path("begun")
with mine.open("a") as file:
    file.write(f"{os.getpid()}\\n")
if len(mine.read_text().split()) > int(sys.argv[1]):  # Not the first generation.
    print("prepares", flush=True)
    print("has a warning", file=sys.stderr, flush=True)
    stage.mark("prepares")
    stage.wait_for("prepare")
    if stage.has("fail"):
        raise OSError("the port is taken")
    if stage.has("ask"):
        print("rank", os.environ["RANK"], flush=True)
import elasticrun

loader = elasticrun.AdaptiveDataLoader(range(600), 6)
print("job", elasticrun.generation(), elasticrun.world_size(), flush=True)
for _ in elasticrun.remaining_epochs_until(1_000_000):
    for batch in loader:
        stage.mark(f"trains-{elasticrun.generation()}")
        if elasticrun.generation() == 0 and loader.batch_index >= 3:
            place = f"batch-{loader.batch_index}"
            wait_until(lambda: stage.has("free") or stage.has(place))
"""


class Rescaled:
    """A job of two replicas, and the command that rescales it, which may wait."""

    def __init__(self, job: Running, pool: ThreadPoolExecutor) -> None:
        self.job = job
        self.stage = job.stage
        self._pool = pool

    def scale(self, size: int) -> Future[CompletedProcess[str]]:
        return self._pool.submit(self.job.ask, "scale", size)

    def pids(self, number: int) -> list[int]:
        """Return the replicas that have begun the script, once there are so many."""
        path = self.stage.root / "begun"
        wait_until(lambda: len(path.read_text().split()) >= number, "begun")
        return [int(pid) for pid in path.read_text().split()]

    def free(self) -> None:
        """Let the first generation come to its boundaries, for ever."""
        self.stage.mark("free")

    def stop(self) -> None:
        self.free()
        assert self.job.ask("stop").returncode == 0
        assert self.job.wait() == 75, self.job.events
        wait_until_nothing_is_left(self.stage)

    def finish(self) -> None:
        """Stop the job; each sample of an epoch has been delivered once so far."""
        self.stop()
        counts: dict[int, Counter[int]] = defaultdict(Counter)
        for line in read_trace(self.stage.trace):
            counts[line["epoch"]].update(line["indices"][: line["num_valid"]])
        last = counts.pop(max(counts))
        assert set(last.values()) == {1}
        assert all(count == Counter(range(600)) for count in counts.values())


@pytest.fixture
def rescaled(stage: Stage) -> Iterator[Rescaled]:
    with started(stage) as each:
        yield each


@contextmanager
def started(
    stage: Stage,
    *options: object,
    size: int = 2,
    script: str = SCRIPT,
    **more: str,
) -> Iterator[Rescaled]:
    path = stage.root / "script.py"
    path.write_text(script)
    own = [*options, "--replicas", size, "--", size]
    with (
        running(stage, *own, script=path, command=LEISURELY, **more) as job,
        ThreadPoolExecutor() as pool,
    ):
        stage.wait_for("trains-0")
        wait_until(lambda: job.status()["state"] == "training")
        try:
            yield Rescaled(job, pool)
        finally:
            job.process.kill()  # Or a failed test would wait for `scale`.


def score_of(pid: int) -> int:
    """Return how willingly the kernel kills a process when memory runs out."""
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def test_a_generation_trains_until_all_of_the_next_one_need_the_job(
    rescaled: Rescaled,
) -> None:
    """And who asks for the rank before that is told the new one."""
    rescaled.stage.mark("ask")
    asked = rescaled.scale(3)
    pids = rescaled.pids(5)
    check_trains(rescaled.stage)
    check_trains(rescaled.stage)
    usual = score_of(rescaled.job.pid)
    assert [score_of(pid) for pid in pids] == [usual, usual, 1000, 1000, 1000]
    assert rescaled.job.status()["generation"] == 0
    assert "prepares" not in rescaled.job.output  # It is kept until they begin.
    rescaled.stage.mark("prepare")
    rescaled.free()
    assert asked.result().returncode == 0, asked.result().stderr
    assert [score_of(pid) for pid in pids[2:]] == [usual] * 3
    rescaled.finish()
    assert rescaled.job.output.count("prepares") == 3
    assert rescaled.job.output.count("job 1 3") == 3
    for rank in range(3):
        assert f"[{rank}] rank {rank}" in rescaled.job.output


STARTS = """
    subprocess.run("sleep 1000 >&- 2>&- & echo $! >> helpers", shell=True, check=True)
    stage.mark("prepares")
"""


@pytest.mark.wide
def test_what_waits_keeps_what_it_has_started(stage: Stage) -> None:
    """Though that is an orphan, as is what the old replicas leave behind."""
    script = SCRIPT.replace("import os", "import os, subprocess", 1)
    script = script.replace('\n    stage.mark("prepares")\n', STARTS, 1)
    stage.mark("prepare")
    with started(stage, size=1, script=script) as rescaled:
        rescaled.free()
        assert rescaled.scale(2).result().returncode == 0
        helpers = {int(pid) for pid in (stage.root / "helpers").read_text().split()}
        assert len(helpers) == 2
        assert helpers <= {*processes_of(stage)}
        rescaled.finish()


def test_a_script_that_fails_beside_the_generation_leaves_it_training(
    rescaled: Rescaled,
) -> None:
    """It is told why; and the next rescaling stops the generation first."""
    rescaled.stage.mark("fail")
    rescaled.stage.mark("prepare")
    answer = rescaled.scale(1).result()
    assert answer.returncode == 4
    assert "OSError: the port is taken" in answer.stderr
    assert "stops them first" in answer.stderr
    check_trains(rescaled.stage)
    assert rescaled.job.status()["target"] == 2
    (rescaled.stage.root / "marks" / "fail").unlink()
    (rescaled.stage.root / "marks" / "prepare").unlink()
    asked = rescaled.scale(1)
    rescaled.free()
    before = len(rescaled.pids(3))
    rescaled.pids(before + 1)
    assert "resumed" not in rescaled.job.events
    wait_until(lambda: rescaled.job.status()["generation"] == 1)
    rescaled.stage.mark("prepare")
    assert asked.result().returncode == 0
    rescaled.finish()


@pytest.mark.wide
def test_the_generation_goes_on_when_those_that_prepare_end(
    rescaled: Rescaled,
) -> None:
    """By a rescaling that is taken back, and by a kill."""
    asked = rescaled.scale(1)
    pid = rescaled.pids(3)[2]
    assert rescaled.scale(2).result().returncode == 0
    assert asked.result().returncode != 0
    wait_until(lambda: pid not in processes_of(rescaled.stage), "the end of it")
    check_trains(rescaled.stage)
    with contextlib.suppress(FileNotFoundError):  # It may not have come so far.
        (rescaled.stage.root / "marks" / "prepares").unlink()
    asked = rescaled.scale(1)
    rescaled.stage.wait_for("prepares")
    os.kill(rescaled.pids(4)[3], signal.SIGKILL)
    assert asked.result().returncode == 4
    assert "has a warning" in asked.result().stderr
    assert "before its generation began" in asked.result().stderr
    check_trains(rescaled.stage)
    rescaled.finish()


@pytest.mark.wide
def test_a_successor_that_is_killed_while_the_old_ones_stop_is_replaced(
    rescaled: Rescaled,
) -> None:
    rescaled.stage.mark("prepare")
    asked = rescaled.scale(1)
    wait_until(lambda: rescaled.job.status()["state"] == "rescaling")
    os.kill(rescaled.pids(3)[2], signal.SIGKILL)
    rescaled.job.wait_until_said("a new replica failed, so others are started")
    rescaled.free()
    assert asked.result().returncode == 0
    rescaled.finish()
    assert "crashed" not in rescaled.job.events


@pytest.mark.wide
def test_a_rescaling_taken_back_too_late_is_followed_by_another(
    rescaled: Rescaled,
) -> None:
    """Those that run have been asked to save and exit, and can only do so."""
    rescaled.stage.mark("prepare")
    asked = rescaled.scale(3)
    wait_until(lambda: rescaled.job.status()["state"] == "rescaling")
    taken_back = rescaled.scale(2)
    assert asked.result().returncode != 0
    rescaled.free()
    assert taken_back.result().returncode == 0
    assert "rescaling from 3 to 2 replicas" in taken_back.result().stdout
    assert "generation 1 trains with 2 replicas" in taken_back.result().stdout
    rescaled.finish()


@pytest.mark.wide
def test_a_rescaling_that_is_changed_begins_with_others(rescaled: Rescaled) -> None:
    """Each time: more of them, and then fewer."""
    asked = rescaled.scale(3)
    begun = rescaled.pids(5)[2:]
    for size in (4, 1):
        overruled, asked = asked, rescaled.scale(size)
        assert overruled.result().returncode != 0
        before = 2 + len(begun)
        old, begun = {*begun}, rescaled.pids(before + size)[2:]
        wait_until(lambda old=old: not old & {*processes_of(rescaled.stage)}, "its end")
        check_trains(rescaled.stage)
    rescaled.stage.mark("prepare")
    rescaled.free()
    assert asked.result().returncode == 0
    rescaled.finish()


def test_a_crash_meanwhile_is_followed_by_those_that_prepare(
    rescaled: Rescaled,
) -> None:
    asked = rescaled.scale(1)
    first, _, successor = rescaled.pids(3)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: rescaled.job.status()["generation"] == 1)
    rescaled.stage.mark("prepare")
    assert asked.result().returncode == 0
    assert rescaled.job.status()["members"][0]["pid"] == successor
    rescaled.stop()


@pytest.mark.parametrize("number", [*in_wide(signal.SIGTERM), signal.SIGKILL])
def test_the_launchers_end_is_that_of_those_that_prepare(
    rescaled: Rescaled, number: int
) -> None:
    rescaled.scale(1)
    rescaled.pids(3)
    os.kill(rescaled.job.pid, number)
    rescaled.free()
    rescaled.job.wait()
    wait_until_nothing_is_left(rescaled.stage)


def test_a_stop_does_not_wait_for_those_that_prepare(rescaled: Rescaled) -> None:
    rescaled.scale(1)
    pid = rescaled.pids(3)[2]
    asked = rescaled._pool.submit(rescaled.job.ask, "stop")
    wait_until(lambda: pid not in processes_of(rescaled.stage), "the end of it")
    rescaled.free()
    assert asked.result().returncode == 0
    assert rescaled.job.wait() == 75
    assert rescaled.stage.committed()
    wait_until_nothing_is_left(rescaled.stage)


USES_GPU = """
import torch
torch.cuda.init()
first = mine.read_text().split()[0]
if first != str(os.getpid()):
    is_beside = os.path.exists(f"/proc/{first}")
    print("used", "beside" if is_beside else "after", flush=True)
import elasticrun
elasticrun.init(backend="gloo")
"""


@pytest.mark.parametrize("start", ["fork", "exec"])
@pytest.mark.wide
def test_a_gpu_is_not_used_beside_the_generation(stage: Stage, start: str) -> None:
    """The GPUs are pretended."""
    pretended = REPOSITORY / "tests" / "support" / "pretended_gpus"
    path = [pretended, pretended / "site-packages", REPOSITORY]
    script = SCRIPT.replace("import elasticrun\n", USES_GPU, 1)
    more = {"PYTHONPATH": os.pathsep.join(map(str, path)), "NUM_GPUS": "1"}
    stage.mark("prepare")
    options = ["--start", start]
    with started(stage, *options, size=1, script=script, **more) as rescaled:
        rescaled.free()
        assert rescaled.scale(2).result().returncode == 0
        rescaled.finish()
        assert rescaled.job.output.count("used after") == 2
        assert "used beside" not in rescaled.job.output


@contextmanager
def replica(
    stage: Stage, script: str, **more: object
) -> Iterator[tuple[Channel, Popen[str]]]:
    """Begin a replica that rehearses, and let the test be its launcher."""
    path = stage.root / "script.py"
    path.write_text(script)
    own = {"RANK": "3", "MASTER_PORT": "1234", "ELASTICRUN_CHECKPOINT_DIR": "there"}
    order = {
        "type": "start",
        "is_rehearsed": True,
        "launcher": os.getpid(),
        "generation": 0,
        "rank": 3,
        "world_size": 4,
        "num_threads": 1,
        "kind": "script",
        "target": str(path),
        "argv": [str(path)],
        "path": [],
        "environment": variables(stage, **own),
        "runs_ahead": True,
        "unknown": [],
        "imports": NO_IMPORTS,
        **more,
    }
    connection, other = socket.socketpair()
    with connection, other:
        channel = Channel(connection)
        channel.send(order)
        with Popen(
            interpreter.command("launcher.replica.main", "begin", other.fileno()),
            pass_fds=[other.fileno()],
            env=variables(stage),
            stdout=PIPE,
            text=True,
        ) as process:
            try:
                yield channel, process
            finally:
                process.kill()  # Or a failed test would wait for it.


def said_at_the_end(process: Popen[str]) -> str:
    said, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0
    return said


IMPORTS_AHEAD = """
import gc, sys
print("package" in sys.modules)
import package
print(any(each is package.made for each in gc.get_objects()))
"""


def imports_of(stage: Stage, *, checksum: int = 0) -> dict[str, object]:
    """Make an installed package; return what a replica that has it would tell."""
    file = stage.root / "site-packages" / "package.py"
    file.parent.mkdir()
    file.write_text("class Made: pass\nmade = Made()\n")
    modules = [("package", checksum or zlib.crc32(str(file).encode()))]
    return {"modules": modules, "path": [str(file.parent)], "variables": []}


def test_what_is_imported_ahead_is_left_out_of_every_look_at_all_objects(
    stage: Stage,
) -> None:
    imports = imports_of(stage)
    with replica(stage, IMPORTS_AHEAD, imports=imports) as (channel, process):
        channel.send({"type": "begin", "generation": 5, "environment": {}})
        assert said_at_the_end(process) == "True\nFalse\n"


@pytest.mark.parametrize("runs_ahead", [True, False])
def test_a_successor_ends_whose_program_might_find_another_package(
    stage: Stage, runs_ahead: bool
) -> None:
    """It neither runs the program, nor waits for its generation."""
    given = {"imports": imports_of(stage, checksum=1), "runs_ahead": runs_ahead}
    with replica(stage, IMPORTS_AHEAD, **given) as (channel, process):
        assert channel.receive_one() == {"type": "unlike"}
        said, _ = process.communicate(timeout=DEADLINE)
        assert (said, process.returncode) == ("", 1)


def test_an_order_and_the_begin_may_come_together(stage: Stage) -> None:
    """As they do to a replica that is slow to start."""
    script = "import os\nprint(os.environ['RANK'])\n"
    with replica(stage, script) as (channel, process):
        channel.send({"type": "begin", "generation": 5, "environment": {}})
        assert said_at_the_end(process) == "3\n"


@pytest.mark.parametrize(
    ("name", "value"),
    [("RANK", "0"), ("MASTER_PORT", "1234"), ("ELASTICRUN_CHECKPOINT_DIR", "there")],
)
def test_whoever_asks_for_what_a_generation_has_waits_for_it(
    stage: Stage, name: str, value: str
) -> None:
    mark = stage.root / "marks" / "asked"
    script = f"import os\nprint(os.environ[{name!r}])\nopen({str(mark)!r}, 'w')\n"
    with replica(stage, script) as (channel, process):
        message = channel.receive_one()
        assert message is not None
        assert message["type"] == "waiting"
        assert not stage.has("asked")
        environment = {name: value}
        channel.send({"type": "begin", "generation": 5, "environment": environment})
        assert said_at_the_end(process) == f"{value}\n"
