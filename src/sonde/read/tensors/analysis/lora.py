"""What a low-rank adapter has added to its weight: the norm and rank of ΔW = scale · B · A, without forming it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.read.tensors.analysis.spectra import Spectrum
from sonde.schema.sketch import Array

_A: Final = re.compile(r"^(?P<module>.*?)\.?lora_(?P<embedding>embedding_)?A(?P<adapter>(\.[^.]+)*?)(\.weight)?$")


@dataclass(frozen=True, slots=True)
class AdapterPair:
    """Names of the two factors, and of the module and the adapter they belong to."""

    module: str
    adapter: str
    a: str
    b: str
    is_embedding: bool = False
    """Adapters of embeddings store A as (rank, words) and B as (width, rank): ΔW of the weight is its transpose."""


def adapter_pairs(names: Iterable[str]) -> list[AdapterPair]:
    """Pairs `…lora_A…`, `…lora_B…` in the order of the names.

    >>> adapter_pairs(["q.lora_A.default.weight", "q.lora_B.default.weight"])[0].module
    'q'
    """
    known = list(names)
    there = set(known)
    pairs = []
    for name in known:
        match = _A.match(name)
        if match is None:
            continue
        before, after = name[: match.end("module")], name[match.end("module") :]
        partner = before + after.replace("lora_embedding_A", "lora_embedding_B", 1).replace("lora_A", "lora_B", 1)
        if partner in there:
            is_embedding = match["embedding"] is not None
            pairs.append(AdapterPair(match["module"], match["adapter"].strip("."), name, partner, is_embedding))
    return pairs


def adapter_scales(structure: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """What each adapter multiplies B A by, by module and adapter, where the run's model.json says so.

    >>> adapter_scales({"modules": [{"name": "q", "scaling": {"default": 2.0}}]})
    {('q', 'default'): 2.0}
    """
    return {
        (str(module.get("name")), str(adapter)): float(scale)
        for module in structure.get("modules", ())
        if isinstance(module.get("scaling"), Mapping)
        for adapter, scale in module["scaling"].items()
        if isinstance(scale, int | float)
    }


def delta_spectrum(a: NDArray[Any], b: NDArray[Any], scale: float = 1.0) -> Spectrum:
    """Singular values of scale · B · A from the two factors: B = Q₁R₁, Aᵀ = Q₂R₂, and R₁R₂ᵀ has the same ones.

    Cost: (out + in)·r² instead of out·in·r; nothing larger than the factors is made.
    """
    left: Any = np.linalg.qr(np.asarray(b).astype(np.float64), mode="r")
    right: Any = np.linalg.qr(np.asarray(a).astype(np.float64).T, mode="r")
    small: Array = left @ right.T
    values = abs(scale) * np.linalg.svd(small, compute_uv=False).astype(np.float64, copy=False)
    return Spectrum(values, float(np.linalg.norm(values)), is_complete=True)
