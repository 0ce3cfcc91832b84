"""A comparison in a notebook: the verdict in words, then the tables of what differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sonde.run import Comparison, WeightComparison
from sonde.show.divergence import divergence_sentences
from sonde.show.notebook.style import dim, fold, grid, prose, safe
from sonde.show.term.number import counted, number
from sonde.show.weights import verdict

_NUM_ROWS: Final = 20


def comparison_html(found: Comparison) -> str:
    """Two runs: where they first differ, their configs, scalars and series."""
    first, *rest = divergence_sentences(found)
    differing = [row for row in found.divergence.to_pylist() if row["step"] is not None]
    only = [
        dim(f"{counted(len(names), 'name')} only in {letter}: {safe(', '.join(names[:5]))}{'…' * (len(names) > 5)}")
        for letter, names in (("a", found.only_a), ("b", found.only_b))
        if names
    ]
    return "".join(
        [
            _sides(found.a, found.b),
            f"<div><b>{prose(first)}</b></div>",
            *(f"<div>{prose(sentence)}</div>" for sentence in rest),
            *only,
            _section("Config values that differ", found.config.to_pylist(), ("key", "a", "b")),
            _section("Scalars, last value", found.metrics.to_pylist(), ("name", "last_a", "last_b", "difference")),
            _section("Series that differ, and the first step", differing, ("series", "step", "a", "b")),
        ]
    )


def weights_html(found: WeightComparison) -> str:
    """Two sets of weights: the verdict, and the layers and tensors that changed most."""
    tensors = [row for row in found.tensors.to_pylist() if row["status"] not in ("same", "close")]
    layers = [row for row in found.layers.to_pylist() if row["num_changed"]]
    return "".join(
        [
            _sides(found.a, found.b),
            f"<div><b>{prose(verdict(found))}</b></div>",
            _section("Layers", layers, ("layer", "num_changed", "num_tensors", "relative", "max_abs", "cosine")),
            _section("Tensors", tensors, ("name", "status", "relative", "max_abs", "cosine")),
        ]
    )


def _sides(a: str, b: str) -> str:
    return dim(f"a = {safe(a)}<br>b = {safe(b)}")


def _section(title: str, rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    if not rows:
        return ""
    cells = [[_cell(row[column]) for column in columns] for row in rows[:_NUM_ROWS]]
    more = len(rows) - _NUM_ROWS
    rest = dim(f"and {more:,} more") if more > 0 else ""
    numbers = [not isinstance(rows[0][column], str) for column in columns]
    table = grid([column.replace("_", " ") for column in columns], cells, numbers)
    return fold(f"{title}: {len(rows):,}", f"{table}{rest}", is_open=True)


def _cell(value: Any) -> str:
    return safe(number(value)) if value is None or isinstance(value, int | float) else safe(value)
