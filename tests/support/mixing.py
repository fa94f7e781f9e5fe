"""How well the orders of several epochs mix the samples of files."""

from __future__ import annotations

from typing import Any

import numpy as np


def mixing(
    orders: list[Any], num_files: int, batch_size: int
) -> tuple[float, float, float]:
    """Return three measures of orders of the samples of files of one length.

    The share of pairs of files of which samples were in one batch; the correlation of
    a sample's place in the epoch with that in its file; how often two samples of a
    batch are in one of the next epoch, too, over chance.
    """
    num_samples = len(orders[0])
    length = num_samples // num_files
    met = np.eye(num_files, dtype=bool)
    correlation, again, pairs = 0.0, 0, 0
    place = np.empty(num_samples, int)
    for number, order in enumerate(orders):
        places = np.arange(num_samples)
        found = np.corrcoef(places, np.asarray(order) % length)[0, 1]
        correlation = max(correlation, abs(found))
        for begin in range(0, num_samples, batch_size):
            batch = order[begin : begin + batch_size]
            files = np.unique(batch // length)
            met[np.ix_(files, files)] = True
            if number:
                counts = np.unique(place[batch], return_counts=True)[1]
                again += int((counts * (counts - 1) // 2).sum())
                pairs += len(batch) * (len(batch) - 1) // 2
        place[order] = places // batch_size
    by_chance = (batch_size - 1) / (num_samples - 1)
    return float(met.mean()), float(correlation), again / pairs / by_chance
