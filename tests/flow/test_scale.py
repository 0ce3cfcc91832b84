"""`gradient_scale`: the identity on the way forward, a factor on the way back, under every transformation of torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap

from sonde.flow import GradientScale, gradient_scale


def test_forward_is_the_same_bits_and_backward_is_scaled() -> None:
    x = torch.randn(5, requires_grad=True)
    y = gradient_scale(x, 0.01)
    assert torch.equal(x, y)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((5,), 0.01))


def test_integers_and_tensors_without_gradient_pass() -> None:
    assert torch.equal(gradient_scale(torch.arange(3), 0.5), torch.arange(3))


def test_double_backward_scales_once_for_each_pass() -> None:
    x = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(gradient_scale(x, 0.5) ** 3, x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    assert first.item() == pytest.approx(0.5 * 3 * 4)  # s * 3 x^2
    assert second.item() == pytest.approx(0.5 * 0.5 * 6 * 2)  # the 3 x^2 depends on x through the scaled x
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: gradient_scale(x, 1.0).sin(), (x,))


@pytest.mark.parametrize("scale", [0.1, 0.0, -2.0])
def test_complex(scale: float) -> None:
    x = torch.randn(4, dtype=torch.complex64, requires_grad=True)
    plain, scaled = (
        torch.autograd.grad(f(x).abs().sum(), x)[0] for f in (lambda x: x, lambda x: gradient_scale(x, scale))
    )
    torch.testing.assert_close(scaled, scale * plain)


def loss(weight: Tensor, x: Tensor) -> Tensor:
    return gradient_scale(weight * x, 0.25).square().sum()


def test_func_grad_and_vmap() -> None:
    weight, x = torch.randn(3), torch.randn(6, 3)
    single = grad(loss)(weight, x[0])
    torch.testing.assert_close(single, 0.25 * 2 * weight * x[0] ** 2)
    per_sample = vmap(grad(loss), in_dims=(None, 0))(weight, x)
    torch.testing.assert_close(per_sample, 0.25 * 2 * weight * x**2)
    torch.testing.assert_close(vmap(lambda v: gradient_scale(v, 3.0))(x), x)


def test_func_jvp_is_the_identity() -> None:
    x, tangent = torch.randn(3), torch.randn(3)
    value, pushed = jvp(lambda x: gradient_scale(x, 0.5), (x,), (tangent,))
    torch.testing.assert_close((value, pushed), (x, tangent))


def test_functional_call() -> None:
    class Scaled(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return gradient_scale(super().forward(x), 0.1)

    model, x = Scaled(3, 2), torch.randn(4, 3)
    parameters = dict(model.named_parameters())
    grads = grad(lambda p: functional_call(model, p, (x,)).sum())(parameters)
    torch.testing.assert_close(grads["bias"], torch.full((2,), 0.4))


@pytest.mark.slow
def test_compiled_as_one_graph() -> None:
    model = torch.nn.Linear(3, 2)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x: Tensor) -> Tensor:
        return gradient_scale(model(x), 0.1).square().sum()

    x = torch.randn(4, 3)
    (compiled,) = torch.autograd.grad(step(x), [model.weight])
    (plain,) = torch.autograd.grad(model(x).square().sum(), [model.weight])
    torch.testing.assert_close(compiled, 0.1 * plain)


def test_the_class_is_there_for_apply() -> None:
    x = torch.ones(2, requires_grad=True)
    GradientScale.apply(x, 2.0).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 2.0))  # type: ignore[arg-type]
