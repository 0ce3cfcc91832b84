"""The tables that questions about whole tensors are answered with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import pyarrow as pa

from sonde.read.tensors.analysis.blocks import Tracked
from sonde.read.tensors.analysis.evolution import COLUMNS
from sonde.schema.sketch import Array

_KEYS: Final = [("step", pa.int64()), ("kind", pa.string()), ("site", pa.string())]
EVOLUTION: Final = pa.schema([*_KEYS, *((column, pa.float64()) for column in COLUMNS)])
DISTRIBUTION: Final = pa.schema(
    [
        *_KEYS,
        *((column, pa.float64()) for column in ("mean", "std")),
        ("quantiles", pa.list_(pa.float64())),
        *((f"{what}_{to}", pa.float64()) for what in ("kl", "wasserstein") for to in ("first", "previous")),
        ("counts", pa.list_(pa.int64())),
        ("edges", pa.list_(pa.float64())),
        ("nonfinite", pa.int64()),
        ("num_sampled", pa.int64()),
        ("num_elements", pa.int64()),
    ]
)
SPECTRA: Final = pa.schema(
    [
        *_KEYS,
        ("method", pa.string()),
        ("rows", pa.int64()),
        ("columns", pa.int64()),
        *((c, pa.float64()) for c in ("frobenius", "spectral_norm", "stable_rank", "effective_rank")),
        *((c, pa.float64()) for c in ("alpha", "alpha_ks", "alpha_x_min")),
        ("alpha_tail", pa.int64()),
        ("singular_values", pa.list_(pa.float64())),
    ]
)
STANDING: Final = pa.schema([*EVOLUTION, *list(SPECTRA)[3:]])
SIMILARITY: Final = pa.schema(
    [
        *((c, pa.string()) for c in ("kind", "site")),
        *((c, pa.int64()) for c in ("step_a", "step_b")),
        ("cosine", pa.float64()),
    ]
)
LAYERS: Final = pa.schema(
    [
        *((c, pa.string()) for c in ("kind", "site_a", "site_b")),
        *((c, pa.float64()) for c in ("cosine", "same_turns")),
        ("num_steps", pa.int64()),
    ]
)
CKA: Final = pa.schema(
    [
        ("tensor", pa.string()),
        *((c, pa.int64()) for c in ("step_a", "step_b")),
        ("cka", pa.float64()),
        ("num_examples", pa.int64()),
        ("same_batch", pa.bool_()),
    ]
)
LORA: Final = pa.schema(
    [
        ("step", pa.int64()),
        *((c, pa.string()) for c in ("module", "adapter")),
        ("rank", pa.int64()),
        *((c, pa.float64()) for c in ("scale", "norm", "spectral_norm", "stable_rank", "effective_rank", "relative")),
        ("singular_values", pa.list_(pa.float64())),
    ]
)


def split_names(name: str) -> dict[str, str]:
    kind, _, site = name.partition("/")
    return {"kind": kind, "site": site}


def over_steps(schema: pa.Schema, found: Iterable[tuple[Tracked, dict[str, Array]]]) -> pa.Table:
    """Long table from columns per tensor; NaN, which means there is none, is null."""
    tables = []
    for tracked, columns in found:
        num = len(tracked.steps)
        numbers = [pa.array(columns[name], pa.float64(), from_pandas=True) for name in schema.names[3:]]
        keys = [pa.array(tracked.steps, pa.int64()), *(pa.array([v] * num) for v in split_names(tracked.name).values())]
        tables.append(pa.Table.from_arrays([*keys, *numbers], schema=schema))
    return pa.concat_tables(tables).combine_chunks()
