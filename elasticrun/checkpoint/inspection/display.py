"""`elasticrun checkpoints show`: what one checkpoint holds, state by state."""

from __future__ import annotations

import json
from collections.abc import Iterator

from elasticrun.checkpoint.draft import Checkpoint
from elasticrun.checkpoint.inspection.columns import (
    columns,
    position_text,
    size_text,
    time_text,
)
from elasticrun.checkpoint.inspection.contents import (
    kind_of,
    leaf_values,
    leaves,
    load_file,
    names_of_state,
    records_of_state,
    value_of,
)
from elasticrun.checkpoint.inspection.overview import manifest_values
from elasticrun.checkpoint.inspection.plan import plans_in


def show(checkpoint: Checkpoint, state: str | None, *, as_json: bool) -> Iterator[str]:
    """Yield the lines that show a checkpoint, or one of its states in full."""
    names = names_of_state(checkpoint, state)
    contents = ((name, list(leaves(load_file(checkpoint, name)))) for name in names)
    if as_json:
        yield json.dumps(
            {
                **manifest_values(checkpoint),
                "batch_sizes": plans_in(checkpoint),
                "states": {
                    name: [leaf_values(*each) for each in found]
                    for name, found in contents
                },
            }
        )
        return
    if state is None:
        yield from _describe(checkpoint)
    for name, found in contents:
        size = sum(record.size for record in records_of_state(checkpoint, name))
        yield f"{name}  {size_text(size)}"
        rows = [(f"  {path}", kind_of(leaf), value_of(leaf)) for path, leaf in found]
        yield from columns(rows) if rows else ()


def _describe(checkpoint: Checkpoint) -> Iterator[str]:
    manifest = checkpoint.manifest
    yield str(checkpoint.path)
    yield from columns(
        [
            ("  job", manifest.job),
            ("  time", time_text(manifest.time)),
            ("  generation", str(manifest.generation)),
            ("  replicas", str(manifest.world_size)),
            ("  position", position_text(manifest.position)),
            ("  torch", manifest.torch_version),
            ("  elasticrun", manifest.elasticrun_version),
            *(
                ("  batch sizes", f"{plan} of {name}, by samples seen")
                for name, plan in plans_in(checkpoint).items()
            ),
        ]
    )
