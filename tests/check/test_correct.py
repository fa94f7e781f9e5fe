"""Correct scripts pass, and what is the user's stays as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticrun.check.report import as_text
from elasticrun.testing import assert_restart_equivalent
from tests.check.checking import ROOT, SCRIPTS, check

pytestmark = pytest.mark.slow(30)


def everything_in(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_correct_script_through_all_stages(tmp_path: Path) -> None:
    (tmp_path / "best.pt").write_bytes(b"the user's own")
    options = ("--replicas", "1,2", "--max-epochs", 2, "--max-batches", 2, "--kill")
    found = check(tmp_path, "correct.py", *options)
    assert found.code == 0, found.report
    stages = [stage.partition(":")[0] for stage in found.report.stages]
    assert stages == ["baseline", "sweep", "replicas", "kill"]
    num_runs = found.report.num_runs
    assert num_runs <= 10
    assert f"run {num_runs}: killed after a checkpoint at epoch 0, loop" in found.said
    assert "the check about ten times that at most" in found.said
    script = (SCRIPTS / "correct.py").read_bytes()
    assert everything_in(tmp_path) == {
        "best.pt": b"the user's own",
        "correct.py": script,
    }


@pytest.mark.wide
def test_what_is_seldom_and_correct_is_equal(tmp_path: Path) -> None:
    limits = ("--max-epochs", 3, "--max-batches", 4)
    found = check(tmp_path, "corners.py", "--replicas", "1,2", *limits)
    assert found.code == 0, found.report


@pytest.mark.wide
def test_batch_sizes_are_not_decided_in_a_check(tmp_path: Path) -> None:
    options = ("--at", "0:0:2", "--max-epochs", 1, "--max-batches", 15)
    found = check(tmp_path, "decides.py", *options)
    assert found.code == 0, found.report


@pytest.mark.wide
def test_the_digits_example(tmp_path: Path) -> None:
    (tmp_path / "digits.py").write_bytes((ROOT / "examples/digits.py").read_bytes())
    kept = tmp_path / "digits-checkpoints"
    options = ("--at", "0:1:1")
    limits = ("--max-epochs", 1, "--max-batches", 1)
    arguments = ("--", "--checkpoint-dir", kept)
    found = check(tmp_path, "digits.py", *options, *limits, *arguments)
    assert found.code == 0, found.report
    assert not kept.exists()


@pytest.mark.wide
def test_from_pytest(tmp_path: Path) -> None:
    for name in ("correct.py", "replayed.py"):
        (tmp_path / name).write_bytes((SCRIPTS / name).read_bytes())
    options = {"at": "0:1:1", "max_epochs": 1, "max_batches": 2, "directory": tmp_path}
    assert_restart_equivalent(tmp_path / "correct.py", **options)
    with pytest.raises(AssertionError) as error:
        assert_restart_equivalent(tmp_path / "replayed.py", **options)
    lines = str(error.value).splitlines()
    assert lines[0].endswith("elasticrun check ended with exit code 1")
    once, twice = "1 lines, 16 bytes", "2 lines, 32 bytes"
    assert lines[4:7] == [
        "different when restarted at epoch 0, loop 1, batch 1, 1 replica",
        f"  file:log.txt {once} != {twice} at the end of loop 1 of epoch 0",
        f"  replayed code in zone B changed file:log.txt {once} -> {twice}",
    ]
    assert ": ER104: file appended in zone B" in lines[7]
    options_of_it = "--at 0:1:1 --replicas 1 --max-epochs 1 --max-batches 2"
    assert f"  reproduce: elasticrun check {options_of_it} " in str(error.value)


def test_writing_to_the_users_own_files_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "notes.txt"
    target.write_text("mine")
    (tmp_path / "train.py").write_text(
        f"import elasticrun\nopen({str(target)!r}, 'w').write('gone')\n"
    )
    found = check(tmp_path, "train.py", "--replicas", 1)
    assert found.code == 4
    assert "outside of the copy" in found.report.problem
    assert target.read_text() == "mine"


@pytest.mark.wide
def test_a_place_that_is_never_reached(tmp_path: Path) -> None:
    options = ("--at", "7:0:1", "--max-epochs", 1, "--max-batches", 1)
    found = check(tmp_path, "correct.py", *options)
    assert found.code == 2
    assert "never came to 7:0:1" in found.report.problem


def test_a_script_without_loops_cannot_be_checked(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("import elasticrun\nelasticrun.rank()\n")
    found = check(tmp_path, "empty.py")
    assert found.code == 2
    assert "nothing to restart in" in found.report.problem


@pytest.mark.wide
def test_dropout_is_no_mistake_and_the_verdict_says_what_was_not_compared(
    tmp_path: Path,
) -> None:
    options = ("--replicas", "1,2", "--max-epochs", 1, "--max-batches", 2)
    found = check(tmp_path, "dropout.py", *options)
    assert found.code == 0, found.report
    verdict = as_text(found.report).splitlines()[-1]
    assert verdict.startswith("equal after 3 restarts with 1 replica; not compared: 2 ")
    assert "model.0.weight differs by more than rounding without any" in verdict
    places = ("--at", "0:0:1", "--at", "0:0:2", "--replicas", "1,2,1")
    found = check(tmp_path, "dropout.py", *places, "--max-epochs", 1)
    assert found.code == 0, found.report
    verdict = as_text(found.report).splitlines()[-1]
    assert verdict.startswith("not compared: 2 replicas in place of 1: model.0.weight ")


@pytest.mark.wide
def test_virtual_replicas_are_compared_bit_by_bit(tmp_path: Path) -> None:
    text = (SCRIPTS / "dropout.py").read_text()
    script, options = tmp_path / "virtual.py", ("--max-epochs", 1, "--max-batches", 2)
    begin = "import elasticrun\n\nelasticrun.init(virtual_replicas=2)\n"
    text = text.replace("torch.manual_seed(0)\n", f"{begin}torch.manual_seed(0)\n")
    script.write_text(text)
    found = check(tmp_path, "virtual.py", *options)
    assert found.code == 0, found.report
    assert found.report.stages[-1] == "replicas: 2 to 1"
    assert not found.report.not_compared
    assert found.report.notes == ["3 replicas are more than 2 virtual ones"]
    scaled = "(1 + 1e-9 * elasticrun.world_size()) * float("  # Rounding explains it.
    script.write_text(text.replace("score.error = float(", f"score.error = {scaled}"))
    found = check(tmp_path, "virtual.py", *options, "--replicas", "1,2")
    assert found.code == 1, found.report
    assert "another number of replicas changes" in as_text(found.report)


@pytest.mark.wide
def test_restarts_with_another_number_of_replicas_in_double_precision(
    tmp_path: Path,
) -> None:
    options = ("--at", "0:0:1", "--replicas", "1,2")
    limits = ("--max-epochs", 1, "--max-batches", 2)
    assert check(tmp_path, "correct.py", *options, *limits).code == 0


@pytest.mark.wide
def test_a_script_of_single_precision_is_not_compared_between_numbers_of_replicas(
    tmp_path: Path,
) -> None:
    (tmp_path / "single.py").write_bytes((SCRIPTS / "single.py").read_bytes())
    limits = ("--max-epochs", 1, "--max-batches", 1)
    found = check(tmp_path, "single.py", "--replicas", "1,2", *limits)
    assert found.code == 0, found.report
    (reason,) = found.report.not_compared
    assert "1 replica in double precision: rank 0 raised RuntimeError" in reason
    assert found.report.stages[-1] == "replicas: not compared"
    options = ("--at", "0:0:1", "--replicas", "1,2")
    found = check(tmp_path, "single.py", *options, *limits)
    assert found.code == 4, found.report
    assert "Numbers of replicas are compared in double" in found.report.problem
