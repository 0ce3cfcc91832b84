"""Scales a gradient in the backward pass, and nothing in the forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


class GradientScale(torch.autograd.Function):
    """Forward: the identity. Backward: the gradient times `scale`. Differentiable again; complex and compile safe."""

    @staticmethod
    def forward(x: Tensor, scale: float) -> Tensor:  # noqa: ARG004 - torch decides the signatures
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:  # noqa: ARG004
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, scale: float) -> tuple[Tensor, Any]:  # noqa: ARG004
        return GradientScale.apply(x, scale), in_dims[0]  # type: ignore[no-untyped-call]


class _WithTangent(GradientScale):
    """The same in forward mode, which has no backward pass to scale. torch.compile rejects a class that has this."""

    @staticmethod
    def jvp(ctx: Any, x: Tensor, _: Any) -> Tensor:  # noqa: ARG004
        return x.view_as(x)


def gradient_scale(x: Tensor, scale: float) -> Tensor:
    """`x` unchanged, with its gradient multiplied by `scale`.

    >>> x = torch.ones(2, requires_grad=True)
    >>> gradient_scale(x, 0.01).sum().backward()
    >>> x.grad
    tensor([0.0100, 0.0100])
    """
    is_forward_mode = not torch.compiler.is_compiling() and forward_ad._current_level >= 0
    function = _WithTangent if is_forward_mode else GradientScale
    scaled: Tensor = function.apply(x, scale)  # type: ignore[no-untyped-call]
    return scaled
