"""What a node offers to others."""

from __future__ import annotations

from dataclasses import replace

from elasticrun.launcher.nodes.nodes import Offer


def offer(share: int, number: int = 0, **more: object) -> Offer:
    return replace(Offer(share, (10 * share, 10 * share + 1), number), **more)
