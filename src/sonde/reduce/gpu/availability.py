"""Tests once whether the fused kernels work on a device. If they do not, torch is used and one line says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sonde.display import print_line

if TYPE_CHECKING:
    from sonde.reduce.gpu.triton import ChunkList
    from sonde.reduce.gpu.triton_single import Bank
    from sonde.reduce.gpu.triton_step import StepChunks
    from sonde.reduce.gpu.triton_update import UpdateChunks

_works: dict[torch.device, bool] = {}


def chunk_list(numels: Sequence[int], dtype: torch.dtype, device: torch.device) -> ChunkList | None:
    """The fused kernels for such tensors, or None."""
    if device.type != "cuda" or not _works_on(device):
        return None
    from sonde.reduce.gpu import triton

    return triton.ChunkList(numels, dtype, device) if triton.reads(dtype, device) else None


def new_bank(device: torch.device, size: int, stream: int) -> Bank | None:
    """Memory for tensors that are read one by one on a stream of a device, or None."""
    if device.type != "cuda" or not _works_on(device):
        return None
    from sonde.reduce.gpu.triton_single import Bank

    return Bank(device, size, stream)


def update_chunks(numels: Sequence[int], device: torch.device) -> UpdateChunks | None:
    """The fused kernel for the update of parameters of these sizes, or None."""
    if device.type != "cuda" or not _works_on(device):
        return None
    from sonde.reduce.gpu.triton_update import UpdateChunks

    return UpdateChunks(numels, device)


def step_chunks(numels: Sequence[int], device: torch.device, *, size: int) -> StepChunks | None:
    """The fused kernels that know an optimizer's formula, for parameters of these sizes, or None."""
    if device.type != "cuda" or not _works_on(device):
        return None
    from sonde.reduce.gpu.triton_step import StepChunks

    return StepChunks(numels, device, size=size)


def finds_nonfinite(device: torch.device) -> bool:
    """Whether the kernels of `triton_finite` work on this device."""
    return device.type == "cuda" and _works_on(device)


def _works_on(device: torch.device) -> bool:
    if device not in _works:
        try:
            from sonde.reduce.gpu import triton

            triton.warm_up(device)
            _works[device] = True
        except Exception as error:  # noqa: BLE001 - no Triton, an old GPU, no compiler: many causes, one answer
            _works[device] = False
            why = f"{type(error).__name__}: {error}"
            print_line(f"sonde: warning: the fused GPU kernels do not work here; torch is used instead ({why})")
    return _works[device]
