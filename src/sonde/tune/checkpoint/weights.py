"""Weights and buffers of a model as named tensors, and back. Names are those the user wrote, without wrappers."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from sonde.errors import UsageError
from sonde.schema.names import strip_wrappers

_SAMPLE: Final = 256


@dataclass(frozen=True, slots=True)
class Weights:
    """The part of a checkpoint for one model."""

    tensors: dict[str, Tensor]
    ties: dict[str, str]
    """Names of tensors that are the same as another: stored once, restored under both names."""
    others: dict[str, Any]
    """Entries of the state that are not tensors (`get_extra_state`)."""
    base: dict[str, int]
    """For frozen weights that are left out: a checksum of a sample."""


def take_weights(model: nn.Module, *, adapters_only: bool = False) -> Weights:
    """Views of a model's tensors, not copies. With `adapters_only`, frozen parameters are left out."""
    state = model.state_dict()
    names = _names(state)
    frozen = {key for key, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    skipped = frozen if adapters_only else set()
    kept = Weights({}, {}, {}, {})
    first: dict[tuple[Any, ...], str] = {}
    for key, value in state.items():
        name = names[key]
        if not isinstance(value, Tensor):
            kept.others[name] = value
        elif key in skipped:
            kept.base[name] = _checksum(value)
        elif (known := first.setdefault(_identity(value), name)) != name:
            kept.ties[name] = known
        else:
            kept.tensors[name] = _dense(name, value)
    return kept


def put_weights(model: nn.Module, kept: Weights) -> None:
    """Copy them into the model; nothing is changed if something does not match."""
    state = model.state_dict()
    names = _names(state)
    given = {**kept.tensors, **{name: kept.tensors[known] for name, known in kept.ties.items()}, **kept.others}
    known = set(names.values())
    _check_names(known, given.keys() | kept.base.keys())
    for key, value in state.items():
        if names[key] in kept.base and _checksum(value) != kept.base[names[key]]:
            raise UsageError(
                f'the frozen weight "{names[key]}" is not the one these adapters were trained on. Load the same base '
                "model, or save checkpoints with adapters_only=False."
            )
        if isinstance(value, Tensor) and names[key] in given:
            _check_fit(names[key], value, given[names[key]])
    new = {key: given[name] for key, name in names.items() if name in given}
    model.load_state_dict(new, strict=False)  # missing and unexpected names were rejected above


def _names(state: Mapping[str, Any]) -> dict[str, str]:
    """Key -> name, all different."""
    stripped = {key: strip_wrappers(key) for key in state}
    counts = Counter(stripped.values())
    return {key: name if counts[name] == 1 else key for key, name in stripped.items()}


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return (id(tensor),)
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device)


def _dense(name: str, tensor: Tensor) -> Tensor:
    if hasattr(tensor, "to_local"):
        raise UsageError(
            f'"{name}" is sharded over ranks (a DTensor); a checkpoint of one process cannot store it. Use '
            "torch.distributed.checkpoint, or gather the state first."
        )
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise UsageError(
            f'"{name}" is {tensor.layout} on {tensor.device}; a checkpoint can only store dense tensors with values.'
        )
    return tensor


def _checksum(tensor: Tensor) -> int:
    """A checksum of a few hundred evenly spaced elements: enough to recognise another base model."""
    flat = tensor.detach().reshape(-1)
    sample = flat[:: max(flat.numel() // _SAMPLE, 1)].contiguous()
    return zlib.crc32(sample.cpu().view(torch.uint8).numpy().tobytes()) if sample.numel() else 0


def _check_names(known: set[str], given: set[str]) -> None:
    missing, unexpected = sorted(known - given), sorted(given - known)
    if missing or unexpected:
        raise UsageError(
            "the checkpoint belongs to another model: "
            + "; ".join(
                f"{what} {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
                for what, names in (("it lacks", missing), ("this model has no", unexpected))
                if names
            )
            + ". Build the model as it was when the checkpoint was saved."
        )


def _check_fit(name: str, live: Tensor, saved: Tensor) -> None:
    if live.shape != saved.shape or live.dtype != saved.dtype:
        raise UsageError(
            f'"{name}" is {tuple(saved.shape)} of {saved.dtype} in the checkpoint and {tuple(live.shape)} of '
            f"{live.dtype} in the model. Build the model as it was when the checkpoint was saved."
        )
