"""Norm of gradient and weight of each projection of each attention, and of each head's share of the values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from sonde.flow.fetch import Gathered
from sonde.flow.model_index import Attention
from sonde.probe.guards import quiet


class HeadGradients:
    """Asked for after a pass, all together; numbers once they are waited for. Of several passes, the last."""

    def __init__(self, found: Sequence[Attention], num_heads: int | None) -> None:
        self.found, self.num_heads = found, num_heads
        self.ratios: dict[tuple[str, str], float] = {}
        self.heads: dict[str, list[float]] = {}
        self._asked: tuple[list[tuple[str, str]], list[str], Gathered] | None = None

    def ask(self) -> None:
        """Of the gradients that are there now. Does not wait."""
        keys: list[tuple[str, str]] = []
        tensors: list[Tensor] = []
        by_head: dict[str, Tensor] = {}
        with quiet():
            for part in self.found:
                num = self.num_heads or part.num_heads
                for key, grad, weight in _projections(part):
                    keys.append((part.layer, key))
                    tensors += [grad, weight]
                    if key == "value" and num and grad.shape[0] % num == 0:
                        by_head[part.layer] = grad.reshape(num, -1)
            norms = [*_norms(tensors), *(_norm_of_rows(rows) for rows in by_head.values())]
            self._asked = keys, list(by_head), Gathered(norms)

    def resolve(self) -> None:
        if self._asked is None:
            return
        (keys, layers, gathered), self._asked = self._asked, None
        numbers = gathered.numbers()
        pairs = zip(numbers[: 2 * len(keys) : 2], numbers[1 : 2 * len(keys) : 2], strict=True)
        self.ratios = {
            key: grad / weight if weight else 0.0 for key, ((grad,), (weight,)) in zip(keys, pairs, strict=True)
        }
        self.heads = dict(zip(layers, numbers[2 * len(keys) :], strict=True))


def _projections(part: Attention) -> Iterator[tuple[str, Tensor, Tensor]]:
    """query, key and value with the rows of gradient and weight that belong to each, outputs first."""
    parts: dict[int, tuple[Sequence[Tensor], Sequence[Tensor]]] = {}  # a fused projection is cut once
    for key, (_, parameter, index, of) in part.parameters.items():
        if not parameter.requires_grad or parameter.grad is None:
            continue
        if id(parameter) not in parts:
            parts[id(parameter)] = _cut(parameter.grad, part, of), _cut(parameter, part, of)
        grads, weights = parts[id(parameter)]
        yield key, grads[index], weights[index]


def _cut(tensor: Tensor | nn.Parameter, part: Attention, of: int) -> Sequence[Tensor]:
    turned = tensor.detach().t() if part.is_transposed and tensor.ndim == 2 else tensor.detach()
    return turned.chunk(of)


def _norms(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    # In one call: one by one they would take longer to ask for than to compute.
    if not tensors:
        return ()
    norms: Sequence[Tensor] = torch._foreach_norm(list(tensors), 2, _wide(*tensors))
    return norms


def _norm_of_rows(rows: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=_wide(rows))
    return norms


def _wide(*tensors: Tensor) -> torch.dtype:
    """The dtype to add squares in: a norm refuses a narrower one than its input's."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
