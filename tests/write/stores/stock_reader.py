"""Reads snapshots with zarr-python (and icechunk) alone, and compares every bit with what torch.save wrote.

Arguments: where the snapshots are (a folder of files, the folder of a repository, or s3://bucket/prefix), and the
folder of references. Prints a JSON object: the number of tensors that are equal, and the names of those that are not.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr


def snapshot(where: str, step: int) -> Any:
    if where.startswith("s3://"):
        import icechunk

        bucket, _, prefix = where.removeprefix("s3://").partition("/")
        endpoint = os.environ["AWS_ENDPOINT_URL"]
        storage = icechunk.s3_storage(
            bucket=bucket, prefix=prefix, endpoint_url=endpoint, allow_http=True, force_path_style=True, from_env=True
        )
        return zarr.open_group(icechunk.Repository.open(storage).readonly_session("main").store, mode="r")[group(step)]
    if where.endswith("repository"):
        import icechunk

        repository = icechunk.Repository.open(icechunk.local_filesystem_storage(where))
        return zarr.open_group(repository.readonly_session("main").store, mode="r")[group(step)]
    return zarr.open_group(zarr.storage.ZipStore(f"{where}/{group(step)}.zarr.zip", mode="r"), mode="r")


def group(step: int) -> str:
    return f"step-{step:09d}"


def as_tensor(array: Any) -> torch.Tensor:
    """The documented view: bfloat16 and 8-bit floats are the integers of their bits."""
    return torch.from_numpy(np.array(array[...])).view(getattr(torch, array.attrs["torch_dtype"]))


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().resolve_conj().reshape(-1).view(torch.uint8).numpy())


equal, different, extra = 0, [], []
for path in sorted(Path(sys.argv[2]).glob("*.pt")):
    step = int(path.stem)
    found, reference = snapshot(sys.argv[1], step), torch.load(path)
    for name, tensor in reference.items():
        other = as_tensor(found[name])
        is_equal = (other.dtype, other.shape) == (tensor.dtype, tensor.shape) and bits(other) == bits(tensor)
        equal += is_equal
        different += [] if is_equal else [f"{step} {name}"]
    names = {f"{kind}/{name}" for kind, members in found.groups() for name, _ in members.arrays()}
    extra += sorted(names - set(reference))
assert "sonde" not in sys.modules
print(json.dumps({"equal": equal, "different": different, "extra": extra}))
