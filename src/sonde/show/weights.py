"""A comparison of two sets of weights, for the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rich.console import Group
from rich.text import Text

from sonde.run import WeightComparison
from sonde.show.term.number import counted, number
from sonde.show.term.table import Column, table
from sonde.show.term.text import plain

_NUMBERS: Final = ("relative", "max_abs", "cosine", "changed_fraction")
_TITLES: Final = ("relative change", "max |Δ|", "cosine", "changed")
_STATUSES: Final = {"only_a": "only in a", "only_b": "only in b", "retyped": "other dtype"}


def weights_as_json(found: WeightComparison) -> dict[str, Any]:
    """The complete comparison."""
    return {
        "a": found.a,
        "b": found.b,
        "same": found.is_same,
        "tolerance": found.tolerance,
        "frameworks": list(found.frameworks),
        "total": dict(found.total),
        "layers": found.layers.to_pylist(),
        "tensors": found.tensors.to_pylist(),
    }


def weights_as_rich(found: WeightComparison, top: int = 20) -> Group:
    """The verdict, and the layers and tensors that changed most."""
    parts: list[Any] = [Text(f"a = {plain(found.a)}"), Text(f"b = {plain(found.b)}")]
    if found.frameworks[0] != found.frameworks[1]:
        parts.append(
            Text(f"a is from {found.frameworks[0]}, b from {found.frameworks[1]}: matched by layer", style="dim")
        )
    changed = [row for row in found.tensors.to_pylist() if row["status"] not in ("same", "close")]
    if changed:
        layers = [row for row in found.layers.to_pylist() if row["num_changed"]]
        parts += [Text(), _layers(layers[:top]), Text(), _tensors(changed[:top])]
        parts += [
            Text(f"{counted(len(changed) - top, 'more tensor')}; show all with --top {len(changed)}.", style="dim")
        ] * (len(changed) > top)
    return Group(*parts, Text(), Text(verdict(found)))


def _layers(rows: list[dict[str, Any]]) -> Any:
    columns = [Column("layer", cut=True), Column("tensors changed", right=True), *_number_columns()]
    cells = [(row["layer"] or "(root)", f"{row['num_changed']} of {row['num_tensors']}", *_cells(row)) for row in rows]
    return table(columns, cells)


def _tensors(rows: list[dict[str, Any]]) -> Any:
    columns = [Column("tensor", cut=True), Column(""), *_number_columns()]
    return table(columns, [(row["name"], _status(row), *_cells(row)) for row in rows])


def _number_columns() -> list[Column]:
    return [Column(title, right=True) for title in _TITLES]


def _cells(row: dict[str, Any]) -> list[str]:
    values = [row[name] for name in _NUMBERS]
    if values[0] is None or row.get("num_elements") == 0:  # nothing to compare
        return ["–"] * len(values)
    return [*(number(value) for value in values[:3]), f"{values[3]:.1%}"]


def _status(row: dict[str, Any]) -> str:
    if row["status"] == "reshaped":
        return f"{row['shape_a']} → {row['shape_b']}"
    a, b = row["dtype_a"], row["dtype_b"]
    types = f" {a} → {b}" if a and b and a != b else ""
    nonfinite = ", non-finite" if row["nonfinite_a"] or row["nonfinite_b"] else ""
    return f"{_STATUSES.get(row['status'], row['status'])}{types}{nonfinite}"


def verdict(found: WeightComparison) -> str:
    """How much of the weights differs, in words."""
    total = found.total
    if found.is_same and total["num_close"]:
        return (
            f"Of {counted(total['num_tensors'], 'tensor')}, {total['num_same']} are identical and {total['num_close']} "
            f"agree within a relative tolerance of {number(found.tolerance)}. Overall relative difference: "
            f"{number(total['relative'])}."
        )
    if found.is_same:
        if total["num_tensors"] == 1:
            return "The tensor is identical, element by element."
        return f"All {total['num_tensors']:,} tensors are identical, element by element."
    close = [f"{total['num_close']} within the tolerance"] if total["num_close"] else []
    said = [*what_differs(found), *close]
    change = f" Overall relative change: {number(total['relative'])}." if total["num_changed"] else ""
    return (
        f"Of {counted(total['num_tensors'], 'tensor')}: {', '.join(said)}, {total['num_same']} identical."
        f"{change}{_nonfinite(total)}"
    )


def what_differs(found: WeightComparison) -> list[str]:
    """The number of tensors that differ in each way, in words; empty if the weights are the same."""
    ways = {
        "changed": "changed",
        "retyped": "with the same values in another dtype",
        "reshaped": "with another shape",
        "only_a": "only in a",
        "only_b": "only in b",
    }
    return [f"{found.total[f'num_{way}']} {words}" for way, words in ways.items() if found.total[f"num_{way}"]]


def _nonfinite(total: Mapping[str, Any]) -> str:
    """Report NaN and infinity, which are excluded from norms and cosines."""
    counts = {side: total[f"nonfinite_{side}"] for side in "ab"}
    if not any(counts.values()):
        return ""
    return f" Excluded as non-finite: {counted(counts['a'], 'element')} of a, {counts['b']:,} of b."
