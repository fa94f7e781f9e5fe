"""Importing elasticrun does nothing: no torch, handlers, threads or process group."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

import elasticrun


def run(code: str) -> str:
    """Return what a fresh interpreter prints."""
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    return finished.stdout


def test_importing_it_does_not_import_torch() -> None:
    code = """
        import sys
        import elasticrun
        dir(elasticrun), elasticrun.__version__, elasticrun.__all__
        print(sorted({"torch", "numpy", "elasticrun.job.job"} & set(sys.modules)))
    """
    assert run(code) == "[]\n"


@pytest.mark.slow
def test_a_name_is_imported_at_its_first_use() -> None:
    code = """
        import sys
        import elasticrun
        elasticrun.CheckpointError
        print("torch" in sys.modules)
        from elasticrun import Variables
        print("torch" in sys.modules)
    """
    assert run(code) == "False\nTrue\n"


@pytest.mark.slow
def test_importing_everything_leaves_the_process_as_it_was() -> None:
    code = """
        import logging, os, signal, threading
        import torch
        import torch.distributed as dist

        def condition():
            return (
                [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)],
                signal.set_wakeup_fd(-1),
                sorted(thread.name for thread in threading.enumerate()),
                logging.getLogger().handlers[:],
                logging.getLogger("elasticrun").handlers[:],
                dist.is_initialized(),
                torch.initial_seed(),
                dict(os.environ),
            )

        before = condition()
        from elasticrun import *
        import elasticrun.testing
        from elasticrun.job.current import job_if_any
        print(condition() == before, job_if_any())
    """
    assert run(code) == "True None\n"


def test_what_is_public_is_listed() -> None:
    assert set(elasticrun.__all__) == {
        "AdaptiveDataLoader",
        "AdaptiveDataParallel",
        "Accumulator",
        "AgreementError",
        "AtomicDirectory",
        "CheckpointError",
        "CheckpointWarning",
        "CombinedLoader",
        "ElasticRunError",
        "ElasticSampler",
        "Endless",
        "ForeignLoop",
        "JobStopped",
        "LengthGroups",
        "LogFile",
        "LoopOrderError",
        "Mixed",
        "Packed",
        "ParquetRows",
        "RandomWindows",
        "ResidentShards",
        "State",
        "StateNameError",
        "Streams",
        "TarShards",
        "TextLines",
        "TokenFiles",
        "Uncounted",
        "Variables",
        "WeightedDraws",
        "atomic_save",
        "current_dataloader",
        "current_epoch",
        "current_job",
        "device",
        "finished_epochs",
        "generation",
        "init",
        "launch",
        "load_state",
        "local_rank",
        "rank",
        "once",
        "register",
        "remaining_epochs_until",
        "remaining_steps_until",
        "request_checkpoint",
        "request_stop",
        "save_all_states",
        "world_size",
    }
    for name in elasticrun.__all__:
        assert getattr(elasticrun, name).__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'elasticrun' has no attribute 'nothing'"):
        elasticrun.nothing  # noqa: B018 (looking it up is the test)
