"""Every exception and warning that elasticrun raises on purpose."""

from __future__ import annotations


class ElasticRunError(RuntimeError):
    """The job cannot go on; the text gives the values, the reason and the way out."""


class CheckpointError(ElasticRunError):
    """A checkpoint cannot be used: another job's or format, damaged, or unfit."""


class StateNameError(ElasticRunError):
    """A state's name is taken, or cannot be a file name."""


class LoopOrderError(ElasticRunError):
    """Loops or epoch loops overlap, so that the job would have two positions."""


class AgreementError(ElasticRunError):
    """The replicas could not agree, or one of them cannot be reached."""


class CheckpointWarning(UserWarning):
    """Something about checkpoints went wrong that training survives."""


class JobStopped(SystemExit):
    """Raised at the boundary where a stopped job exits; `code` is the exit code.

    A `SystemExit`, so that `except Exception` does not swallow it.
    """
