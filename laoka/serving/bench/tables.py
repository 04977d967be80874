"""A bench result as rows: for a terminal, for CSV, and as a small picture (SVG). Pure."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Mapping, Sequence
from typing import Any

CSV_FIGURES = (
    "completed", "failed", "duration", "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput",
    "output_throughput", "total_token_throughput", "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "mean_tpot_ms",
    "median_tpot_ms", "p99_tpot_ms", "mean_itl_ms", "median_itl_ms", "p99_itl_ms", "mean_e2el_ms", "median_e2el_ms", "p99_e2el_ms",
    "tokens_per_chunk", "prefill_tok_s", "decode_tok_s", "bunched",
)  # fmt: skip
# Heads of the terminal's table and the figures below them.
COLUMNS = (
    ("tok/s", "output_throughput"), ("TTFT ms", "mean_ttft_ms"), ("p99", "p99_ttft_ms"), ("TPOT ms", "mean_tpot_ms"),
    ("p99", "p99_tpot_ms"), ("ITL ms", "mean_itl_ms"), ("E2EL ms", "mean_e2el_ms"), ("p99", "p99_e2el_ms"),
)  # fmt: skip


def number(value: float | None) -> str:
    """A figure with three digits that mean something; `-` for one that was not measured."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def with_spread(cell: Mapping[str, Any], figure: str) -> str:
    """`1,234 ±5`: the mean over the repeats and their standard deviation; `-` where there is none."""
    found = cell["spread"].get(figure)
    if found is None:
        return "-"
    return number(found["mean"]) + (f" ±{number(found['std'])}" if len(cell["repeats"]) > 1 else "")


def speed_of(cell: Mapping[str, Any]) -> str:
    """The figure that a cell is about, with its unit."""
    figure = {"prefill": "prefill_tok_s", "prefill-again": "prefill_tok_s", "decode": "decode_tok_s"}.get(cell["kind"])
    return with_spread(cell, figure or "output_throughput")


def as_csv(result: Mapping[str, Any]) -> str:
    """One row for each repeat of each cell."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(("recipe_id", "label", "kind", "max_model_len", "max_concurrency", "repeat", *CSV_FIGURES))
    for cell in result["cells"]:
        for index, run in enumerate(cell["repeats"], 1):
            own = (result["recipe_id"], cell["label"], cell["kind"], cell["max_model_len"], run["max_concurrency"], index)
            writer.writerow((*own, *("" if run.get(name) is None else run[name] for name in CSV_FIGURES)))
    return stream.getvalue()


WIDTH, HEIGHT, MARGIN = 560, 320, 56


def as_svg(series: Mapping[str, Sequence[tuple[float, float]]], title: str, x_label: str, y_label: str) -> str:
    """Lines through points, one for each name, on axes that begin at zero: throughput against latency, say."""
    points = [point for line in series.values() for point in line]
    most_x, most_y = (max((point[axis] for point in points), default=0) or 1.0 for axis in (0, 1))

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            MARGIN + x / most_x * (WIDTH - 2 * MARGIN),
            HEIGHT - MARGIN - y / most_y * (HEIGHT - 2 * MARGIN),
        )

    colours = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{MARGIN}" y="20" font-size="13">{html.escape(title)}</text>',
        f'<path d="M{MARGIN} {MARGIN} V{HEIGHT - MARGIN} H{WIDTH - MARGIN}" fill="none" stroke="#444"/>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">{html.escape(x_label)}</text>',
        f'<text x="14" y="{HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 14 {HEIGHT / 2})">{html.escape(y_label)}</text>',
    ]
    for step in range(5):
        x, y = place(most_x * step / 4, most_y * step / 4)
        parts.append(f'<text x="{x:.0f}" y="{HEIGHT - MARGIN + 16}" text-anchor="middle">{number(most_x * step / 4)}</text>')
        parts.append(f'<text x="{MARGIN - 6}" y="{y + 4:.0f}" text-anchor="end">{number(most_y * step / 4)}</text>')
    for index, (name, line) in enumerate(series.items()):
        colour = colours[index % len(colours)]
        placed = [place(*point) for point in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed]
        parts.append(f'<text x="{WIDTH - MARGIN + 4}" y="{MARGIN + 14 * index}" fill="{colour}">{html.escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def picture(result: Mapping[str, Any]) -> str:
    """Throughput against the latency of one request, a line for each server limit, a point for each concurrency."""
    series: dict[str, list[tuple[float, float]]] = {}
    for cell in result["cells"]:
        if cell["kind"] == "serve":
            found = cell["spread"]
            point = (found["mean_e2el_ms"]["mean"], found["output_throughput"]["mean"])
            series.setdefault(str(cell["max_model_len"] or "as served"), []).append(point)
    return as_svg(series, title(f"laoka bench {result['date'][:10]}", result["provenance"]), *AXES)


AXES = ("E2EL, mean, ms", "output tok/s")


def title(words: str, provenance: Mapping[str, Any]) -> str:
    """A picture's title, which says when it is of the sandbox."""
    return words + (" (SIMULATED: tiny random model on a CPU)" if provenance.get("simulated") else "")
