"""Names and types inside exported tensor files, shared by the exporter and the reader."""

from __future__ import annotations

from typing import Any, Final

from sonde.schema.packages import require

NAME, DTYPE, STEP = "name", "dtype", "step"
"""Attributes of an exported tensor: its full name, its torch dtype, its step."""
FORMAT: Final = "sonde_tensors"
"""Attribute of the file: the version of the layout `/step-000000500/<kind>/<site>`."""
DTYPES_KEY: Final = "__sonde_dtypes__"
"""JSON, as bytes: the type of each tensor that is stored as the bits of another."""
STEP_KEY: Final = "__sonde_step__"
"""The step of an export."""
SAFETENSORS_DTYPES: Final = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2": "float8_e5m2", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64",
    "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool", "C64": "complex64",
}  # fmt: skip
"""Types by their names in safetensors and in torch."""


def require_h5py() -> Any:
    """The package, or an error with the command that installs it."""
    return require("h5py", "h5", "Reading or writing HDF5")
