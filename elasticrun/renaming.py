"""A state that got another name between two starts, as far as names can tell."""

from __future__ import annotations

import re
from collections.abc import Iterable

from elasticrun.checkpoint.draft import Checkpoint
from elasticrun.checkpoint.state import state_of_file

# Of elasticrun itself: they come and go with settings, and lose nothing by it.
_OWN = re.compile("random|once|save-interval|loader[-.].+")


def hint_of_renaming(
    checkpoint: Checkpoint, *, not_found: Iterable[str], unclaimed: Iterable[str]
) -> str | None:
    """Return what to tell of states that may be one under two names, None of nothing.

    A state that is new says nothing, nor does one that is made in a later phase. Only
    both together may be one that was renamed, and then it has lost its values.

    Args:
        checkpoint: The one the job has resumed from.
        not_found: The names of states that it did not have.
        unclaimed: Its files that no state has claimed.
    """
    new = _names(not_found)
    left = _names(map(state_of_file, unclaimed))
    if not (new and left):
        return None
    return (
        f"{checkpoint.path} has nothing for {new}, which began as the program made it, "
        f"and nothing has asked for its {left} yet. Was a state renamed? Then its "
        "values were not loaded: stop the job, give the state its old name, remove the "
        "checkpoints that are newer than that one, and start again. If not, ignore "
        "this: what nothing asks for is kept."
    )


def _names(names: Iterable[str]) -> str:
    found = sorted({name for name in names if not _OWN.fullmatch(name)})
    return ", ".join(map(repr, found))
