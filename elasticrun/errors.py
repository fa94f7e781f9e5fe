"""Every exception and warning that elasticrun raises on purpose; errors in words."""

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


def text_of(error: BaseException) -> str:
    """Return what went wrong in words, never none: many errors have only a type.

    Those of elasticrun speak for themselves; of others the type is named.
    """
    name, text = type(error).__name__, str(error)
    if not text:
        return name
    return text if isinstance(error, ElasticRunError) else f"{name}: {text}"


class JobStopped(SystemExit):
    """Raised at the boundary where a stopped job exits; `code` is the exit code.

    A `SystemExit`, so that `except Exception` does not swallow it.
    """
