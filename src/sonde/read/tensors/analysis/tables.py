"""Schemas of the tables that analyses of whole tensors return."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import pyarrow as pa

from sonde.read.run.schemas import schema_of
from sonde.read.tensors.analysis.blocks import Tracked
from sonde.read.tensors.analysis.evolution import COLUMNS
from sonde.schema.sketch import Array

_KEYS: Final = "step:int64 kind:string site:string"
EVOLUTION: Final = schema_of(" ".join([_KEYS, *(f"{name}:double" for name in COLUMNS)]))
DISTRIBUTION: Final = schema_of(
    f"{_KEYS} mean:double std:double quantiles:[double] kl_first:double kl_previous:double wasserstein_first:double "
    "wasserstein_previous:double counts:[int64] edges:[double] nonfinite:int64 num_sampled:int64 num_elements:int64"
)
SPECTRA: Final = schema_of(
    f"{_KEYS} method:string rows:int64 columns:int64 frobenius:double spectral_norm:double stable_rank:double "
    "effective_rank:double alpha:double alpha_ks:double alpha_x_min:double alpha_tail:int64 singular_values:[double]"
)
STANDING: Final = pa.schema([*EVOLUTION, *list(SPECTRA)[3:]])
SIMILARITY: Final = schema_of("kind:string site:string step_a:int64 step_b:int64 cosine:double")
LAYERS: Final = schema_of("kind:string site_a:string site_b:string cosine:double same_turns:double num_steps:int64")
CKA: Final = schema_of("tensor:string step_a:int64 step_b:int64 cka:double num_examples:int64 same_batch:bool")
LORA: Final = schema_of(
    "step:int64 module:string adapter:string rank:int64 scale:double norm:double spectral_norm:double "
    "stable_rank:double effective_rank:double relative:double singular_values:[double]"
)


def split_names(name: str) -> dict[str, str]:
    kind, _, site = name.partition("/")
    return {"kind": kind, "site": site}


def over_steps(schema: pa.Schema, found: Iterable[tuple[Tracked, dict[str, Array]]]) -> pa.Table:
    """A long table from columns per tensor; NaN, which marks a missing value, becomes null."""
    tables = []
    for tracked, columns in found:
        num = len(tracked.steps)
        numbers = [pa.array(columns[name], pa.float64(), from_pandas=True) for name in schema.names[3:]]
        keys = [pa.array(tracked.steps, pa.int64()), *(pa.array([v] * num) for v in split_names(tracked.name).values())]
        tables.append(pa.Table.from_arrays([*keys, *numbers], schema=schema))
    return pa.concat_tables(tables).combine_chunks()
