"""Tables in markdown, and bars in groups as an SVG that reads well on a light and on a dark page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

__all__ = ["as_table", "bar_chart"]

BAR, GAP, LABELS, PLOT, TOP, FONT = 9, 8, 200, 430, 62, 12  # in pixels
COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1")
STYLE = """text { font: 12px system-ui, sans-serif; fill: #24292f } .title { font-weight: 600; font-size: 14px }
.value { font-size: 9px } .grid { stroke: #d0d7de }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .grid { stroke: #444c56 } }"""


def bar_chart(
    title: str, series: Sequence[str], groups: Mapping[str, Sequence[float]], *, most: float, unit: str = ""
) -> str:
    """One group of horizontal bars for each label, one bar for each of `series`. Bars beyond `most` are cut there."""
    assert len(series) <= len(COLORS)
    step = len(series) * BAR + GAP
    bottom = TOP + len(groups) * step
    width, height = LABELS + PLOT + 60, bottom + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<text class="title" x="8" y="20">{escape(title)}</text>',
    ]
    x = LABELS
    for name, color in zip(series, COLORS, strict=False):
        parts.append(f'<rect x="{x}" y="34" width="10" height="10" fill="{color}"/>')
        parts.append(f'<text x="{x + 15}" y="43">{escape(name)}</text>')
        x += 35 + 7 * len(name)
    for tick in range(5):
        at = LABELS + PLOT * tick / 4
        parts.append(f'<line class="grid" x1="{at:g}" y1="{TOP - 6}" x2="{at:g}" y2="{bottom}"/>')
        parts.append(f'<text x="{at:g}" y="{bottom + 16}" text-anchor="middle">{most * tick / 4:g}{unit}</text>')
    for number, (label, values) in enumerate(groups.items()):
        y = TOP + number * step
        middle = y + len(series) * BAR / 2 + FONT / 3
        parts.append(f'<text x="{LABELS - 8}" y="{middle:g}" text-anchor="end">{escape(label)}</text>')
        for value, color in zip(values, COLORS, strict=False):
            length = PLOT * min(1.0, value / most)
            parts.append(f'<rect x="{LABELS}" y="{y}" width="{length:.1f}" height="{BAR - 1}" fill="{color}"/>')
            text = f"{value:.2f}{unit}" + (" →" if value > most else "")
            parts.append(f'<text class="value" x="{LABELS + length + 4:.1f}" y="{y + BAR - 2}">{text}</text>')
            y += BAR
    return "\n".join((*parts, "</svg>", ""))


def as_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown, in columns that also line up as plain text."""
    widths = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head))]

    def one(cells: Sequence[str]) -> str:
        first, *others = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "| " + " | ".join((first, *others)) + " |"

    rule = "|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    return "\n".join((one(head), rule, *map(one, rows)))
