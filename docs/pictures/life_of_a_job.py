"""Draw the life of a job, from the trace that it has written.

    ELASTICRUN_TRACE=trace elasticrun run train.py
    python docs/pictures/life_of_a_job.py trace life-of-a-job.svg "scale 2" "kill -9"

Above, how far the job was after each batch that it trained; below, which ranks trained.
What ended each generation but the last stands behind the names of the files.
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from shapes import box, svg, text

from elasticrun.testing import read_trace

WIDTH, LEFT, TOP, HEIGHT, ROW = 800, 130, 46, 170, 18
COLORS = ("#3b6fb6", "#2a9d76", "#c8862b", "#8e5bb0", "#c4506b", "#5a7d3a")


class Generation(NamedTuple):
    """What ran from one start to the next: its replicas, and the batches of the job."""

    number: int
    world_size: int
    batches: list[int]


def generations(lines: list[dict[str, Any]]) -> list[Generation]:
    """Return each generation, with the numbers that its batches have in the job."""
    place = {id(each): (each["epoch"], each["loop"], each["batch"]) for each in lines}
    numbers = {each: number for number, each in enumerate(sorted(set(place.values())))}
    found = []
    for number, group in groupby(lines, key=lambda line: line["generation"]):
        parts = list(group)
        batches = sorted({numbers[place[id(each)]] for each in parts})
        found.append(Generation(number, parts[0]["world_size"], batches))
    return found


def draw(lines: list[dict[str, Any]], causes: list[str]) -> str:
    """Return the picture as SVG."""
    lines = sorted(lines, key=lambda line: line["generation"])
    parts = generations(lines)
    trained = sum(len(part.batches) for part in parts)
    total = 1 + max(part.batches[-1] for part in parts)
    ranks = max(part.world_size for part in parts)
    bottom = TOP + HEIGHT
    height = bottom + 34 + ROW * ranks + 34
    scale = (WIDTH - LEFT - 20) / trained

    shapes = [
        text(12, TOP + 10, "position"),
        text(12, TOP + 26, "in the job", 'fill="#777"'),
        text(LEFT - 8, bottom, "start", 'text-anchor="end" fill="#777"'),
        text(LEFT - 8, TOP + 4, "end", 'text-anchor="end" fill="#777"'),
    ]
    shapes += [
        text(LEFT - 8, bottom + 47 + ROW * rank, f"rank {rank}", 'text-anchor="end"')
        for rank in range(ranks)
    ]
    done, before = 0, -1
    causes = ["", *causes, *[""] * len(parts)]
    for part, color, cause in zip(parts, COLORS * len(parts), causes, strict=False):
        first, last = part.batches[0], part.batches[-1]
        x, end = LEFT + done * scale, LEFT + (done + len(part.batches)) * scale
        y, y_end = (bottom - HEIGHT * (at + 1) / total for at in (first, last))
        if done:
            again = before + 1 - first
            words = f"{again} once more" if again > 0 else "nothing lost"
            shapes.append(
                f'<path d="M{x:.1f} {TOP}V{height - 34}" stroke="#999" '
                'stroke-dasharray="3 3"/>'
            )
            shapes.append(text(x + 4, bottom - 20, cause, 'font-weight="bold"'))
            shapes.append(text(x + 4, bottom - 6, words, 'font-size="11"'))
        shapes.append(
            f'<path d="M{x:.1f} {y:.1f}L{end:.1f} {y_end:.1f}" stroke="{color}" '
            'stroke-width="3" stroke-linecap="round"/>'
        )
        shapes.append(
            text(
                *((x + end) / 2, TOP - 26, f"generation {part.number}"),
                f'text-anchor="middle" fill="{color}" font-weight="bold"',
            )
        )
        replicas = f"{part.world_size} replica{'s' * (part.world_size > 1)}"
        shapes.append(text((x + end) / 2, TOP - 10, replicas, 'text-anchor="middle"'))
        shapes += [
            box(x + 1, bottom + 36 + ROW * rank, end - x - 2, ROW - 5, 3, color)
            for rank in range(part.world_size)
        ]
        done, before = done + len(part.batches), last
    shapes.append(
        text(LEFT, height - 12, f"{trained} batches trained, in time", 'fill="#777"')
    )
    return svg(WIDTH, height, "The life of a job", shapes)


if __name__ == "__main__":
    trace, out, *ends = sys.argv[1:]
    Path(out).write_text(draw(read_trace(trace), ends), encoding="utf-8")
