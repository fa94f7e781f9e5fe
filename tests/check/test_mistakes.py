"""The classic mistakes, each found with its field, zone, line and rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.check.checking import check, run

pytestmark = pytest.mark.slow

SMALL = ("--replicas", 1, "--max-epochs", 3, "--max-batches", 2)


@pytest.mark.wide
def test_a_schedule_stepped_in_replayed_code_makes_no_difference(
    tmp_path: Path,
) -> None:
    found = check(tmp_path, "scheduler_between_loops.py", "--at", "0:1:1", *SMALL)
    assert found.code == 0


@pytest.mark.wide
def test_what_replayed_code_changes(tmp_path: Path) -> None:
    found = check(tmp_path, "replayed.py", "--at", "1:1:1", *SMALL)
    assert found.code == 1
    causes = found.report.results[0].causes
    places = {(c.how, c.zone, c.line, c.rule) for c in causes}
    assert places == {
        ("replayed", "P", found.line_of("net.load_state_dict(first_weights)"), "ER107"),
        ("replayed", "B", found.line_of("file.write("), "ER104"),
    }
    names = {cause.zone: cause.name for cause in causes}
    assert names["P"].startswith("model.")
    assert names["B"] == "file:log.txt"

    command = found.report.results[0].command
    assert command[:4] == ["elasticrun", "check", "--at", "1:1:1"]


@pytest.mark.wide
def test_replicas_that_drift_apart_under_a_plain_ddp(tmp_path: Path) -> None:
    limits = ("--replicas", 2, "--max-epochs", 1, "--max-batches", 2)
    found = check(tmp_path, "drifts.py", "--at", "0:0:1", *limits)
    assert found.code == 4
    assert "the replicas have drifted apart: 1.weight, 1.bias" in found.report.problem


@pytest.mark.wide
def test_a_draw_in_replayed_code(tmp_path: Path) -> None:
    """It is what the first run drew."""
    found = check(tmp_path, "draw_between_loops.py", "--at", "1:1:1", *SMALL)
    assert found.code == 0


def test_what_a_restart_loses(tmp_path: Path) -> None:
    found = check(tmp_path, "lost.py", "--at", "1:0:1", *SMALL)
    assert found.code == 1
    causes = found.report.results[0].causes
    by_rule = {(c.how, c.name, c.line, c.rule) for c in causes if c.rule}
    assert by_rule >= {
        ("lost", "num_steps", found.line_of("num_steps += 1"), "ER301"),
        ("lost", "best", found.line_of("best = error"), "ER301"),
        ("lost", "average", found.line_of("AveragedModel(net)"), "ER306"),
    }
    assert causes[0].rule


@pytest.mark.wide
def test_what_the_linter_does_not_see(tmp_path: Path) -> None:
    (tmp_path / "memory.py").write_text(
        "_NORMS = []\n\n\ndef norm(net):\n    if not _NORMS:\n"
        "        _NORMS.append(float(net.weight.norm()))\n    return _NORMS[0]\n"
    )
    found = check(tmp_path, "unseen.py", "--at", "1:0:1", *SMALL)
    assert found.code == 1
    causes = {(c.how, c.name, c.line) for c in found.report.results[0].causes}
    assert causes >= {
        ("lost", "len(seen)", found.line_of("seen[len(seen)] =")),
        ("lost", "rows.targets", found.line_of("rows.targets[epoch")),
        ("lost", "memory._NORMS", 6),
        ("lost", "len(last)", found.line_of("last.append(")),
        ("lost", "len(model.__dict__)", found.line_of("model.steps =")),
    }
    # The linter sees this one: the line is its own.
    assert ("lost", "rng", found.line_of("rng = np.random.default_rng(0)")) in causes


@pytest.mark.wide
def test_what_workers_keep_is_named_as_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "counts.py").write_text(
        "import torch\nfrom torch.utils.data import Dataset\n"
        "from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel\n"
        "from elasticrun import remaining_epochs_until\n\n\n"
        "class Counted(Dataset):\n    num_read = 0\n\n"
        "    def __len__(self):\n        return 16\n\n"
        "    def __getitem__(self, index):\n        self.num_read += 1\n"
        "        return torch.full((1,), float(self.num_read))\n\n\n"
        "model = AdaptiveDataParallel(torch.nn.Linear(1, 1))\n"
        "options = {'num_workers': 1, 'persistent_workers': True}\n"
        "train = AdaptiveDataLoader(Counted(), 8, **options)\n"
        "for epoch in remaining_epochs_until(3):\n    for x in train:\n"
        "        with torch.no_grad():\n"
        "            model.module.weight.copy_(x.sum())\n"
    )
    process = run(tmp_path, "--at", "1:0:1", *SMALL, "counts.py")
    assert process.returncode == 1
    assert (
        "no registered state and no variable explains it; what workers of loaders and "
        "objects of other packages keep was not looked at" in process.stdout
    )


@pytest.mark.wide
def test_a_script_that_is_not_reproducible_by_itself(tmp_path: Path) -> None:
    found = check(tmp_path, "unseeded.py", *SMALL)
    assert found.code == 3
    differ = "two runs without any restart differ: "
    assert found.report.problem.startswith((f"{differ}model.", f"{differ}optimizer."))
    detail = found.report.detail.splitlines()
    line = found.line_of("random.random() *")
    assert f"unseeded.py:{line}" in detail


@pytest.mark.wide
def test_a_script_that_fails_only_after_a_restart(tmp_path: Path) -> None:
    found = check(tmp_path, "fails_after_restart.py", "--at", "0:1:1")
    assert found.code == 4
    assert "NameError: name 'loss' is not defined" in found.report.problem
    assert "after it is restarted" in found.report.problem
    line = found.line_of("print(float(loss))")
    assert f"fails_after_restart.py:{line}: ER307" in found.report.detail
    assert found.report.command[2:4] == ["--at", "0:1:1"]


@pytest.mark.wide
def test_a_place_that_is_missed_only_after_a_restart(tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text(
        "import torch\nfrom torch.utils.data import TensorDataset\n"
        "from elasticrun import AdaptiveDataLoader, generation\n\n"
        "for _ in AdaptiveDataLoader(TensorDataset(torch.arange(32)), 8):\n"
        "    if generation():\n        break\n"
    )
    found = check(tmp_path, "early.py", "--at", "after0:0:1", "--at", "after0:0:3")
    assert found.code == 1, found.report
    assert found.report.results[0].first.name.startswith("samples of batch")


def test_a_script_that_fails_by_itself(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "import elasticrun\n\nraise ValueError('no data')\n"
    )
    found = check(tmp_path, "bad.py", "--replicas", 1)
    assert found.code == 4
    assert "raised ValueError: no data" in found.report.problem
    assert found.report.command == []


@pytest.mark.wide
def test_a_hang_names_where_each_replica_waits(tmp_path: Path) -> None:
    options = ("--at", "0:0:2", "--replicas", 2, "--hang-timeout", 20)
    found = check(tmp_path, "hangs.py", *options)
    assert found.code == 5, found.report
    waits = [
        ("dist.barrier()", found.line_of("dist.barrier()")),
        ("dist.recv(torch.zeros(1), src=0)", found.line_of("dist.recv(")),
    ]
    assert found.report.detail.splitlines() == [
        f"rank {rank} waits at {found.script}:{line} in <module>: {source}"
        for rank, (source, line) in enumerate(waits)
    ]


@pytest.mark.wide
def test_a_learning_rate_that_depends_on_the_number_of_replicas(
    tmp_path: Path,
) -> None:
    options = ("--replicas", "1,2", "--max-epochs", 1, "--max-batches", 1)
    found = check(tmp_path, "size_decides.py", *options)
    assert found.code == 1
    first = found.report.results[0].first
    assert first.name == "optimizer.param_groups[0].lr"
    assert (first.expected, first.found) == (0.05, 0.1)
