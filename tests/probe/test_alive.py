"""Tokens tell whether a graph is still there, and keep nothing alive themselves."""

from __future__ import annotations

import weakref

import torch

from sonde.probe.alive import GRAPHS, MIN_AGE, GraphTokens


def forward(weight: torch.Tensor) -> torch.Tensor:
    return (weight * 2).sum()


def test_graphs_that_are_dropped_are_not_alive():
    tokens, weight = GraphTokens(), torch.ones(3, requires_grad=True)
    for step in range(10):
        out = forward(weight)
        tokens.mark(step, out)
        out.backward()
    assert tokens.count(10) == (0, 8)


def test_graphs_kept_by_a_running_total_are_alive():
    tokens, weight, total = GraphTokens(), torch.ones(3, requires_grad=True), torch.zeros(())
    for step in range(20):
        out = forward(weight)
        tokens.mark(step, out)
        out.backward()
        total = total + out
    assert tokens.count(20) == (GRAPHS, GRAPHS)
    del total, out
    assert tokens.count(20) == (0, GRAPHS)


def test_young_graphs_do_not_count():
    tokens, weight = GraphTokens(), torch.ones(3, requires_grad=True)
    kept = []
    for step in range(MIN_AGE):
        kept.append(forward(weight))
        tokens.mark(step, kept[-1])
    assert tokens.count(MIN_AGE - 1) == (0, 0)


def test_marking_keeps_nothing_alive_and_leaves_no_hook_on_a_leaf():
    tokens, weight = GraphTokens(), torch.ones(3, requires_grad=True)
    out = forward(weight)
    node = weakref.ref(out)
    tokens.mark(0, out)
    tokens.mark(0, out)
    del out
    assert node() is None
    tokens.mark(1, weight)
    assert not weight._backward_hooks
    tokens.mark(2, torch.zeros(3))
    assert tokens.count(9) == (0, 1)


def test_gradients_are_the_same():
    weight = torch.ones(3, requires_grad=True)
    out = forward(weight)
    GraphTokens().mark(0, out)
    out.backward()
    assert weight.grad.tolist() == [2, 2, 2]
