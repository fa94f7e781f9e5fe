"""Shapes of SVG, which the pictures are made of."""

from __future__ import annotations


def text(x: float, y: float, words: str, more: str = "") -> str:
    """Return words; `more` is further attributes."""
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{words}</text>'


def box(x: float, y: float, width: float, height: float, radius: int, fill: str) -> str:
    """Return a filled rectangle."""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} rx="{radius}" fill="{fill}"/>'


def svg(width: float, height: float, title: str, shapes: list[str]) -> str:
    """Return a picture, on a background that is light in dark pages, too."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" '
        'font-family="sans-serif" font-size="12" fill="#333">'
    )
    ground = box(0, 0, width, height, 8, "#fbfbfa")
    return "\n".join([head, f"<title>{title}</title>", ground, *shapes, "</svg>\n"])
