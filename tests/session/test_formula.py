"""The formula that says what an optimizer is about to do, against what it does, for every variant that is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sonde.reduce.gpu.update_formula import (
    ADD1,
    ADD2,
    DECAY,
    EPS,
    KEEP1,
    KEEP2,
    L2,
    LR,
    SIGN,
    TAKEN,
    WITH_BUFFER,
    WITH_GRAD,
    UpdateFormula,
)
from sonde.session.model.predicted_update import rule_of

VARIANTS = {
    f"{kind.__name__} {way} {options}": (kind, {**way_options, **options})
    for way, way_options in {
        "loop": {"foreach": False},
        "foreach": {"foreach": True},
        "fused": {"fused": True},
    }.items()
    for kind, options in [
        (torch.optim.Adam, {"lr": 1e-2}),
        (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-5}),
        (torch.optim.AdamW, {"lr": 1e-3}),
        (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.3, "maximize": True}),
        (torch.optim.AdamW, {"lr": torch.tensor(1e-2), "weight_decay": 0.3}),
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.2, "maximize": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.4, "weight_decay": 0.2}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ]
    if not (way == "foreach" and isinstance(options["lr"], torch.Tensor))  # which torch refuses
}


def predicted(rule: UpdateFormula, place: int, param: torch.Tensor, grad: torch.Tensor) -> list[np.ndarray]:
    """The formula of `reduce/gpu/update_formula.py` in plain float64: first moment, second moment, update."""
    row = rule.numbers[place]
    p, g = param.detach().double().numpy(), grad.double().numpy()
    m, v = (
        np.zeros_like(p) if states[place] is None else states[place].double().numpy()
        for states in (rule.first, rule.second)
    )
    d = row[SIGN] * g + row[L2] * p
    m = row[KEEP1] * m + row[ADD1] * d
    v = row[KEEP2] * v + row[ADD2] * d * d
    if rule.family == "sgd":
        return [m, v, -row[LR] * (row[WITH_GRAD] * d + row[WITH_BUFFER] * m)]
    t = row[TAKEN] + 1
    root = np.sqrt(v / (1 - row[KEEP2] ** t))
    return [m, v, -row[DECAY] * p - row[LR] / (1 - row[KEEP1] ** t) * m / (root + row[EPS])]


def make(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(40, 30), (7,), (3, 5, 2)]
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def give_grads(params: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step + 1)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * 10.0**-step).to(p.dtype)


@pytest.mark.parametrize("variant", VARIANTS)
def test_update_is_what_the_formula_says(variant):
    kind, options = VARIANTS[variant]
    params = make()
    optimizer = kind([{"params": params[:2]}, {"params": params[2:], "lr": 0.03}], **options)
    for step in range(4):
        give_grads(params, step)
        rule = rule_of(optimizer, params)
        before = [p.detach().clone() for p in params]
        wanted = [predicted(rule, place, p, p.grad) for place, p in enumerate(params)]
        optimizer.step()
        for (m, v, update), p, old in zip(wanted, params, before, strict=True):
            true = (p.detach().double() - old.double()).numpy()
            # What float32 rounds away of a parameter is not in the formula.
            rounding = np.finfo(np.float32).eps * np.abs(old.numpy()).max()
            np.testing.assert_allclose(update, true, rtol=1e-4, atol=rounding)
            norms = np.linalg.norm(update), np.linalg.norm(true)
            assert norms[0] == pytest.approx(norms[1], rel=1e-3)
            for state, value in zip(rule.states, (m, v), strict=False):
                np.testing.assert_allclose(value, optimizer.state[p][state].numpy(), rtol=1e-4, atol=1e-9)


class Halved(torch.optim.AdamW):
    """Somebody's own, which does something else."""


@pytest.mark.parametrize(
    ("kind", "options", "dtype"),
    [
        (torch.optim.Adam, {"amsgrad": True}, torch.float32),
        (torch.optim.Adam, {"differentiable": True}, torch.float32),
        (Halved, {}, torch.float32),
        (torch.optim.RMSprop, {}, torch.float32),
        (torch.optim.AdamW, {}, torch.bfloat16),
        (torch.optim.AdamW, {}, torch.float64),
    ],
)
def test_what_is_not_known_is_not_guessed(kind, options, dtype):
    params = make(dtype)
    give_grads(params, 0)
    assert rule_of(kind(params, lr=0.1, **options), params) is None


def test_parameters_of_another_optimizer_are_not_guessed():
    params = make()
    assert rule_of(torch.optim.AdamW(params[:1]), params) is None


def test_a_parameter_that_starts_later_is_known_too():
    params = make()
    optimizer = torch.optim.AdamW(params, lr=0.1)
    give_grads(params, 0)
    params[1].grad = None
    optimizer.step()
    give_grads(params, 1)
    rule = rule_of(optimizer, params)
    assert [row[TAKEN] for row in rule.numbers] == [1.0, 0.0, 1.0]
    assert rule.first[1] is None
