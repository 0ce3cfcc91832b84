"""Comparison of two runs: configs, last values of scalars, and the first step at which each series diverges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sonde.display import html_of, visible
from sonde.read.compare.divergence import Divergence, first_divergence
from sonde.read.compare.frameworks import other_names, renamed
from sonde.read.compare.rounding import Tolerance
from sonde.read.run.schemas import schema_of
from sonde.read.run.state import RunState
from sonde.read.run.steps import ALL_STEPS
from sonde.read.run.structure import read_structure
from sonde.read.series.cut import by_series
from sonde.read.series.scalars import read_scalars
from sonde.read.series.stats import read_stats
from sonde.read.table import Table
from sonde.read.text import cell
from sonde.schema.forward_order import ForwardOrder
from sonde.schema.losses import shown_scalars
from sonde.schema.records import flatten
from sonde.schema.sketch import Array
from sonde.schema.window import Column, ends

TOLERANCE: Final = 1e-5
"""Relative difference below which two values agree up to rounding (float32 has about seven digits)."""

_MAX_ROWS: Final = 20
_CONFIG = schema_of("key:string a:string b:string")
_METRICS = schema_of(
    "name:string last_a:double last_b:double difference:double min_a:double min_b:double max_a:double max_b:double"
)
_DIVERGENCE = schema_of("series:string step:int64 a:double b:double num_steps:int64")


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """The differences between run a and run b."""

    a: str
    b: str
    config: Table
    """key, a, b: config values that differ, as JSON; null if a run does not have the key."""
    metrics: Table
    """name, last_a, last_b, difference (b - a), and the extremes, of every scalar of either run."""
    divergence: Table
    """series, step, a, b, num_steps: the first common step at which a series differs; step is null if there is none."""
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    tolerance: float
    first_divergence: Divergence | None
    """The first step, and in it the first site in forward order, that differs beyond rounding; None if none does."""
    num_steps: int
    """Number of steps that both runs have, counted from 0."""

    def __repr__(self) -> str:
        return (
            f"<{visible(self.a)} and {visible(self.b)}: {_first_difference(self)} in {self.num_steps:,} common steps; "
            "see .first_divergence, .config, .metrics, .divergence>"
        )

    def _repr_html_(self) -> str:
        return html_of(self)

    def __rich__(self) -> Any:
        return comparison_as_rich(self)


def compare_states(
    states: tuple[RunState, RunState], labels: tuple[str, str], stats: str | Sequence[str], tolerance: float | None
) -> Comparison:
    scalars, series = [], []
    for state in states:
        logged = by_series(read_scalars(state, "*", ALL_STEPS), ("name",))
        scalars.append({name: logged[name] for name in shown_scalars(logged)})
        series.append({**scalars[-1], **by_series(read_stats(state, stats, ALL_STEPS), ("kind", "site", "stat"))})
    first, second = states
    names = other_names(_parameters(first), _parameters(second))
    series[1] = renamed(series[1], names)
    rounding = Tolerance(states, tolerance)
    limit, _ = rounding.of("", "")
    order = ForwardOrder(first.catalog.require().sites, read_structure(first))
    return Comparison(
        a=labels[0],
        b=labels[1],
        config=Table(compare_configs(first.manifest.config, second.manifest.config)),
        metrics=Table(compare_metrics(*scalars)),
        divergence=Table(compare_series(series[0], series[1], limit)),
        only_a=tuple(sorted(series[0].keys() - series[1].keys())),
        only_b=tuple(sorted(series[1].keys() - series[0].keys())),
        tolerance=limit,
        first_divergence=first_divergence(first, second, order, rounding, names),
        num_steps=min(state.last_step() for state in states) + 1,
    )


def _parameters(state: RunState) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters, or of their gradients if only these were recorded."""
    sites = state.catalog.require().sites.values()
    found = [[site for site in sites if site.kind == kind] for kind in ("param", "grad")]
    return {site.name: site.shape for site in found[0] or found[1]}


def compare_configs(a: Mapping[str, Any], b: Mapping[str, Any]) -> pa.Table:
    """Config values that differ, nested ones by their dotted path."""
    flat_a, flat_b = flatten(a), flatten(b)
    rows = [
        {"key": key, "a": flat_a.get(key), "b": flat_b.get(key)}
        for key in sorted(flat_a.keys() | flat_b.keys())
        if flat_a.get(key) != flat_b.get(key)
    ]
    return pa.Table.from_pylist(rows, schema=_CONFIG)


def compare_metrics(a: Mapping[str, Column], b: Mapping[str, Column]) -> pa.Table:
    rows = []
    for name in sorted(a.keys() | b.keys()):
        (last_a, min_a, max_a), (last_b, min_b, max_b) = ends(a.get(name)), ends(b.get(name))
        difference = None if last_a is None or last_b is None else last_b - last_a
        rows.append(
            {
                "name": name,
                "last_a": last_a,
                "last_b": last_b,
                "difference": difference,
                "min_a": min_a,
                "min_b": min_b,
                "max_a": max_a,
                "max_b": max_b,
            }
        )
    return pa.Table.from_pylist(rows, schema=_METRICS)


def compare_series(
    a: Mapping[str, Column],
    b: Mapping[str, Column],
    tolerance: float = TOLERANCE,
) -> pa.Table:
    """The first common step at which each series differs beyond rounding, earliest first."""
    rows = []
    for name in a.keys() & b.keys():
        steps, in_a, in_b = np.intersect1d(a[name][0], b[name][0], assume_unique=True, return_indices=True)
        values_a, values_b = a[name][1][in_a], b[name][1][in_b]
        apart = np.flatnonzero(differs(values_a, values_b, tolerance))
        first = int(apart[0]) if len(apart) else None
        rows.append(
            {
                "series": name,
                "step": None if first is None else int(steps[first]),
                "a": None if first is None else float(values_a[first]),
                "b": None if first is None else float(values_b[first]),
                "num_steps": len(steps),
            }
        )
    rows.sort(key=lambda row: (row["step"] is None, row["step"] or 0, row["series"]))
    return pa.Table.from_pylist(rows, schema=_DIVERGENCE)


def differs(a: Array, b: Array, tolerance: float) -> NDArray[np.bool_]:
    """A mask of differences larger than `tolerance` times the larger magnitude. Two NaN are equal."""
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore", over="ignore"):
        close = np.abs(a - b) <= tolerance * np.maximum(np.abs(a), np.abs(b))
    apart: NDArray[np.bool_] = ~same & ~(close & np.isfinite(a) & np.isfinite(b))
    return apart


def comparison_as_rich(comparison: Comparison) -> Any:
    from rich.console import Group
    from rich.text import Text

    names = f"a = {visible(comparison.a)}   b = {visible(comparison.b)}"
    apart = _first_difference(comparison)
    parts: list[Any] = [
        Text(names, style="bold"),
        Text(f"{apart[0].upper()}{apart[1:]} (relative tolerance {comparison.tolerance:g})."),
    ]
    for title, table in (
        ("config", comparison.config),
        ("scalars", comparison.metrics.select(["name", "last_a", "last_b", "difference"])),
        ("diverging series", comparison.divergence.filter(comparison.divergence["step"].is_valid())),
    ):
        if table.num_rows:
            parts.append(_rich_table(title, table))
    return Group(*parts)


def _first_difference(comparison: Comparison) -> str:
    first = comparison.first_divergence
    return (
        "no series differs" if first is None else f"first difference at step {first.step}, in {visible(first.series)}"
    )


def _rich_table(title: str, table: Table) -> Any:
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(title=title, title_justify="left", box=None, padding=(0, 2), header_style="dim")
    for name in table.column_names:
        shown.add_column(name)
    for row in table.slice(0, _MAX_ROWS).to_pylist():
        shown.add_row(*(Text(cell(value)) for value in row.values()))
    if table.num_rows > _MAX_ROWS:
        shown.add_row(Text(f"and {table.num_rows - _MAX_ROWS} more", style="dim"))
    return shown
