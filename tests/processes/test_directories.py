"""A checkpoint directory that only some of the replicas were given."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticrun.testing import GenerationFailed, run_generation


@pytest.mark.parametrize("without", [0, 1])
def test_a_replica_without_a_directory_is_named_by_all(
    tmp_path: Path, without: int
) -> None:
    def start() -> None:
        import os

        import elasticrun as er

        er.init(
            None if int(os.environ["RANK"]) == without else tmp_path / "checkpoints"
        )

    with pytest.raises(GenerationFailed) as failed:
        run_generation(start, 2)
    told = f"rank {without} of 2 has no checkpoint directory, but others have"
    assert str(failed.value).count(f"CheckpointError: {told}") == 2
