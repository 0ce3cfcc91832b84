"""Any torch tensor as a flat dense real one, without a copy if possible; reports unsupported kinds.

Nothing here waits for the device: no branch depends on a value.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

# No conversion kernel exists for these; they are reported once and skipped.
_UNREADABLE: Final = frozenset(
    getattr(torch, name)
    for name in [
        "int1",
        "int2",
        "int3",
        "int4",
        "int5",
        "int6",
        "int7",
        "uint1",
        "uint2",
        "uint3",
        "uint4",
        "uint5",
        "uint6",
        "uint7",
        "float4_e2m1fn_x2",
        "bits8",
        "bits16",
        "bits1x8",
        "bits2x4",
        "bits4x2",
    ]
    if hasattr(torch, name)
)
_LOW_PRECISION: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})
_COMPLEX_HALF: Final = getattr(torch, "complex32", None)


class UnreadableError(Exception):
    """An unsupported kind of tensor; the message says which."""


def whole(tensor: Tensor) -> Tensor:
    """The local data of a tensor, if that is all of it: neither sharded over ranks, nor without values."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise UnreadableError("inside vmap or grad a tensor represents many values. Return it, and record the result")
    if type(tensor).__name__ == "FakeTensor":
        raise UnreadableError("a FakeTensor has no value")
    distributed: Any = tensor
    placements = getattr(distributed, "placements", None)
    if placements is None:
        return tensor
    if not all(placement.is_replicate() for placement in placements):
        raise UnreadableError("the DTensor is sharded over ranks. Record tensor.full_tensor()")
    local: Tensor = distributed.to_local()
    return local


def work_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of the arithmetic: float32 if it represents every value exactly, otherwise float64."""
    dtype = tensor.dtype
    if dtype in _LOW_PRECISION or (dtype.itemsize == 1 and dtype.is_floating_point):
        return torch.float32
    # MPS has no float64; its integers above 2**24 are rounded there.
    return torch.float64 if tensor.device.type != "mps" else torch.float32


def is_plain(tensor: Tensor) -> bool:
    """Whether this is a strided real tensor of an ordinary dtype, as nearly every tensor is."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        return False
    dtype = tensor.dtype
    return dtype in _LOW_PRECISION or (dtype not in _UNREADABLE and not tensor.is_complex() and not tensor.is_quantized)


def dense(tensor: Tensor) -> tuple[Tensor, int]:
    """A strided real tensor with the same values, and the number of zeros that a sparse layout leaves out."""
    if is_plain(tensor):
        return tensor, 0
    if tensor.dtype in _UNREADABLE:
        raise UnreadableError(f"dtype {tensor.dtype}")
    if tensor.is_meta:
        raise UnreadableError("device meta: a tensor without values")
    if tensor.is_nested:
        return dense(_joined_parts(tensor))
    if tensor.layout is torch.sparse_coo:
        # Uncoalesced duplicates add up; coalesce() returns a new tensor and does not change the gradient.
        stored = dense(tensor.coalesce().values())[0]
        return stored, _numel(tensor) - stored.numel()
    if tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        stored = dense(tensor.values())[0]
        return stored, _numel(tensor) - stored.numel()
    if tensor.layout is not torch.strided:
        raise UnreadableError(f"layout {tensor.layout}")
    if tensor.is_quantized:
        return tensor.dequantize(), 0
    if tensor.dtype is _COMPLEX_HALF:
        tensor = tensor.to(torch.complex64)
    return torch.view_as_real(tensor.resolve_conj()), 0


def _numel(tensor: Tensor) -> int:
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def _joined_parts(tensor: Tensor) -> Tensor:
    # values() of a jagged tensor is a view, but with lengths it also includes the gaps between the parts.
    jagged: Any = tensor  # torch's stubs do not know its methods
    if tensor.layout is torch.jagged and jagged.lengths() is None:
        return tensor.values()
    parts = [part.reshape(-1) for part in tensor.unbind()]
    return torch.cat(parts) if parts else torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def flat(tensor: Tensor) -> Tensor:
    """One dimension. Sketches ignore order: a dense permutation (channels_last, a transpose) is not copied."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    if _is_permuted_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return tensor.reshape(-1)


def addressable(tensor: Tensor) -> Tensor:
    """A tensor whose elements are contiguous from its address on, for kernels that get nothing else. Usually the tensor
    itself: creating a view would take longer than all the rest."""
    if tensor.is_contiguous() and not tensor.is_neg():
        return tensor
    # One dimension may still have gaps, as in x[::2] and x[..., 0].
    return flat(tensor.detach().resolve_neg()).contiguous()


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements are contiguous, in whatever order."""
    return tensor.is_contiguous() or _is_permuted_dense(tensor)


def _is_permuted_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True
