"""`elasticrun run`: from the start of a job to its exit code, without any fault."""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.launcher.program import NUM_EPOCHS, NUM_SAMPLES
from tests.launcher.running import (
    WITHOUT_TORCH,
    elasticrun,
    processes_of,
    run,
    running,
    split,
)
from tests.support.stage import Stage
from tests.support.variants import in_wide

pytestmark = pytest.mark.slow

SHOW = """
import json, os, sys
import helper
print(json.dumps({
    "name": __name__, "file": __file__, "argv": sys.argv, "path": sys.path[0],
    "main": sys.modules["__main__"].__dict__ is globals(), "helper": helper.VALUE,
    "rank": os.environ["RANK"], "world_size": os.environ["WORLD_SIZE"],
    "parent": os.getppid(), "stdin": sys.stdin.read(), "hash": hash("text"),
}))
sys.stdout.write("no line end")
"""


@pytest.fixture
def show(stage: Stage) -> Path:
    folder = stage.root / "scripts"
    folder.mkdir()
    (folder / "helper.py").write_text("VALUE = 7\n")
    (folder / "show.py").write_text(SHOW)
    return folder / "show.py"


def printed(output: str, rank: int) -> list[str]:
    start = f"[{rank}] "
    return [
        line.removeprefix(start)
        for line in output.splitlines()
        if line.startswith(start)
    ]


def hash_of_text() -> int:
    """Return what every Python hashes "text" to with the seed of each job."""
    command = [sys.executable, "-c", "print(hash('text'))"]
    variables = {"PYTHONHASHSEED": "0", **os.environ}
    return int(subprocess.check_output(command, env=variables))


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_a_script_runs_as_python_would_run_it(
    stage: Stage, show: Path, start: str
) -> None:
    options = ["--replicas", 2, "--start", start, "--", "--lr", "0.1"]
    with running(stage, *options, script=show) as job:
        assert job.wait() == 0, job.events
    for rank in (0, 1):
        text, rest = printed(job.output, rank)
        assert rest == "no line end"
        assert json.loads(text) == {
            "name": "__main__",
            "file": str(show),
            "argv": [str(show), "--lr", "0.1"],
            "path": str(show.parent),
            "main": True,
            "helper": 7,
            "rank": str(rank),
            "world_size": "2",
            "parent": job.pid,
            "stdin": "",
            "hash": hash_of_text(),
        }
        log = stage.checkpoints / "logs" / "generation-0000" / f"rank-{rank}.log"
        assert log.read_text() == f"{text}\nno line end\n"


ELSEWHERE = """
import inspect, json, os, sys
os.chdir("/")

def source():
    return inspect.getsource(sys.modules["__main__"])

print(json.dumps([__file__, __loader__.get_filename("__main__"), sys.argv]))
print(len(source()))
raise ValueError("the loss is not a number")
"""


def test_a_script_given_by_a_relative_path_knows_where_it_is(stage: Stage) -> None:
    script = stage.root / "train.py"
    script.write_text(ELSEWHERE)
    options = ["--replicas", 1, "--max-restarts", 0, *WITHOUT_TORCH]
    arguments = ["--", "--", "-x", "--"]
    with running(stage, *options, *arguments, script="./train.py") as job:
        assert job.wait() == 1
    told, length = printed(job.output, 0)
    assert json.loads(told) == [
        str(script),
        str(script),
        ["./train.py", "-x", "--"],
    ]
    assert int(length) == len(ELSEWHERE)
    assert f'File "{script}", line 10, in <module>' in job.events
    assert "    raise ValueError(" in job.events


def test_a_module_runs_as_python_would_run_it(stage: Stage) -> None:
    package = stage.root / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text(
        "import sys; from . import __name__ as p; print(p, __name__, sys.argv)"
    )
    options = ["--replicas", 1, *WITHOUT_TORCH, "-m"]
    with running(stage, *options, script="package.train") as job:
        assert job.wait() == 0, job.events
    [line] = printed(job.output, 0)
    assert line == f"package __main__ {[str(package / 'train.py')]}"


def test_of_a_module_that_is_none_python_says_what_is_missing(stage: Stage) -> None:
    with running(stage, "--replicas", 1, "-m", script="no_such_module") as job:
        assert job.wait() == 1, job.events
    assert "No module named no_such_module" in job.events


def test_a_job_ends_says_that_it_has_and_starts_anew(stage: Stage) -> None:
    assert run(stage, "--replicas", 3).wait() == 0
    stage.check_exactly_once(NUM_SAMPLES, num_epochs=NUM_EPOCHS)

    again = run(stage, "--replicas", 2)
    assert again.wait() == 0
    assert "test is finished" in again.events
    assert "--fresh" in again.events
    assert again.output.count("finished with") == 3

    anew = run(stage, "--replicas", 1, "--fresh")
    assert anew.wait() == 0
    assert anew.output.count("finished with 1") == 1
    moved = stage.checkpoints.with_name("checkpoints.old-1")
    assert (moved / "checkpoint-00000001").is_dir()
    assert (stage.checkpoints / "checkpoint-00000001").is_dir()


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_are_none_to_trip_over(
    stage: Stage, closed: str
) -> None:
    script = stage.root / "script.py"
    script.write_text("print('up')")
    before = ("bash", "-c", f'exec "$@" {closed}', "bash")
    job = run(stage, "--replicas", 1, script=script, before=before)
    assert job.wait() == 0
    assert job.output == ("" if " >&-" in f" {closed}" else "[0] up\n")
    log = stage.checkpoints / "logs" / "generation-0000" / "rank-0.log"
    assert log.read_text() == "up\n"


def test_the_directory_is_named_after_the_script(stage: Stage, show: Path) -> None:
    code = (
        "import os, sys; del os.environ['ELASTICRUN_CHECKPOINT_DIR'];"
        "from elasticrun.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    from tests.launcher.running import variables

    finished = subprocess.run(
        [
            sys.executable,
            "-c",
            code,
            "run",
            "--replicas",
            "1",
            *WITHOUT_TORCH,
            str(show),
        ],
        env=variables(stage),
        cwd=stage.root,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    folder = stage.root / "show-checkpoints"
    assert f"checkpoints in {folder}, logs in {folder / 'logs'}" in finished.stderr
    assert (folder / "logs" / "generation-0000" / "rank-0.log").exists()


def test_a_program_can_stop_itself(stage: Stage) -> None:
    job = run(stage, "--replicas", 2, "--", "--at", "0:1:9:stop")
    assert job.wait() == 75
    assert "stopped by itself with exit code 75; checkpoint 1 is saved" in job.events
    assert run(stage, "--replicas", 1, "--", "--at", "0:1:9:stop").wait() == 0
    stage.check_exactly_once(NUM_SAMPLES, num_epochs=NUM_EPOCHS)


def test_threads_that_start_at_import_make_it_exec(stage: Stage, show: Path) -> None:
    """Not by the script's imports, which then are left out: by what torch does."""
    site = stage.root / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import sys, threading\n"
        "if 'forkserver' in ''.join(sys.orig_argv):\n"
        "    thread = threading.Thread(target=threading.Event().wait, daemon=True)\n"
        "    thread.start()\n"
    )
    from tests.launcher.running import REPOSITORY

    path = f"{site}{os.pathsep}{REPOSITORY}"
    with running(stage, "--replicas", 1, script=show, PYTHONPATH=path) as job:
        assert job.wait() == 0, job.events
    assert "importing torch started 1 thread; " in job.events
    assert json.loads(printed(job.output, 0)[0])["helper"] == 7


def test_imports_that_start_threads_are_left_to_the_replicas(stage: Stage) -> None:
    site = stage.root / "site"
    site.mkdir()
    (site / "threaded.py").write_text(
        "import threading\n"
        "thread = threading.Thread(target=threading.Event().wait, daemon=True)\n"
        "thread.start()\n"
    )
    script = stage.root / "script.py"
    script.write_text("import sys, threaded, torch; print(sys.orig_argv[2][:8])")
    from tests.launcher.running import REPOSITORY

    path = f"{site}{os.pathsep}{REPOSITORY}"
    with running(stage, "--replicas", 1, script=script, PYTHONPATH=path) as job:
        assert job.wait() == 0, job.events
    assert "interpreter" not in job.events


def test_what_cannot_be_is_refused_before_anything_starts(stage: Stage) -> None:
    for options, text in (
        (["no-such.py"], "no such script"),
        (["--replicas", "0", __file__], "--replicas 0"),
        (["--nproc-per-node", "2", "--nnodes", "many", __file__], "--nodes many"),
        ([], "following arguments are required: SCRIPT\n"),
        (["--replicas", "4:2", __file__], "MIN <= MAX"),
        (["--grace", "soon", __file__], "--grace is 'soon'; give the seconds above 0."),
        (["--rdzv-endpoint", "host", __file__], "Add --nodes MIN:MAX"),
    ):
        refused = elasticrun(stage, "run", *options)
        assert refused.returncode == 2
        assert text in refused.stderr
    assert not stage.checkpoints.exists()


@pytest.mark.parametrize(
    ("option", "place"),
    [
        ("--checkpoint-dir", "file"),
        ("--log-dir", "/proc/nope"),
        *in_wide(("--checkpoint-dir", "/proc/nope"), ("--log-dir", "file/below")),
    ],
)
def test_a_directory_that_cannot_be_is_refused_before_anything_starts(
    stage: Stage, option: str, place: str
) -> None:
    (stage.root / "file").touch()
    refused = elasticrun(stage, "run", option, place, __file__)
    assert refused.returncode == 2
    [line] = refused.stderr.splitlines()
    assert str(stage.root / place) in line
    assert option in line


def test_fresh_moves_nothing_that_is_not_the_jobs(stage: Stage) -> None:
    stage.checkpoints.mkdir()
    (stage.checkpoints / "thesis.tex").touch()
    refused = elasticrun(stage, "run", "--fresh", __file__)
    assert refused.returncode == 2
    assert "thesis.tex" in refused.stderr
    assert (stage.checkpoints / "thesis.tex").exists()


def test_fresh_moves_nothing_for_a_job_that_cannot_start(stage: Stage) -> None:
    own = stage.checkpoints / "checkpoint-00000001"
    own.mkdir(parents=True)
    refused = elasticrun(stage, "run", "--fresh", "--log-dir", "/proc/nope", __file__)
    assert refused.returncode == 2
    assert "give another --log-dir" in refused.stderr
    assert own.exists()


def test_options_end_where_the_program_begins() -> None:
    assert split(("--replicas", 2, "--", "--x")) == (["--replicas", 2], ["--x"])


def test_on_one_machine_nothing_listens_but_on_loopback(stage: Stage) -> None:
    options = ["--replicas", 2, "--", "--hold", "0:9", "--workers", 1]
    with running(stage, *options) as job:
        job.wait_until_held(0, 2)
        listening = [
            ipaddress.ip_address(connection.laddr.ip)
            for pid in processes_of(stage)
            for connection in psutil.Process(pid).net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        stage.mark("go-0")
        assert job.wait() == 0
    assert listening  # The stores, and gloo.
    for address in listening:
        plain = getattr(address, "ipv4_mapped", None) or address
        assert plain.is_loopback, listening
