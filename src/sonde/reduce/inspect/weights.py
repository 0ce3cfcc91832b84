"""Size of weights, and stable rank ||W||_F^2 / ||W||_2^2 of matrices and adapters by a fixed number of power steps.

No decomposition: those wait for the device.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_STEPS: Final = 10
MAX_EXTENT: Final = 65_536


def start_vector(size: int, like: Tensor) -> Tensor:
    """A fixed vector that is orthogonal to nothing in particular, without a random generator."""
    position = torch.arange(1, size + 1, device=like.device, dtype=torch.float32)
    return torch.cos(position * 2.399963)


def largest_singular_square(weight: Tensor) -> Tensor:
    """||W||_2^2 of a float32 matrix, from below."""
    vector = start_vector(weight.shape[1], weight)
    vector = vector / vector.norm()
    product = vector
    for _ in range(_STEPS):
        product = weight.T @ (weight @ vector)
        vector = product / product.norm().clamp_min(1e-30)
    largest: Tensor = (weight @ vector).square().sum()
    return largest


def stable_rank(weight: Tensor) -> Tensor:
    """Between 1 and the rank; 0 for a matrix of zeros."""
    matrix = _scaled(weight.detach().float())
    frobenius = matrix.square().sum()
    return torch.where(frobenius > 0, frobenius / largest_singular_square(matrix).clamp_min(1e-30), 0.0 * frobenius)


def product_rank(b: Tensor, a: Tensor) -> Tensor:
    """Stable rank of the product B A of an adapter, from two small matrices: B^T B and A A^T."""
    left, right = _scaled(b.detach().float()), _scaled(a.detach().float())
    small = (left.T @ left) @ (right @ right.T)  # its eigenvalues are the squared singular values of B A
    trace = small.diagonal().sum()
    vector = start_vector(len(small), small)
    for _ in range(_STEPS):
        vector = small @ vector
        vector = vector / vector.norm().clamp_min(1e-30)
    largest = vector @ (small @ vector)
    return torch.where(trace > 0, trace / largest.clamp_min(1e-30), 0.0 * trace)


def product_ratio(b: Tensor, a: Tensor, base: Tensor) -> Tensor:
    """||B A||_F / ||W||_F: the size of an adapter's product relative to the weight it is added to."""
    left, right = b.detach().float(), a.detach().float()
    norm = ((left.T @ left) * (right @ right.T).T).sum().clamp_min(0).sqrt()
    ratio: Tensor = norm / base.detach().float().norm().clamp_min(1e-30)
    return ratio


def _scaled(matrix: Tensor) -> Tensor:
    return matrix / matrix.abs().amax().clamp_min(1e-30)


def extent(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Root mean square and largest magnitude of a contiguous weight; of a large one, from evenly spaced elements."""
    values = weight.detach().view(-1)
    sample = values[:: max(1, len(values) // MAX_EXTENT)].float()
    return torch.linalg.vector_norm(sample) / len(sample) ** 0.5, torch.linalg.vector_norm(sample, float("inf"))
