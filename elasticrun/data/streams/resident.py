"""`ResidentShards`: data that fits into the memory of all replicas together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from elasticrun.data.streams.streams import Streams


class ResidentShards(Streams):
    """Shards of which each replica loads its part once, and keeps it.

        shards = ResidentShards(
            lambda n: torch.load(f"shard-{n}.pt", map_location=elasticrun.device()),
            lengths=[50_000] * 64,
        )

    Which shards a replica loads depends on its rank and the world size alone, so it
    holds its share of the data in all epochs. They are loaded when a loader is made:
    before a rescaling, while the old replicas still train. At the end of unequal
    shards, a replica without a sample also loads another one's shard. With fewer lanes
    than replicas each one loads everything.

    Args:
        load: From the number of a shard to its samples, in something that is indexed.
        lengths: Samples of each shard.
        options: Those of `Streams`.
    """

    def __init__(
        self, load: Callable[[int], Any], lengths: Sequence[int], **options: Any
    ) -> None:
        names = [f"shard {number}" for number in range(len(lengths))]
        super().__init__(names, lengths=lengths, **options)
        self._load = load
        self._held: dict[int, Any] = {}

    keeps_streams = True

    def prepare(self, rank: int, world_size: int) -> None:
        are_shared = self.lanes.num_lanes < world_size
        for stream, lane in enumerate(self.lanes.lane_of_stream):
            if are_shared or lane % world_size == rank:
                self._shard(stream)

    def open(self, stream: int, first: int) -> Iterator[Any]:
        shard = self._shard(stream)
        return (shard[number] for number in range(first, len(shard)))

    def _shard(self, stream: int) -> Any:
        if stream not in self._held:
            self._held[stream] = self._load(stream)
        return self._held[stream]
