"""Direction and identity of successive gradients."""

from __future__ import annotations

import pytest
import torch

from sonde.reduce.inspect.grads import MAX_ELEMENTS, GradientDirection


def parameters(*grads: torch.Tensor) -> list[torch.nn.Parameter]:
    made = []
    for grad in grads:
        made.append(torch.nn.Parameter(torch.zeros_like(grad)))
        made[-1].grad = grad
    return made


def following(params) -> GradientDirection:
    direction = GradientDirection()
    direction.choose(params)
    return direction


def test_cosine_of_successive_gradients():
    generator = torch.Generator().manual_seed(0)
    params = parameters(torch.randn(5, 3, generator=generator), torch.randn(4, generator=generator))
    direction = following(params)
    assert direction.compare() == (None, None)
    before = torch.cat([p.grad.flatten() for p in params])
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)
    now = torch.cat([p.grad.flatten() for p in params])
    cosine, is_kept = direction.compare()
    assert float(cosine) == pytest.approx(float(torch.nn.functional.cosine_similarity(before, now, dim=0)), abs=1e-6)
    assert is_kept is False


def test_gradients_that_were_never_cleared_are_the_same_objects():
    params = parameters(torch.ones(3))
    direction = following(params)
    direction.compare()
    params[0].grad += 1
    cosine, is_kept = direction.compare()
    assert float(cosine) == pytest.approx(1)
    assert is_kept is True


def test_large_transposed_sparse_and_absent_gradients():
    params = parameters(torch.randn(400, 300).T, torch.randn(2).to_sparse(), torch.randn(3))
    params[2].grad = None
    direction = following(params)
    direction.compare()
    cosine, _ = direction.compare()
    assert float(cosine) == pytest.approx(1, abs=1e-5)
    assert direction._before.numel() <= MAX_ELEMENTS


def test_complex_gradients_are_compared_with_both_their_parts():
    params = parameters(torch.tensor([1 + 0j, 1 + 0j]))
    direction = following(params)
    direction.compare()
    params[0].grad = torch.tensor([0 + 1j, 1 + 1j])
    cosine, _ = direction.compare()
    assert float(cosine) == pytest.approx(1 / (2 * 3) ** 0.5, abs=1e-6)


def test_a_changed_set_of_gradients_is_not_compared():
    params = parameters(torch.ones(3), torch.ones(5))
    direction = following(params)
    direction.compare()
    params[0].grad = None
    assert direction.compare()[0] is None


def test_half_precision_does_not_overflow():
    params = parameters(torch.full((4000,), 300.0, dtype=torch.float16))
    direction = following(params)
    direction.compare()
    assert float(direction.compare()[0]) == pytest.approx(1, abs=1e-3)


def test_no_parameter_and_no_gradient_is_kept_alive():
    params = parameters(torch.ones(3))
    direction = following(params)
    direction.compare()
    import weakref

    refs = [weakref.ref(params[0]), weakref.ref(params[0].grad)]
    params.clear()
    assert [ref() for ref in refs] == [None, None]
    assert direction.compare() == (None, None)
