"""Analysis of low-rank adapters: the norm and rank of ΔW = scale · B · A, without forming it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.read.tensors.analysis.spectra import Spectrum
from sonde.schema.sketch import Array

_A: Final = re.compile(r"^(?P<module>.*?)\.?lora_(embedding_)?A(?P<adapter>(\.[^.]+)*?)(\.weight)?$")


@dataclass(frozen=True, slots=True)
class AdapterPair:
    """Names of the two factors, and of their module and adapter."""

    module: str
    adapter: str
    a: str
    b: str


def adapter_pairs(names: Iterable[str]) -> list[AdapterPair]:
    """Find pairs `…lora_A…`, `…lora_B…`, in the order of the names.

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
            pairs.append(AdapterPair(match["module"], match["adapter"].strip("."), name, partner))
    return pairs


def adapter_scales(structure: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """The scale of each adapter, by module and adapter, if the run's model.json has it.

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
    """Singular values of scale · B · A from the two factors: with B = Q₁R₁ and Aᵀ = Q₂R₂, they are those of R₁R₂ᵀ.

    Cost: (out + in)·r² instead of out·in·r; nothing larger than the factors is allocated.
    """
    left: Any = np.linalg.qr(np.asarray(b).astype(np.float64), mode="r")
    right: Any = np.linalg.qr(np.asarray(a).astype(np.float64).T, mode="r")
    small: Array = left @ right.T
    values = abs(scale) * np.linalg.svd(small, compute_uv=False).astype(np.float64, copy=False)
    return Spectrum(values, float(np.linalg.norm(values)), is_complete=True)
