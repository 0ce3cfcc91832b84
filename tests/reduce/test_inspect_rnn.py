"""How far back a recurrent layer can be traced, against autograd on the unchanged layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sonde.reduce.inspect.rnn import MAX_LENGTH, reach

LENGTH = 12


def layer(kind: str, **options) -> nn.RNNBase:
    torch.manual_seed(0)
    return {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}[kind](3, 5, batch_first=True, **options)


def jacobian_ratio(module: nn.RNNBase, x: torch.Tensor, width: int = 5) -> float:
    """Frobenius norms of the whole Jacobian, output by output."""
    x = x.clone().requires_grad_()
    out = module(x)[0][:, -1, :width]
    first = last = 0.0
    for unit in range(out.shape[1]):
        (grad,) = torch.autograd.grad(out[:, unit].sum(), x, retain_graph=True)
        first += float(grad[:, 0].square().sum())
        last += float(grad[:, -1].square().sum())
    return (first / last) ** 0.5


@pytest.mark.parametrize("kind", ["rnn", "gru", "lstm"])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "dropout": 0.5}, {"bidirectional": True}, {"bias": False}])
def test_reach_is_about_the_ratio_of_jacobians(kind, options):
    module = layer(kind, **options)
    x = torch.randn(4, LENGTH, 3)
    traced = reach(module, x)
    assert traced is not None
    ratio, length, _ = traced
    assert length == LENGTH
    module.eval()
    assert 0.2 < float(ratio) / jacobian_ratio(module, x) < 5


def test_small_recurrent_weights_forget_and_large_ones_explode():
    module, x = layer("rnn", nonlinearity="relu"), torch.rand(4, 40, 3)
    with torch.no_grad():
        module.weight_hh_l0.copy_(0.3 * torch.eye(5))
    assert float(reach(module, x)[0]) < 1e-15
    with torch.no_grad():
        module.weight_ih_l0.abs_()
        module.weight_hh_l0.copy_(1.5 * torch.eye(5))
    assert float(reach(module, x)[0]) > 1e5


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_projection_time_first_and_unbatched():
    module = nn.LSTM(3, 5, proj_size=2)
    assert reach(module, torch.randn(LENGTH, 2, 3))[1] == LENGTH
    assert reach(layer("gru"), torch.randn(LENGTH, 3))[1] == LENGTH


def test_what_cannot_be_traced_is_left_out():
    assert reach(layer("gru"), torch.randn(2, 1, 3)) is None
    assert reach(layer("gru"), torch.randn(2, 5 * MAX_LENGTH, 3))[1] == MAX_LENGTH


def test_nothing_is_left_behind():
    module, x = layer("lstm", num_layers=2, dropout=0.5), torch.randn(6, LENGTH, 3)
    before, bits = torch.get_rng_state(), [p.detach().clone() for p in module.parameters()]
    with torch.no_grad():
        ratio, *_ = reach(module, x)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(p, b) and p.grad is None for p, b in zip(module.parameters(), bits, strict=True))
    assert ratio.grad_fn is None
    assert not x.requires_grad


def test_hooks_on_saved_tensors_do_not_see_it():
    seen = []

    def pack(tensor):
        seen.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        reach(layer("lstm"), torch.randn(2, LENGTH, 3))
    assert seen == []


def test_the_profile_is_the_gradient_at_each_time_step():
    module, x = layer("lstm"), torch.randn(2, 40, 3)
    ratio, _, profile = reach(module, x)
    assert len(profile) == 16
    assert (float(profile[0]), float(profile[-1])) == (pytest.approx(float(ratio)), 1.0)
    # Halfway: as if the sequence had begun there, except for the state it begins with.
    assert len(reach(module, x[:, :5])[2]) == 5
    assert float(profile[0]) < float(profile[8]) < float(profile[15])
