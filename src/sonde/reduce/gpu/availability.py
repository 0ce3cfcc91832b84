"""Whether the fused kernels work on a device, tried once. Where they do not, torch is used and one line says so."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sonde.reduce.gpu.triton import ChunkList
    from sonde.reduce.gpu.triton_single import Bank
    from sonde.reduce.gpu.triton_step import StepChunks
    from sonde.reduce.gpu.triton_update import UpdateChunks

_log = logging.getLogger("sonde")
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
    """The fused kernel for what an optimizer step did to parameters of these sizes, or None."""
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


def _works_on(device: torch.device) -> bool:
    if device not in _works:
        try:
            from sonde.reduce.gpu import triton

            triton.warm_up(device)
            _works[device] = True
        except Exception as error:  # noqa: BLE001 - no Triton, an old GPU, no compiler: many ways, one answer
            _works[device] = False
            why = f"{type(error).__name__}: {error}"
            _log.warning("the fused GPU kernels do not work here and torch is used instead (%s)", why)
    return _works[device]
