"""Tensors that several ranks hold together (`DTensor`): the part on this rank, and which part it is.

Never calls a method of a DTensor that computes: in torch 2.13 `norm()` and `sum()` of one return the local value, and
others start a collective.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from sonde.probe.outputs import is_plain_tensor
from sonde.schema.records import Shard


@dataclass(frozen=True, slots=True)
class Placed:
    """How the part of this rank relates to the whole tensor."""

    shard: Shard
    is_owner: bool = True
    """Whether this rank records the part: of several ranks with the same part, the first."""
    is_known: bool = True
    """Whether the parts can be joined again."""


WHOLE: Final = Placed(Shard(part=0, parts=1))
NOT_HERE: Final = Placed(Shard(part=0, parts=1), is_owner=False)


def is_sharded(value: object) -> bool:
    """Whether this is a DTensor. Does not import torch.distributed."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_of(tensor: Any) -> Any:
    """The part on this rank; any other tensor itself. A part that is still being received is waited for, as the
    optimizer would."""
    if is_plain_tensor(tensor) or not is_sharded(tensor):
        return tensor
    local = tensor._local_tensor  # `to_local` of a parameter returns another object at each call
    return local.wait() if type(local).__name__ == "AsyncCollectiveTensor" else local


def is_readable(tensor: object) -> bool:
    """Whether there is a plain tensor with data on this rank."""
    return is_plain_tensor(tensor) or (is_sharded(tensor) and is_plain_tensor(local_of(tensor)))


def placements_of(tensor: Any) -> Any:
    return tensor.placements if is_sharded(tensor) else None


def placed(tensor: Any) -> Placed:
    """The part of a tensor on this rank, from its placements: no communication."""
    if not is_sharded(tensor):
        return WHOLE
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return NOT_HERE
    part, parts, addend, addends, is_owner, is_known = 0, 1, 0, 1, True, True
    for dim, placement in enumerate(tensor.placements):
        size, at = mesh.size(dim), coordinate[dim]
        if placement.is_replicate():
            is_owner = is_owner and at == 0
        elif placement.is_partial():
            is_known = is_known and placement.reduce_op == "sum"
            addend, addends = addend * size + at, addends * size
        else:  # Shard and _StridedShard
            part, parts = part * size + at, parts * size
    if addends > 1:
        return Placed(Shard(part=addend, parts=addends, how="sum"), is_owner, is_known and parts == 1)
    return Placed(Shard(part=part, parts=parts), is_owner)


def has_shards(model: nn.Module) -> bool:
    """Whether some of a model's parameters are on other ranks."""
    return any(is_sharded(parameter) for parameter in model.parameters())
