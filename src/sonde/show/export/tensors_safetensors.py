"""One step as a safetensors file, written tensor by tensor: the package's own writer wants them all in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np

from sonde.errors import UsageError
from sonde.run import LazyTensors
from sonde.schema.exported import SAFETENSORS_DTYPES

_CODES: Final = {dtype: code for code, dtype in SAFETENSORS_DTYPES.items()}


def write_step(path: Path, step: int, tensors: LazyTensors, facts: dict[str, Any]) -> None:
    header: dict[str, Any] = {
        "__metadata__": {"format": "sonde", "step": str(step), "run": str(facts["id"]), "name": str(facts["name"])}
    }
    offset = 0
    for name, spec in tensors.specs.items():
        if spec.dtype not in _CODES:
            raise UsageError(f"{name} is {spec.dtype}, which safetensors cannot hold. Choose --format h5 or npz.")
        span = [offset, offset + spec.nbytes]
        header[name] = {"dtype": _CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": span}
        offset = span[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # readers map the data, and mapped data wants to be aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in tensors:
            file.write(np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data)
