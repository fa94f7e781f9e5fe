"""A function for `elasticrun.launch`; who calls it need not import torch."""

from __future__ import annotations

from pathlib import Path

import elasticrun


def train(root: Path, num_held: int) -> tuple[int, int, int]:
    """Be held in the first generations until there is a mark, or a stop is due.

    Each is held a batch later than the one before, which has left its own behind.
    """
    import torch
    from torch.utils.data import TensorDataset

    from tests.launcher.program import NUM_SAMPLES
    from tests.support.loops import is_stop_due
    from tests.support.stage import wait_until

    generation = elasticrun.generation()
    go = root / f"go-{generation}"
    loader = elasticrun.AdaptiveDataLoader(
        TensorDataset(torch.arange(NUM_SAMPLES)), 6, shuffle=True
    )
    seen = elasticrun.Variables(number=0)
    for _ in loader:
        seen.number += loader.global_batch_size
        (root / f"seen-{generation}").touch()
        if generation < num_held and loader.batch_index == 3 + generation:
            wait_until(lambda: is_stop_due() or go.exists())
    return elasticrun.rank(), elasticrun.world_size(), seen.number
