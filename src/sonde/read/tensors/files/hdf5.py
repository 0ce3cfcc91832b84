"""HDF5 files as lazy tensors: sonde's exports, Keras weights by the names Keras shows, other files by path."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from sonde.errors import CorruptError
from sonde.read.tensors.lazy import LazyTensors, TensorSpec
from sonde.schema.snapshots.exported import DTYPE, FORMAT, NAME, require_h5py
from sonde.schema.snapshots.tensors import STORAGE, AnyArray, as_values

_KERAS_VARS: Final = re.compile(r"(?:(?P<layer>.*)/)?vars/(?P<index>\d+)")
_KERAS_LEAVES: Final = {
    "batch_normalization": ("gamma", "beta", "moving_mean", "moving_variance"),
    "layer_normalization": ("gamma", "beta"),
    "group_normalization": ("gamma", "beta"),
    "embedding": ("embeddings",),
    "cell": ("kernel", "recurrent_kernel", "bias"),
    "rms_normalization": ("scale",),
}
"""Keras's names of a layer's variables, which its files only number."""
_KERNELS: Final = re.compile(r"(.*_)?(dense|conv\dd(_transpose)?)")


def open_hdf5(path: Path) -> LazyTensors:
    """The tensors of one file. If an export has several steps, names start with the step: step-000000500/param/…"""
    places, order = {}, _keras_order(path)
    with open_file(path) as file:
        is_ours = FORMAT in file.attrs
        several = is_ours and len(file) > 1
        for place, dataset in _datasets(file):
            name = str(dataset.attrs.get(NAME, place)) if is_ours else _keras_name(file, place)
            dtype = str(dataset.attrs.get(DTYPE, dataset.dtype.name))
            if dtype in STORAGE:
                places[f"{place.partition('/')[0]}/{name}" if several else name] = place, dataset.shape, dtype

    def read(name: str) -> AnyArray:
        place, _, dtype = places[name]
        with open_file(path) as file:
            values: AnyArray = np.asarray(file[place][()])
        return as_values(values, dtype) if values.dtype.name != dtype else values

    names = sorted(places, key=lambda name: order.get(name.partition("/")[0], len(order))) if order else list(places)
    return LazyTensors(str(path), {name: TensorSpec(*places[name][1:]) for name in names}, read)


def open_file(path: Path) -> Any:
    """Open an h5py file; for a .keras archive, the weights inside it."""
    try:
        if path.suffix == ".keras":
            with zipfile.ZipFile(path) as archive:
                return require_h5py().File(io.BytesIO(archive.read("model.weights.h5")), "r")
        return require_h5py().File(path, "r")
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise CorruptError(f"cannot read {path} as HDF5: {error}.") from error


def _datasets(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    h5py = require_h5py()
    for key in group:
        # A link could lead to another file, so it is not followed.
        if not isinstance(group.get(key, getlink=True), h5py.HardLink):
            continue
        member = group[key]
        if isinstance(member, h5py.Dataset):
            yield f"{prefix}{key}", member
        else:
            yield from _datasets(member, f"{prefix}{key}/")


def _keras_name(file: Any, place: str) -> str:
    """`layers/conv2d/vars/0` becomes `stem/kernel` if the layer is named `stem`."""
    match = _KERAS_VARS.fullmatch(place)
    if match is None or match["layer"] is None:
        return place
    parts = match["layer"].split("/")
    shown = []
    for depth, part in enumerate(parts, 1):
        group = file["/".join(parts[:depth])]
        if part != "layers":
            shown.append(str(group["vars"].attrs.get("name", part)) if "vars" in group else part)
    kind = re.sub(r"_\d+$", "", parts[-1])
    leaves = _KERAS_LEAVES.get(kind) or (("kernel", "bias") if _KERNELS.fullmatch(kind) else ())
    index = int(match["index"])
    shown.append(leaves[index] if index < len(leaves) else f"vars/{index}")
    return "/".join(shown)


def _keras_order(path: Path) -> dict[str, int]:
    """The position of each layer in the model, from the archive: HDF5 sorts by name."""
    if path.suffix != ".keras":
        return {}
    try:
        with zipfile.ZipFile(path) as archive:
            config = json.loads(archive.read("config.json"))
        layers = [layer.get("name") or layer["config"]["name"] for layer in config["config"]["layers"]]
    except (KeyError, TypeError, ValueError, OSError, zipfile.BadZipFile):
        return {}  # a subclassed model has no list of layers; its names are then in alphabetical order
    return {str(name): place for place, name in enumerate(layers)}
