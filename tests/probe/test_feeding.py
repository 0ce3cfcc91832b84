"""Two linear layers with nothing that bends between them are seen; whatever bends, in whatever style, is respected."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sonde.probe.loss.feeding import Feeding

F = nn.functional


def fed(between: Callable[[Tensor], Tensor]) -> dict[str, str]:
    """What is said of two layers with `between` between them."""
    first, second = nn.Linear(4, 6), nn.Linear(6, 3)
    feeding = Feeding()
    x = torch.randn(5, 4)
    h = first(x)
    feeding.called("first", x, h)
    h = between(h)
    out = second(h)
    feeding.called("second", h, out)
    feeding.end([out])
    return feeding.fed_by


@pytest.mark.parametrize(
    "between",
    [
        lambda h: h,
        lambda h: h.view(5, 2, 3).flatten(1),
        lambda h: F.dropout(h, 0.5),
        lambda h: h * 0.5,
        nn.Identity(),
    ],
)
def test_what_does_not_bend_is_looked_through(between: Callable[[Tensor], Tensor]) -> None:
    assert fed(between) == {"second": "first"}


@pytest.mark.parametrize(
    "between",
    [
        F.relu,
        F.gelu,
        lambda h: h.relu_(),
        lambda h: h * torch.sigmoid(h),
        lambda h: h / (1 + (-h).exp()),
        lambda h: h * h,
        lambda h: h + torch.tanh(h),
        lambda h: torch.softmax(h, -1),
        nn.LayerNorm(6),
        lambda h: h.detach(),
    ],
)
def test_what_bends_or_cuts_is_respected(between: Callable[[Tensor], Tensor]) -> None:
    assert fed(between) == {}


def test_an_output_that_also_takes_a_skip_connection_is_not_given_away() -> None:
    first, second, x = nn.Linear(4, 6), nn.Linear(6, 6), torch.randn(5, 4)
    feeding = Feeding()
    h = first(x)
    feeding.called("first", x, h)
    branch = second(h)
    feeding.called("second", h, branch)
    feeding.end([h + torch.relu(branch)])
    assert feeding.fed_by == {}


def test_inputs_that_come_from_data_are_fed_by_nothing() -> None:
    feeding = Feeding()
    layer, x = nn.Linear(2, 2), torch.randn(3, 2)
    feeding.called("layer", x, out := layer(x))
    feeding.end([out])
    assert feeding.fed_by == {}
