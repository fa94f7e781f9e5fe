"""A module imports only what stands below it, also inside of functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import elasticrun

ROOT = Path(elasticrun.__file__).parent

# From the bottom up: a module may import from the rows before its own. A comment gives
# the layer that the design names for a row; the rows within one are its inner order.
ROWS: list[list[str]] = [
    # 0
    ["settings"],
    ["errors", "env", "version", "signals", "leaving", "reduction", "exact", "pace"],
    [
        "late_error",
        "checkpoint.open_files",
        "checkpoint.writeback",
        "checkpoint.streams",
        "checkpoint.recorded",
    ],
    ["checkpoint.files", "checkpoint.place"],
    ["data.partition", "data.seeding", "data.arguments", "data.progress_bar"],
    [
        "checkpoint.keeping",
        "data.permutation",
        "data.reading",
        "traces",
    ],
    ["checkpoint.manifest", "checkpoint.lock", "data.transfer"],
    ["checkpoint.storage"],
    ["checkpoint.local", "checkpoint.objects", "checkpoint.counter"],
    ["checkpoint.claimant"],
    ["checkpoint.claim"],
    ["checkpoint.remote"],
    ["checkpoint.storages"],
    ["data.forking"],
    ["data.workers", "trace", "checkpoint.memory"],
    # 1
    ["checkpoint.state", "control.gate", "control.store"],
    ["checkpoint.paths", "checkpoint.parameter_names", "checkpoint.nested"],
    ["checkpoint.dtypes"],
    ["checkpoint.shards"],
    [
        "checkpoint.tensors",
        "control.agreement",
        "control.devices",
        "control.gloo",
        "control.group",
        "control.gathering",
    ],
    ["checkpoint.layout", "checkpoint.resharding"],
    ["checkpoint.sharded"],
    ["checkpoint.sharded_optimizer"],
    ["control.links", "control.rendezvous", "control.stopping"],
    ["control.mail"],
    ["checkpoint.draft", "control.watcher", "joining"],
    ["checkpoint.listing"],
    # 2
    ["checkpoint.store", "checkpoint.generators"],
    ["preparation", "data.plan", "data.elastic_sampler"],
    ["atomic"],
    ["data.order"],
    # 3
    ["position", "registry", "auto_interval"],
    ["schedule", "postponing"],
    ["opening", "capturing", "channel", "flight", "renaming"],
    ["writing"],
    ["saving"],
    ["saves"],
    ["stops"],
    ["job"],
    ["current"],
    # 4
    ["accumulation", "data.fingerprint", "metrics"],
    ["data.running", "data.alike"],
    ["data.loader", "epoch", "states"],
    ["partial_gradients"],
    ["gradient_hooks", "parallel_arguments"],
    ["parallel"],
    # 6, the linter: reads source, and imports nothing of the rest.
    ["lint.naming", "lint.values", "lint.options", "lint.project", "lint.rules.rule"],
    ["lint.catalog", "lint.roles", "lint.graph", "lint.finding"],
    ["lint.quiet", "lint.walk.core", "lint.mending", "lint.rules.replay_texts"],
    ["lint.rules.loop_texts", "lint.rules.value_texts", "lint.rules.other_texts"],
    ["lint.rules.table", "lint.walk.called", "lint.walk.truth"],
    ["lint.rules.pages", "lint.walk.attributes", "lint.walk.entries"],
    ["lint.walk.expressions"],
    ["lint.walk.functions"],
    ["lint.walk.calls"],
    ["lint.walk.elastic"],
    ["lint.walk.effects"],
    ["lint.walk.objects"],
    ["lint.walk.language"],
    ["lint.walk.externals"],
    ["lint.walk.trained"],
    ["lint.walk.containers"],
    ["lint.walk.methods"],
    ["lint.walk.iteration"],
    ["lint.walk.assignment"],
    ["lint.walk.definitions"],
    ["lint.walk.contexts"],
    ["lint.walk.statements"],
    ["lint.walk.walker"],
    ["lint.zones"],
    ["lint.program"],
    ["lint.rules.uses", "lint.rules.replayed", "lint.rules.files", "lint.explain"],
    ["lint.rules.loops", "lint.rules.effects", "lint.rules.ranks", "lint.rules.data"],
    ["lint.rules.states", "lint.rules.sums", "lint.rules.left_over"],
    ["lint.rules.volatile"],
    ["lint.engine"],
    ["lint.sarif", "lint.fixes", "lint.flake8"],
    ["lint.report"],
    ["lint.command"],
    ["lint.__main__"],
    # 6, what people see of checkpoints: reads them, and knows of no job.
    ["inspection.entries", "inspection.tables"],
    ["inspection.overview", "inspection.contents"],
    ["inspection.display", "inspection.difference", "inspection.fitting"],
    ["inspection.pruning", "inspection.exchange"],
    ["inspection.command"],
    # 6, the launcher: starts replicas; only what runs in them meets a job.
    ["launcher.wire", "launcher.environment", "launcher.processes", "launcher.loop"],
    ["launcher.restarts", "launcher.causes", "launcher.output", "launcher.table"],
    ["launcher.parked", "launcher.program_words"],
    ["launcher.modules", "launcher.stop_signals"],
    ["launcher.options", "launcher.sockets", "launcher.functions"],
    ["launcher.claim", "launcher.screen", "launcher.limits"],
    ["launcher.directory", "launcher.imports", "launcher.client"],
    ["launcher.reporter", "launcher.console", "launcher.reading", "launcher.endpoint"],
    ["launcher.stragglers", "launcher.linting"],
    ["launcher.replica", "launcher.board", "launcher.preloading"],
    ["launcher.forkserver", "launcher.rendezvous", "launcher.meeting"],
    ["launcher.starter"],
    ["launcher.generation"],
    ["launcher.hangs"],
    ["launcher.watchdog", "launcher.outcomes"],
    ["launcher.nodes"],
    ["launcher.orders", "launcher.turn", "launcher.reserve", "launcher.crashes"],
    ["launcher.many_nodes", "launcher.judging", "launcher.news"],
    ["launcher.supervisor"],
    ["launcher.status"],
    ["launcher.server"],
    ["launcher.running"],
    ["launcher.commands", "launcher.calling"],
    # 6, the check: starts replicas with the launcher, and asks the linter.
    ["check.places", "check.file_watch", "check.fields", "check.perturbation"],
    ["check.source_lines"],
    ["check.plan", "check.variables", "check.guard", "check.sweep", "check.moments"],
    ["check.recorder", "check.routes", "check.scratch", "check.tolerance"],
    ["check.checked_job", "check.runs", "check.waiting", "check.comparing"],
    ["check.line_watch", "check.blame", "check.baseline", "check.journey"],
    ["check.observing", "check.report", "check.engine"],
    ["check.problems"],
    ["check.trials"],
    ["check.checker"],
    ["check.command"],
    # 7
    ["cli"],
    ["__main__"],
    # Beside 6: starts replicas, for tests.
    ["testing.replicas", "testing.restarts"],
    ["testing", "testing.preloaded"],
]
HEIGHT = {module: height for height, row in enumerate(ROWS) for module in row}

# They hand on what they are asked for, or hold nothing.
EXEMPT = {"", "check", "checkpoint", "control", "data", "launcher"}
EXEMPT |= {"inspection", "lint", "lint.rules", "lint.walk"}


def modules() -> dict[str, Path]:
    """Return every module of the package by its name below `elasticrun`."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        found[".".join(parts)] = path
    return found


MODULES = modules()


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the package's modules that are imported at run time."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            # `from elasticrun import current` may name a module or what one holds.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [n if module_of(n) in MODULES else node.module for n in names]
        else:
            names = []
        yield from (
            module_of(name) for name in names if name.split(".")[0] == "elasticrun"
        )
        yield from imported(node)


def module_of(name: str) -> str:
    return name.removeprefix("elasticrun").removeprefix(".")


def test_every_module_has_a_place() -> None:
    assert MODULES.keys() - HEIGHT.keys() - EXEMPT == set()
    assert HEIGHT.keys() - MODULES.keys() == set()


@pytest.mark.parametrize("module", sorted(HEIGHT))
def test_a_module_imports_only_what_stands_below_it(module: str) -> None:
    found = set(imported(ast.parse(MODULES[module].read_text(encoding="utf-8"))))
    too_high = {
        name for name in found if name not in EXEMPT and HEIGHT[name] >= HEIGHT[module]
    }
    assert too_high == set()


def test_one_module_writes_files_and_one_reads_the_environment() -> None:
    def using(*texts: str) -> set[str]:
        return {
            name
            for name, path in MODULES.items()
            if any(text in path.read_text(encoding="utf-8") for text in texts)
        }

    # Who starts replicas gives them variables; in them, one module reads these.
    starters = {"testing.replicas", "launcher.environment"}
    namers = {"lint.catalog"}  # knows the name, and imports no os
    assert using("os.environ") - starters - namers == {"env"}
    assert using("os.fsync(", "os.rename(", "os.replace(") == {"checkpoint.files"}
    assert using("    global ") == {"current", "signals"}
