"""Draw what things cost beside peers, from benchmarks/results.

python docs/pictures/costs.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shapes import box, svg, text

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
WIDTH, LEFT, ROW = 800, 300, 22


def bars() -> dict[str, dict[str, float]]:
    """Return the groups of bars: what is measured, and how many seconds it takes."""
    resume, restart, checkpoint = (
        [
            json.loads(line)
            for line in (RESULTS / f"{name}.json").read_text().splitlines()
        ]
        for name in ("resume", "rescale", "checkpoint")
    )
    return {
        "First batch at 90 % of 10 million shuffled samples": {
            library: find(resume, library=library)["late"]["milliseconds"] / 1000
            for library in ("elasticrun", "torchdata")
        },
        "From kill -9 of a process to the next batch": {
            "elasticrun": find(restart, what="kill -9", launcher="elasticrun")[
                "median_seconds"
            ],
            "torchrun": find(restart, what="kill -9", launcher="torchrun")[
                "median_seconds"
            ],
        },
        "How long a checkpoint of 1 GiB stops training": {
            name: find(checkpoint, method=name)["blocked"]
            for name in (
                "elasticrun",
                "DCP async_save, reused stager",
                "DCP async_save",
                "DCP save",
                "torch.save",
            )
        },
    }


def find(lines: list[dict[str, Any]], **values: Any) -> dict[str, Any]:
    """Return the first line of results that has these values."""
    return next(line for line in lines if values.items() <= line.items())


def draw() -> str:
    """Return the picture as SVG."""
    shapes, y = [], 12.0
    for title, group in bars().items():
        shapes.append(text(16, y + 16, title, 'font-weight="bold"'))
        y += 26
        for name, seconds in group.items():
            width = max(2.0, (WIDTH - LEFT - 80) * seconds / max(group.values()))
            color = "#3b6fb6" if "elasticrun" in name else "#b9b9b4"
            said = f"{seconds * 1000:.0f} ms" if seconds < 0.1 else f"{seconds:.2f} s"
            shapes += [
                text(LEFT - 10, y + 14, name, 'text-anchor="end"'),
                box(LEFT, y + 2, width, ROW - 6, 3, color),
                text(LEFT + width + 8, y + 14, said),
            ]
            y += ROW
        y += 8
    return svg(WIDTH, y + 8, "What restarts and checkpoints cost", shapes)


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
