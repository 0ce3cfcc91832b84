"""What clipping took away, by whatever name it is called; and that torch is put back as it was."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.nn.utils import clip_grad_norm_ as imported_before  # the names a user has from before
from torch.nn.utils import clip_grad_value_ as value_imported_before
from torch.nn.utils import clip_grads_with_norm_ as with_norm_imported_before

from sonde.probe.optimizer.clip import UNKNOWN, ClipTap


@pytest.fixture(autouse=True)
def originals():
    """The functions of torch, which every test must leave as they were."""
    names = ["_clip_grads_with_norm_", "clip_grad_norm_", "clip_grad_value_"]
    before = [getattr(clip_grad, name) for name in names]
    public = [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_, nn.utils.clip_grads_with_norm_]
    yield
    assert [getattr(clip_grad, name) for name in names] == before
    assert [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_, nn.utils.clip_grads_with_norm_] == public


@pytest.fixture
def tap():
    errors: list[object] = []
    tap = ClipTap(lambda *what: errors.append(what))
    yield tap
    tap.detach()
    assert errors == []


def params(*grads: list[float]) -> list[nn.Parameter]:
    made = []
    for grad in grads:
        p = nn.Parameter(torch.zeros(len(grad)))
        p.grad = torch.tensor(grad)
        made.append(p)
    return made


def factors(tap: ClipTap, ps: list[nn.Parameter]) -> list[float | None]:
    taken = tap.take(ps).factors
    return [float(taken[id(p)]) if id(p) in taken else None for p in ps]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("foreach", [True, False, None])
def test_factor_is_what_the_gradients_were_multiplied_by(tap, norm_type, foreach):
    ps = params([3.0, -4.0], [12.0])
    before = [p.grad.clone() for p in ps]
    imported_before(ps, 2.0, norm_type=norm_type, foreach=foreach)
    found = factors(tap, ps)
    for p, grad, factor in zip(ps, before, found, strict=True):
        assert 0 < factor < 1
        torch.testing.assert_close(p.grad, grad * factor)


@pytest.mark.parametrize(
    "clip",
    [
        imported_before,
        nn.utils.clip_grad_norm_,
        lambda ps, limit: nn.utils.clip_grad.clip_grad_norm_(ps, limit),
        lambda ps, limit: nn.utils.clip_grad_norm_(iter(ps), limit),
        lambda ps, limit: nn.utils.clip_grad_norm_((p for p in ps), max_norm=limit),
        lambda ps, limit: nn.utils.clip_grads_with_norm_(ps, limit, nn.utils.get_total_norm([p.grad for p in ps])),
        lambda ps, limit: with_norm_imported_before(ps, limit, nn.utils.get_total_norm([p.grad for p in ps])),
        lambda ps, limit: nn.utils.clip_grad_norm_(ps, torch.tensor(limit)),
    ],
)
def test_every_way_to_call_it_is_seen(tap, clip):
    ps = params([3.0, 4.0])
    clip(ps, 1.0)
    assert factors(tap, ps) == [pytest.approx(0.2, rel=1e-5)]
    assert ps[0].grad.norm().item() == pytest.approx(1.0, rel=1e-5)


def test_single_tensor_instead_of_a_list(tap):
    (p,) = params([3.0, 4.0])
    nn.utils.clip_grad_norm_(p, 1.0)
    assert factors(tap, [p]) == [pytest.approx(0.2, rel=1e-5)]
    nn.utils.clip_grad_value_(p, 0.1)
    assert factors(tap, [p])[0] < 1


def test_nothing_to_clip_is_a_factor_of_one(tap):
    ps = params([0.3], [0.4])
    total = nn.utils.clip_grad_norm_(ps, 1.0)
    assert total.item() == pytest.approx(0.5)
    taken = tap.take(ps)
    assert list(taken.factors.values()) == [1.0, 1.0]
    ((norm, limit),) = taken.norms
    assert (norm.item(), limit) == (pytest.approx(0.5), 1.0)
    assert tap.take(ps).norms == []


def test_two_clips_in_a_step_multiply(tap):
    ps = params([3.0, 4.0])
    nn.utils.clip_grad_norm_(ps, 2.5)
    nn.utils.clip_grad_norm_(ps, 1.0)
    assert factors(tap, ps) == [pytest.approx(0.2, rel=1e-4)]


def test_of_two_clips_the_first_has_seen_the_norm_before(tap):
    ps = params([3.0, 4.0])
    nn.utils.clip_grad_norm_(ps, 2.5)
    nn.utils.clip_grad_norm_(ps, 1.0)
    ((norm, limit),) = tap.take(ps).norms
    assert (norm.item(), limit) == (5.0, 2.5)


def test_parts_clipped_by_themselves_have_their_own_norms(tap):
    ps = params([3.0, 4.0], [12.0], [0.1])
    nn.utils.clip_grad_norm_(ps[:1], 1.0)
    nn.utils.clip_grad_norm_(ps[1:], 2.0)
    taken = tap.take(ps)
    assert [(norm.item(), limit) for norm, limit in taken.norms] == [(5.0, 1.0), (pytest.approx(12.0, rel=1e-4), 2.0)]
    found = [float(taken.factors[id(p)]) for p in ps]
    assert found == pytest.approx([1 / 5, 1 / 6, 1 / 6], rel=1e-4)


@pytest.mark.parametrize("change", [lambda g: g.mul_(0.5), lambda g: g.zero_(), lambda g: g.add_(1.0)])
def test_what_a_gradient_was_before_is_unknown_when_it_was_changed_after_the_clip(tap, change):
    (p,) = params([3.0, 4.0])
    nn.utils.clip_grad_norm_([p], 1.0)
    change(p.grad)
    assert factors(tap, [p]) == [UNKNOWN]


def test_a_clip_counts_alone_when_the_gradient_was_changed_since_the_one_before(tap):
    """As with `zero_grad(set_to_none=False)`, or with a clip of every micro-batch."""
    (p,) = params([3.0, 4.0])
    nn.utils.clip_grad_norm_([p], 1.0)
    p.grad.copy_(torch.tensor([6.0, 8.0]))
    nn.utils.clip_grad_norm_([p], 1.0)
    taken = tap.take([p])
    assert float(taken.factors[id(p)]) == pytest.approx(0.1, rel=1e-5)
    assert [norm.item() for norm, _ in taken.norms] == [10.0]


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_value_, clip_grad.clip_grad_value_, value_imported_before])
def test_clip_by_value_is_a_factor_of_the_norm(tap, clip):
    ps = params([3.0, 4.0], [0.5])
    clip(ps, 3.0)
    assert factors(tap, ps) == [pytest.approx(math.sqrt(18) / 5), 1.0]


def test_clip_by_value_then_by_norm(tap):
    ps = params([3.0, 4.0])
    nn.utils.clip_grad_value_(ps, 3.0)
    nn.utils.clip_grad_norm_(ps, 1.0)
    (factor,) = factors(tap, ps)
    assert ps[0].grad.norm().item() / factor == pytest.approx(5.0, rel=1e-4)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_clip_by_value_of_nonfinite_gradients_is_unknown(tap, bad):
    ps = params([3.0, bad], [3.0, 4.0])
    nn.utils.clip_grad_value_(ps, 3.0)
    assert factors(tap, ps) == [UNKNOWN, pytest.approx(math.sqrt(18) / 5)]


def test_clip_by_value_of_float16_whose_norm_float16_cannot_hold(tap):
    p = nn.Parameter(torch.zeros(10_000, dtype=torch.float16))
    p.grad = torch.full((10_000,), 2000.0, dtype=torch.float16)
    nn.utils.clip_grad_value_([p], 1000.0)
    assert factors(tap, [p]) == [pytest.approx(0.5)]


def test_gradient_of_zeros_and_parameters_without_gradient(tap):
    ps = [*params([0.0, 0.0]), nn.Parameter(torch.ones(2))]
    nn.utils.clip_grad_value_(ps, 1.0)
    nn.utils.clip_grad_norm_(ps, 1.0)
    assert factors(tap, ps) == [1.0, None]


def test_taking_leaves_what_belongs_to_another_optimizer(tap):
    a, b = params([3.0, 4.0], [12.0])
    nn.utils.clip_grad_norm_([a, b], 1.0)
    (of_a,) = factors(tap, [a])
    (of_b,) = factors(tap, [b])
    assert of_a == of_b == pytest.approx(1 / 13, rel=1e-4)
    assert factors(tap, [a, b]) == [None, None]


def test_gradient_made_since_then_was_not_clipped(tap):
    (p,) = params([3.0, 4.0])
    nn.utils.clip_grad_norm_([p], 1.0)
    p.grad = torch.tensor([3.0, 4.0])  # zero_grad and backward, with no step in between
    assert factors(tap, [p]) == [None]
    nn.utils.clip_grad_norm_([p], 1.0)
    p.grad = torch.tensor([3.0, 4.0])
    nn.utils.clip_grad_norm_([p], 1.0)
    assert factors(tap, [p]) == [pytest.approx(0.2, rel=1e-4)]


def test_gradients_end_up_with_the_same_bits(tap):
    watched, bare = params([3.0, 4.0], [0.1]), params([3.0, 4.0], [0.1])
    nn.utils.clip_grad_norm_(watched, 1.0)
    nn.utils.clip_grad_value_(watched, 0.3)
    tap.detach()
    nn.utils.clip_grad_norm_(bare, 1.0)
    nn.utils.clip_grad_value_(bare, 0.3)
    for a, b in zip(watched, bare, strict=True):
        assert torch.equal(a.grad, b.grad)


def test_errors_of_torch_are_still_raised(tap):
    ps = params([math.nan])
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(ps, 1.0, error_if_nonfinite=True)
    with pytest.raises(TypeError):
        nn.utils.clip_grad_norm_(ps)
    assert factors(tap, ps) == [None]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_several_taps_leave_torch_as_it_was_in_any_order(order):
    errors: list[object] = []
    taps = [ClipTap(lambda *what: errors.append(what)) for _ in range(3)]
    (p,) = params([3.0, 4.0])
    nn.utils.clip_grad_norm_([p], 1.0)
    assert [factors(tap, [p])[0] for tap in taps] == [pytest.approx(0.2, rel=1e-4)] * 3
    for number, index in enumerate(order):
        taps[index].detach()
        taps[index].detach()
        (q,) = params([3.0, 4.0])
        nn.utils.clip_grad_norm_([q], 1.0)
        left = [factors(taps[i], [q])[0] for i in order[number + 1 :]]
        assert left == [pytest.approx(0.2, rel=1e-4)] * (2 - number)
        assert factors(taps[index], [q]) == [None]
    assert errors == []


def test_replacement_by_somebody_else_in_between_is_respected(monkeypatch):
    tap = ClipTap(lambda *_: None)
    ours = nn.utils.clip_grad_value_
    theirs = lambda *args, **kwargs: ours(*args, **kwargs)
    nn.utils.clip_grad_value_ = theirs
    tap.detach()
    assert nn.utils.clip_grad_value_ is theirs
    (p,) = params([3.0, 4.0])
    nn.utils.clip_grad_value_([p], 1.0)  # still clips, and reports nothing
    assert p.grad.tolist() == [1.0, 1.0]
    assert factors(tap, [p]) == [None]
    nn.utils.clip_grad_value_ = clip_grad.clip_grad_value_


@pytest.mark.parametrize("has_closure", [False, True])
def test_a_function_that_somebody_has_wrapped_before_is_seen(has_closure, monkeypatch):
    original = clip_grad.clip_grad_value_
    call = (lambda *args: original(*args)) if has_closure else functools.partial(original, foreach=False)
    theirs = functools.wraps(original)(call)
    monkeypatch.setattr(clip_grad, "clip_grad_value_", theirs)
    tap = ClipTap(lambda *_: None)
    (p,) = params([3.0, 4.0])
    clip_grad.clip_grad_value_([p], 3.0)
    assert factors(tap, [p]) == [pytest.approx(math.sqrt(18) / 5)]
    (p,) = params([3.0, 4.0])
    value_imported_before([p], 3.0)
    assert factors(tap, [p]) == [pytest.approx(math.sqrt(18) / 5)]
    tap.detach()
    monkeypatch.undo()


def test_names_and_documentation_of_torch_are_kept(tap):
    assert nn.utils.clip_grad_value_.__name__ == "clip_grad_value_"
    assert "clip" in nn.utils.clip_grad_value_.__doc__.lower()
