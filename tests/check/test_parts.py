"""The parts of a check that need no replicas."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from elasticrun.__main__ import main
from elasticrun.check.baseline import samples_of
from elasticrun.check.blame import Detective
from elasticrun.check.comparing import Mask, compare_fields, compare_files
from elasticrun.check.replica.fields import fields_of_state, flatten
from elasticrun.check.runs.checked_run import CheckedRun
from elasticrun.check.runs.moments import Key, LineChange
from elasticrun.check.runs.places import LoopPlace, RestartPlace, parse_restart_place
from elasticrun.check.runs.plan import Limits, Plan, decode_plan
from elasticrun.check.runs.routes import Route, straight
from elasticrun.check.runs.source import (
    WORK,
    copy_source,
    find_source,
    original_path,
    own_arguments,
)
from elasticrun.check.runs.sweep import first_place_in, places_to_try
from elasticrun.check.tolerance import distance, is_within
from elasticrun.check.waiting import waits_of
from elasticrun.checkpoint.states.stateful import StatefulState
from elasticrun.launcher.options import OptionError

LOOPS = [LoopPlace(epoch, loop, True, 4) for epoch in range(3) for loop in range(2)]


# Places and routes.


@pytest.mark.parametrize("text", ["0:1:3", "2:end", "after3:0:2"])
def test_a_place_is_read_as_it_is_written(text: str) -> None:
    assert str(parse_restart_place(text)) == text


@pytest.mark.parametrize(
    "text", ["", "1", "0:0", "0:0:0", "after1:end", "a:b:c", "-1:0:1"]
)
def test_what_is_no_place(text: str) -> None:
    with pytest.raises(ValueError, match=r"--at"):
        parse_restart_place(text)


def test_a_sweep_restarts_at_the_edges_of_loops() -> None:
    places = places_to_try([*LOOPS, LoopPlace(3, 0, False, 2)], [0, 1, 2])
    texts = list(map(str, places))
    assert {"0:0:1", "0:0:3", "0:0:4", "0:1:1", "2:1:4", "0:end", "2:end"} <= set(texts)
    assert {"after3:0:1", "after3:0:2"} <= set(texts)
    assert len(set(texts)) == len(texts)
    assert texts == list(
        map(str, places_to_try([*LOOPS, LoopPlace(3, 0, False, 2)], [0, 1, 2]))
    )


def test_the_first_batch_of_a_loop() -> None:
    assert first_place_in(LOOPS, 1, 1) == RestartPlace(1, 1, 1)
    assert first_place_in(reversed(LOOPS), None, 0) == RestartPlace(2, 0, 1)
    assert first_place_in(LOOPS, 5, 0) is None


def test_a_route_says_how_it_is_taken() -> None:
    route = Route((1, 2, 1), (RestartPlace(0, 1, 2), RestartPlace(1, -1, 0)))
    assert route.options() == [
        "--at", "0:1:2", "--at", "1:end", "--replicas", "1,2,1",
    ]  # fmt: skip
    assert Route((2, 2), (RestartPlace(0, 0, 1),), is_killed=True).options() == [
        "--at", "0:0:1", "--replicas", "2", "--kill",
    ]  # fmt: skip
    assert straight(3).options() == ["--replicas", "3"]


def test_a_plan_survives_its_way_to_a_replica() -> None:
    plan = Plan(
        "work", ("home",), "records", "checkpoints", 1,
        until=RestartPlace(0, 1, 2), resumed=RestartPlace(0, 0, 1),
    )  # fmt: skip
    assert decode_plan(plan.encode()) == plan


@pytest.mark.parametrize(
    ("num_samples", "expected"),
    [(61, 29), (64, 32), (32, 32), (30, 30), (33, 25), (5, 5)],
)
def test_a_cut_loop_keeps_the_size_of_its_last_batch(
    num_samples: int, expected: int
) -> None:
    assert Limits(max_batches=4).samples(num_samples, 8) == expected
    assert Limits(max_batches=0).samples(num_samples, 8) == num_samples


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--at", "first"), "EPOCH:LOOP:BATCH"),
        (("--at", "0:0:0"), "counted from 1"),
        (("--replicas", "none"), "numbers from 1 up"),
        (("--replicas", "1,2,3", "--at", "0:0:1"), "2 generations"),
        (("--max-batches", "-1"), "or 0 for all"),
        (("--link", "data"), "there is no such file or folder"),
        (("--hang-timeout", "soon"), "give seconds above 0"),
    ],
)
def test_wrong_usage_says_what_is_right(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(["check", "--format", "json", *options, "train.py"]) == 2
    assert text in json.loads(capsys.readouterr().out)["problem"]


# Comparing.


def test_samples_of_loops_in_a_body_are_told_apart(tmp_path: Path) -> None:
    def line(generation: int, indices: list[int], *inside: int) -> str:
        return json.dumps(
            {"generation": generation, "rank": 0, "epoch": 0, "loop": 1, "batch": 0,
             "micro": 0, "indices": indices, "num_valid": len(indices)}
            | ({"inside": inside} if inside else {})
        ) + "\n"  # fmt: skip

    run = CheckedRun(straight(1), tmp_path)
    run.trace.mkdir()
    (run.trace / "0-0.jsonl").write_text(line(0, [3, 4]) + line(0, [7], 0, 0))
    # The outer batch comes again after a kill, and with it the loop in its body.
    again = line(1, [3, 4]) + line(1, [7], 0, 0) + line(1, [8], 0, 1)
    (run.trace / "1-0.jsonl").write_text(again)
    assert samples_of(run) == {
        (0, "1", 0): [3, 4], (0, "1.0.0", 0): [7], (0, "1.0.1", 0): [8],
    }  # fmt: skip


def test_nested_values_become_fields() -> None:
    values = {"groups": [{"lr": 0.1, "betas": (0.9, 0.99)}], "steps": [1, 2], "x": None}
    assert dict(flatten("opt", values)) == {
        "len(opt.groups)": 1,
        "opt.groups[0].lr": 0.1,
        "opt.groups[0].betas": [0.9, 0.99],
        "opt.steps": [1, 2],
        "opt.x": None,
    }


def test_the_distance_of_sketches_is_that_of_tensors() -> None:
    generator = torch.Generator().manual_seed(3)
    first = torch.randn(50_000, generator=generator)
    moved = first + 1e-3 * torch.randn(50_000, generator=generator)
    nets = []
    for values in (first, moved):
        net = torch.nn.Linear(50_000, 1, bias=False)
        net.weight.data.copy_(values[None])
        nets.append(fields_of_state(StatefulState("net", net))["net.weight"])
    true = float((first.double() - moved.double()).norm())
    assert true / 2 < distance(*nets) < true * 2
    assert distance(nets[0], nets[0]) == 0.0


def test_tolerance_grows_with_what_rounding_did() -> None:
    assert is_within(1.0, 1.003, 0.001)
    assert not is_within(1.0, 1.01, 0.001)
    assert not is_within(0.1, 0.1000001, 0.0)
    assert is_within(0.1, 0.1 + 1e-16, 0.0)
    assert not is_within(3, 4, 0.0)
    assert not is_within("a", "b", 1.0)


def test_ignored_fields_are_not_compared() -> None:
    one, other = {"a.b": 1, "a.c": 2}, {"a.b": 3, "a.c": 4}
    assert [d.name for d in compare_fields(one, other, Mask(("*.b",)), None)] == ["a.c"]


def test_files_are_compared_as_far_as_they_can_be() -> None:
    one = {"log": {"lines": 2, "size": 9, "hash": "x"}, "net": {"size": 5, "hash": "y"}}
    other = {
        "log": {"lines": 3, "size": 12, "hash": "z"},
        "net": {"size": 5, "hash": "u"},
    }

    def names(**options: bool) -> list[str]:
        return [d.name for d in compare_files(one, other, Mask(), **options)]

    assert names() == ["file:log", "file:net"]
    assert names(is_rounded=True) == ["file:log"]
    assert names(is_killed=True) == []
    assert compare_files(one, one, Mask()) == []
    (gone,) = compare_files(
        one, {"log": None, "net": one["net"]}, Mask(), is_killed=True
    )
    assert gone.name == "file:log"


def test_moments_have_words() -> None:
    assert Key("leave", 2, 1).describe() == "the end of loop 1 of epoch 2"
    assert Key("exit").describe() == "the end of the program"


# Scratch copies.


def test_a_scratch_copy_has_what_the_program_needs(tmp_path: Path) -> None:
    home, target = tmp_path / "home", tmp_path / "elasticrun-run-0" / "work"
    for name in ("train.py", "lib/part.py", ".git/HEAD", "data/big.bin"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(name)
    (home / "job/checkpoint-00000001").mkdir(parents=True)
    (home / "job/checkpoint-00000001/manifest.json").touch()
    (tmp_path / "elsewhere").mkdir()
    (home / "images").symlink_to(tmp_path / "elsewhere")
    script = str(home / "train.py")
    source = find_source(script, directory=str(home), linked=["data"])
    copied = copy_source(source, target)
    assert copied == target / "train.py"
    names = sorted(str(path.relative_to(target)) for path in target.rglob("*"))
    assert names == ["data", "images", "lib", "lib/part.py", "train.py"]
    assert (target / "data").is_symlink()
    assert original_path(str(copied), source) == script
    assert original_path("/usr/lib/other.py", source) == "/usr/lib/other.py"
    arguments = ["--out", f"{home}/x.pt", f"--log={home}/y", "/else"]
    assert own_arguments(arguments, source, target) == (
        "--out", f"{target}/x.pt", f"--log={target}/y", "/else",
    )  # fmt: skip


def test_a_directory_that_is_too_large_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "big").write_bytes(b"x" * 4096)
    monkeypatch.setattr("elasticrun.check.runs.source._MOST_BYTES", 1024)
    with pytest.raises(OptionError, match=r"--link data"):
        find_source(str(tmp_path / "train.py"), directory=str(tmp_path), linked=[])
    find_source(str(tmp_path / "train.py"), directory=str(tmp_path), linked=["data"])


GUARDED = """
import os, sys
from elasticrun.check.replica.guard import OutsideOfScratchError, guard_folders
guard_folders([sys.argv[1]], scratch=sys.argv[2])
open(sys.argv[2] + "/own", "w").close()
open(sys.argv[1] + "/kept").close()
for act in (
    lambda: open(sys.argv[1] + "/kept", "a"),
    lambda: os.remove(sys.argv[1] + "/kept"),
    lambda: os.rename(sys.argv[2] + "/own", sys.argv[1] + "/kept"),
    lambda: os.mkdir(sys.argv[1] + "/new"),
    lambda: open(sys.argv[2] + "/link", "w"),
):
    try:
        act()
    except OutsideOfScratchError:
        print("refused")
"""


def test_what_is_the_users_is_guarded(tmp_path: Path) -> None:
    home, scratch = tmp_path / "home", tmp_path / "scratch"
    home.mkdir()
    scratch.mkdir()
    (home / "kept").write_text("mine")
    (scratch / "link").symlink_to(home / "kept")
    code = [sys.executable, "-c", GUARDED, str(home), str(scratch)]
    process = subprocess.run(code, capture_output=True, text=True, check=False)
    assert process.stdout.split() == ["refused"] * 5, process.stderr
    assert (home / "kept").read_text() == "mine"


# Hangs.


def test_stacks_tell_where_each_replica_waits(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    script = str(tmp_path / "train.py")
    source = find_source(script, directory=str(tmp_path), linked=[])
    copy = f"/tmp/elasticrun-check-x/elasticrun-run-3/{WORK}/train.py"
    torch_file = "/usr/lib/torch/distributed/distributed_c10d.py"
    lines = [
        "Thread 0x1 (most recent call first):",
        '  File "/usr/lib/threading.py", line 9 in wait',
        "",
        "Current thread 0x2 (most recent call first):",
        f'  File "{torch_file}", line 40 in all_reduce',
        '  File "/usr/lib/torch/distributed/c10d_logger.py", line 83 in wrapper',
        f'  File "{copy}", line 12 in train',
        f'  File "{copy}", line 20 in <module>',
        '  File "/usr/elasticrun/launcher/replica/main.py", line 130 in _run_script',
    ]
    first, second = waits_of({0: lines}, 2, source)
    assert first.describe() == f"rank 0 waits in all_reduce at {script}:12 in train"
    assert second.describe() == "rank 1 said nothing"


# Causes.


def test_what_is_drawn_with_a_seed_before_the_first_loop_is_no_cause(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "torch.manual_seed(0)\n"
        "net = nn.Linear(4, 3)\n"
        "shift = random.random()\n"
        "noise = torch.randn(3)\n"
    )
    source = find_source(str(script), directory=str(tmp_path), linked=[])
    detective = Detective(source, [], mask=Mask(), drawing={"A", "B"})
    run = CheckedRun(straight(1), tmp_path)

    def lines_blamed(*drawn: tuple[str, str, int]) -> list[int]:
        lines = [
            LineChange(f"random.{name}", zone, str(script), line, 1)
            for name, zone, line in drawn
        ]
        return [cause.line for cause in detective.causes(run, [], lines)]

    assert lines_blamed(("torch", "A", 1), ("torch", "A", 2)) == [0]  # Unknown.
    assert lines_blamed(("torch", "A", 2)) == [2]
    assert lines_blamed(("torch", "A", 1), ("python", "A", 3)) == [3]
    assert lines_blamed(("torch", "A", 1), ("torch", "B", 4)) == [4]
