"""Optimizer steps: whose they are, which parameters they name, and that nothing clings to the optimizer."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

from sonde.probe.model import ModelNames


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


def backward(model: nn.Module) -> None:
    model(torch.randn(5, 3)).square().mean().backward()


NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_unnamed_optimizer_is_adopted_at_its_first_step(follow):
    model = net()
    steps = follow(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        backward(model)
        optimizer.step()
    assert steps.before == steps.after == [(0, NAMES)] * 3
    assert steps.tap.num_watched == 1


def test_optimizer_of_another_model_is_ignored(follow):
    model, other = net(), net()
    steps = follow(model)
    backward(other)
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert steps.before == []
    assert steps.tap.num_watched == 0


def test_named_optimizer_is_the_only_one(follow):
    model = net()
    named, unnamed = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
    steps = follow(model, [named])
    backward(model)
    unnamed.step()
    assert steps.before == []
    named.step()
    assert len(steps.before) == 1


def test_several_optimizers_have_their_own_numbers_and_parameters(follow):
    model = net()
    steps = follow(model)
    first, second = (torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 1))
    for _ in range(2):
        backward(model)
        first.step()
        second.step()
    assert steps.before == [(0, NAMES[:2]), (1, NAMES[2:])] * 2
    assert steps.tap.num_watched == 2


def test_each_optimizer_has_the_clipping_of_its_gradients(follow):
    model = net()
    steps = follow(model)
    first, second = (torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 1))
    backward(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    first.step()
    second.step()
    assert [sorted(clips) for clips in steps.clips] == [sorted(NAMES[:2]), sorted(NAMES[2:])]
    assert len({round(f, 9) for clips in steps.clips for f in clips.values()}) == 1


def test_optimizer_that_is_gone_is_waited_for_no_longer(follow):
    model = net()
    steps = follow(model)
    for _ in range(5):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        backward(model)
        optimizer.step()
        del optimizer
        gc.collect()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model)
    optimizer.step()
    assert steps.tap.num_watched == 1
    assert [number for number, _ in steps.before] == [0] * 6


def count_refreshes(monkeypatch) -> list[int]:
    calls: list[int] = []
    original = ModelNames.refresh
    monkeypatch.setattr(ModelNames, "refresh", lambda self: (calls.append(1), original(self))[1])
    return calls


def test_strangers_in_an_optimizer_are_looked_for_once(follow, monkeypatch):
    model, other = net(), nn.Sequential(*[nn.Linear(2, 2) for _ in range(50)])
    steps = follow(model)
    optimizer = torch.optim.SGD([*other.parameters(), *model.parameters()], lr=0.1)
    calls = count_refreshes(monkeypatch)
    for _ in range(10):
        backward(model)
        optimizer.step()
    assert steps.before == [(0, NAMES)] * 10
    assert len(calls) <= 1


def test_foreign_optimizer_costs_one_search(follow, monkeypatch):
    model, other = net(), net()
    follow(model)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    calls = count_refreshes(monkeypatch)
    for _ in range(10):
        backward(other)
        optimizer.step()
    assert len(calls) <= 1


def test_parameter_groups_added_later(follow):
    model = net()
    steps = follow(model)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    backward(model)
    optimizer.step()
    model.append(nn.Linear(1, 1))
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.5})
    backward(model)
    optimizer.step()
    assert steps.before == [(0, NAMES[:2]), (0, [*NAMES[:2], "2.weight", "2.bias"])]


def test_a_parameter_that_is_replaced_takes_the_place_of_the_old_one(follow):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = follow(model, [optimizer])
    backward(model)
    optimizer.step()
    model[0].weight = nn.Parameter(torch.zeros(4, 3))
    optimizer.param_groups[0]["params"][0] = model[0].weight
    told = []
    steps.tap.on_before = lambda step: told.append((step.names, step.params))
    optimizer.step()
    [(names, params)] = told
    assert [named.name for named in names] == NAMES
    assert all(a is b is named.ref() for a, b, named in zip(params, model.parameters(), names, strict=True))


def test_parameters_in_another_order_keep_their_names(follow):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = follow(model, [optimizer])
    backward(model)
    optimizer.step()
    optimizer.param_groups[0]["params"].reverse()
    optimizer.step()
    assert steps.before == [(0, NAMES), (0, NAMES[::-1])]


def test_names_are_looked_up_once_as_long_as_the_parameters_are_the_same(follow, monkeypatch):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = follow(model, [optimizer])
    looked_up = []
    names = steps.tap.names
    real = names.parameter
    monkeypatch.setattr(names, "parameter", lambda p: looked_up.append(p) or real(p))
    backward(model)
    for _ in range(3):
        optimizer.step()
    first = len(looked_up)
    names.refresh()
    optimizer.step()
    assert first == len(looked_up) - first == 2 * len(NAMES)
    assert steps.before == [(0, NAMES)] * 4


def test_parameters_without_gradient_are_named_too(follow):
    model = net()
    steps = follow(model)
    model[0](torch.randn(2, 3)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert steps.before == [(0, NAMES)]


def test_lbfgs_is_one_step_with_its_closure(follow):
    model = net()
    steps = follow(model)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
    closures = []
    described = []
    steps.tap.on_after = lambda step: described.append(step.has_closure)

    def closure() -> torch.Tensor:
        closures.append(1)
        optimizer.zero_grad()
        loss = model(torch.ones(5, 3)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert len(closures) > 1
    assert len(steps.before) == 1
    assert described == [True]


def test_failing_step_is_the_users_and_the_next_one_is_seen(follow):
    model = net()
    steps = follow(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail() -> float:
        raise ValueError("theirs")

    with pytest.raises(ValueError, match="theirs"):
        optimizer.step(fail)
    backward(model)
    optimizer.step()
    assert len(steps.after) == 1


def test_unwanted_steps_are_counted_but_not_described(follow):
    model = net()
    steps = follow(model)
    steps.is_wanted = False
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model)
    optimizer.step()
    assert steps.before == steps.after == [(0, [])]


def test_copies_and_pickles_of_a_watched_optimizer_are_its_own(follow):
    model = net()
    steps = follow(model)
    optimizer = torch.optim.Adam(model.parameters())
    backward(model)
    optimizer.step()
    model_copy, copied = copy.deepcopy((model, optimizer))
    pickled_model, unpickled = pickle.loads(pickle.dumps((model, optimizer)))
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    for other_model, other in ((model_copy, copied), (pickled_model, unpickled)):
        backward(other_model)
        other.step()
    assert len(steps.before) == 1
    assert b"sonde" not in saved.getvalue()
    assert b"sonde" not in pickle.dumps(optimizer)


def test_learning_rate_of_the_step(follow):
    model = net()
    steps = follow(model)
    rates = []
    steps.tap.on_before = lambda step: rates.append(step.lr)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(3):
        backward(model)
        optimizer.step()
        scheduler.step()
    assert rates == [0.1, 0.05, 0.025]


def test_tap_keeps_neither_model_nor_optimizer(follow):
    model = net()
    steps = follow(model)
    optimizer = torch.optim.Adam(model.parameters())
    backward(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    refs = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model[0].weight.grad)]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in refs] == [None, None, None]
    assert steps.tap.num_watched == 0


def test_detached_tap_sees_nothing_and_torch_has_no_hooks_left(follow):
    from torch.optim import optimizer as module

    model = net()
    steps = follow(model)
    steps.tap.detach()
    backward(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert steps.before == []
    assert not module._global_optimizer_pre_hooks
    assert not module._global_optimizer_post_hooks


def test_parameters_of_a_kind_that_cannot_be_read_are_named(follow):
    class Odd(nn.Parameter):
        pass

    model = net()
    model[0].weight = Odd(torch.ones(4, 3))
    steps = follow(model)
    unreadable = []
    steps.tap.on_before = lambda step: unreadable.extend((named.name, what) for named, what in step.unreadable)
    backward(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert unreadable == [("0.weight", "Odd")]


def test_one_that_takes_the_place_of_the_named_one_is_followed(follow):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = follow(model, [optimizer])
    for make in (None, torch.optim.AdamW, torch.optim.RMSprop):
        if make is not None:
            del optimizer
            gc.collect()
            optimizer = make(model.parameters())
        backward(model)
        optimizer.step()
    assert [number for number, _ in steps.before] == [0, 0, 0]


def test_an_optimizer_other_than_the_named_one_warns_once(follow):
    model, other = net(), net()
    named, unnamed = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.AdamW(model.parameters())
    foreign = torch.optim.SGD(other.parameters(), lr=0.1)
    steps = follow(model, [named])
    for optimizer in (named, unnamed, foreign, unnamed, named):
        backward(model)
        backward(other)
        optimizer.step()
    assert len(steps.before) == 2
    assert steps.unnamed == ["AdamW"]
