"""Comparison of two sets of weights, files or snapshots, from one framework or two: per tensor, per layer, in total."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from sonde.display import html_of, visible
from sonde.read.run.schemas import schema_of
from sonde.read.table import Table
from sonde.read.tensors.analysis.difference import Difference, difference
from sonde.read.tensors.lazy import LazyTensors
from sonde.schema.frameworks.layouts import Canonical, Framework, detect
from sonde.schema.frameworks.match import match_models
from sonde.schema.names import strip_wrappers
from sonde.schema.snapshots.tensors import AnyArray

_NUMBERS: Final = "max_abs:double relative:double cosine:double changed_fraction:double"
_TENSORS: Final = schema_of(
    "name:string name_b:string status:string shape_a:[int64] shape_b:[int64] dtype_a:string dtype_b:string "
    f"{_NUMBERS} nonfinite_a:int64 nonfinite_b:int64 matched_by:string layout:string layout_a:string"
)
_LAYERS: Final = schema_of(f"layer:string num_tensors:int64 num_changed:int64 num_elements:int64 {_NUMBERS}")


@dataclass(frozen=True, slots=True, repr=False)
class WeightComparison:
    """The differences between the tensors of a and b."""

    a: str
    b: str
    tensors: Table
    """One row per tensor, most changed first. status: same, close (within the tolerance, in any dtype), changed,
    reshaped, retyped (other dtype, same values), only_a, only_b. relative is ‖b - a‖ / ‖a‖. layout describes how b was
    converted to PyTorch's layout, layout_a how a was."""
    layers: Table
    """The same numbers per layer, most changed first."""
    total: Mapping[str, Any]
    frameworks: tuple[Framework, Framework]
    tolerance: float = 0.0
    """Tolerance for ‖b - a‖ / ‖a‖ of each tensor; 0 means that values must be identical."""

    def __repr__(self) -> str:
        total = self.total
        return (
            f"<{visible(self.a)} and {visible(self.b)}: {total['num_same']} of {total['num_tensors']} tensors "
            f"identical; relative change {total['relative']:.3g}; see .tensors, .layers, .total>"
        )

    def _repr_html_(self) -> str:
        return html_of(self)

    @property
    def is_same(self) -> bool:
        """Whether every tensor is in both with the same shape, dtype and values, or within the tolerance."""
        return bool(self.total["num_same"] + self.total["num_close"] == self.tensors.num_rows)


@dataclass(frozen=True, slots=True)
class _Pair:
    """A tensor of a and its counterpart in b; one of them is missing if there is none."""

    name: str
    a: str | None = None
    b: str | None = None
    canonical_a: Canonical | None = None
    canonical_b: Canonical | None = None
    matched_by: str = "name"


def compare_weights(
    a: LazyTensors,
    b: LazyTensors,
    on_tensor: Callable[[int, int], None] | None = None,
    *,
    tolerance: float | None = None,
) -> WeightComparison:
    """Compare tensor by tensor, ignoring prefixes of wrappers and matching other frameworks' names and layouts.

    With a tolerance, tensors whose relative change is at most that are "close", in any dtype.
    `on_tensor(done, total)` is called after each tensor. Memory: a few MiB in addition to the current two tensors.
    """
    limit = tolerance or 0.0
    frameworks = detect(a), detect(b)
    by_name = {strip_wrappers(name): name for name in b}
    pairs = list(_by_name(a, by_name))
    if any(pair.b is None for pair in pairs) and frameworks[0] != frameworks[1]:
        pairs = list(_by_framework(a, b))
    rows, differences = [], []
    for done, pair in enumerate(pairs, 1):
        row, found = _compare(pair, a, b, limit)
        rows.append(row)
        differences.append((row, found))
        if on_tensor is not None:
            on_tensor(done, len(pairs))
    rows.sort(key=_by_change)
    tensors = pa.Table.from_pylist(rows, schema=_TENSORS)
    layers, total = _layer_table(differences), _total(differences)
    return WeightComparison(a.label, b.label, Table(tensors), Table(layers), total, frameworks, limit)


def _by_name(a: LazyTensors, by_name: Mapping[str, str]) -> Iterator[_Pair]:
    ours = {strip_wrappers(name): name for name in a}
    for short, name in ours.items():
        yield _Pair(short, name, by_name.get(short))
    for short, name in by_name.items():
        if short not in ours:
            yield _Pair(short, None, name)


def _by_framework(a: LazyTensors, b: LazyTensors) -> Iterator[_Pair]:
    shapes = ({name: spec.shape for name, spec in side.specs.items()} for side in (a, b))
    found = match_models(*shapes)
    for pair in found.pairs:
        yield _Pair(pair.a.name, pair.a.parts[0].source, pair.b.parts[0].source, pair.a, pair.b, pair.by)
    for only in found.only_a:
        yield _Pair(only.name, only.parts[0].source, None, only)
    for only in found.only_b:
        yield _Pair(only.name, None, only.parts[0].source, None, only)


def _compare(pair: _Pair, a: LazyTensors, b: LazyTensors, tolerance: float) -> tuple[dict[str, Any], Difference]:
    spec_a = a.specs[pair.a] if pair.a is not None else None
    spec_b = b.specs[pair.b] if pair.b is not None else None
    shape_a = pair.canonical_a.shape if pair.canonical_a else spec_a and spec_a.shape
    shape_b = pair.canonical_b.shape if pair.canonical_b else spec_b and spec_b.shape
    row: dict[str, Any] = {
        "name": pair.name,
        "name_b": pair.b,
        "shape_a": shape_a,
        "shape_b": shape_b,
        "dtype_a": spec_a and spec_a.dtype,
        "dtype_b": spec_b and spec_b.dtype,
        "matched_by": pair.matched_by if pair.a and pair.b else None,
        "layout": _layout(pair.canonical_b),
        "layout_a": _layout(pair.canonical_a),
    }
    if spec_a is None or spec_b is None:
        return {**row, "status": "only_b" if spec_a is None else "only_a"}, Difference()
    if shape_a != shape_b:
        return {**row, "status": "reshaped"}, Difference()
    found = difference(_read(a, pair.a, pair.canonical_a), _read(b, pair.b, pair.canonical_b))
    numbers = _numbers(found) | {"nonfinite_a": found.nonfinite_a, "nonfinite_b": found.nonfinite_b}
    return {**row, "status": _status(found, tolerance, is_retyped=spec_a.dtype != spec_b.dtype), **numbers}, found


def _status(found: Difference, tolerance: float, *, is_retyped: bool) -> str:
    if not found.num_changed and not is_retyped:
        return "same"
    if tolerance and found.is_within(tolerance):
        return "close"
    return "changed" if found.num_changed else "retyped"


def _read(tensors: LazyTensors, name: str | None, canonical: Canonical | None) -> AnyArray:
    assert name is not None
    return tensors[name] if canonical is None else np.ascontiguousarray(canonical.read(tensors.__getitem__))


def _layout(canonical: Canonical | None) -> str | None:
    """The conversion in words: `transpose 1 0`, `4 tensors concat, transpose 1 0`."""
    if canonical is None:
        return None
    joined = [f"{len(canonical.parts)} tensors {canonical.join}"] if len(canonical.parts) > 1 else []
    steps = [f"{step} {' '.join(map(str, numbers))}" for step, numbers in canonical.parts[0].steps]
    return ", ".join([*joined, *steps]) or None


def _numbers(found: Difference) -> dict[str, Any]:
    return {
        "max_abs": found.max_abs,
        "relative": found.relative,
        "cosine": found.cosine,
        "changed_fraction": found.changed_fraction,
    }


def _by_change(row: Mapping[str, Any]) -> tuple[bool, bool, float, str]:
    """Sort key: tensors that cannot be compared first, then non-finite ones, which no sum shows, then by change."""
    is_finite = row["status"] == "same" or not (row.get("nonfinite_a") or row.get("nonfinite_b"))
    return row.get("relative") is not None, is_finite, -(row.get("relative") or 0.0), row["name"]


def _layer_table(differences: list[tuple[dict[str, Any], Difference]]) -> pa.Table:
    groups: dict[str, list[tuple[dict[str, Any], Difference]]] = {}
    for row, found in differences:
        groups.setdefault(row["name"].rpartition(".")[0], []).append((row, found))
    rows: list[dict[str, Any]] = []
    for layer, members in groups.items():
        whole = _sum(members)
        changed = sum(row["status"] not in ("same", "close") for row, _ in members)
        rows.append(
            {
                "layer": layer,
                "num_tensors": len(members),
                "num_changed": changed,
                "num_elements": whole.num_elements,
                **_numbers(whole),
            }
        )
    rows.sort(key=lambda row: (-row["relative"], row["layer"]))
    return pa.Table.from_pylist(rows, schema=_LAYERS)


def _total(differences: list[tuple[dict[str, Any], Difference]]) -> dict[str, Any]:
    whole = _sum(differences)
    counts = {f"num_{status}": 0 for status in ("same", "close", "changed", "reshaped", "retyped", "only_a", "only_b")}
    for row, _ in differences:
        counts[f"num_{row['status']}"] += 1
    return {
        "num_tensors": len(differences),
        **counts,
        "num_elements": whole.num_elements,
        **_numbers(whole),
        "nonfinite_a": whole.nonfinite_a,
        "nonfinite_b": whole.nonfinite_b,
    }


def _sum(differences: list[tuple[dict[str, Any], Difference]]) -> Difference:
    return sum((found for _, found in differences), Difference())
