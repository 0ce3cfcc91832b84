"""The tensors inside whatever a module returns."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sonde.probe.outputs import floating_tensors, is_plain_tensor


@dataclass
class Output:
    logits: Any
    loss: Any = None
    hidden: Any = field(default=None)


class ModelOutput(OrderedDict):
    """As in transformers: an ordered dict that is a dataclass as well, and also gives its values as attributes."""


@dataclass
class CausalOutput(ModelOutput):
    loss: Any = None
    logits: Any = None

    def __post_init__(self) -> None:
        for name in ("loss", "logits"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)


class Pair(NamedTuple):
    first: Any
    second: Any


def t(value: float = 1.0) -> torch.Tensor:
    return torch.tensor([float(value)])


def seen(output: object) -> dict[str, float]:
    return {suffix: tensor.real.item() for suffix, tensor in floating_tensors(output)}


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (t(1), {"": 1}),
        (torch.nn.Parameter(t(1)), {"": 1}),
        ((t(1), t(2)), {"": 1, ":1": 2}),
        ([t(1), [t(2), t(3)]], {"": 1, ":1.0": 2, ":1.1": 3}),
        ({"a": t(1), "b": {"c": t(2)}}, {"": 1, ":b.c": 2}),
        ({0: t(1), 1: t(2)}, {"": 1, ":1": 2}),
        (UserDict(a=t(1), b=t(2)), {"": 1, ":b": 2}),
        (Output(t(1), loss=t(2), hidden=(t(3), t(4))), {"": 1, ":loss": 2, ":hidden.0": 3, ":hidden.1": 4}),
        (Pair(t(1), t(2)), {"": 1, ":second": 2}),
        (CausalOutput(loss=t(1), logits=t(2)), {"": 1, ":logits": 2}),
        (CausalOutput(logits=t(2)), {"": 2}),
        (torch.max(torch.eye(1), 0), {"": 1}),  # values and indices: only the floating ones
        ((None, t(2)), {"": 2}),
        (("text", 3, 2.5, t(1), {1, 2}), {"": 1}),
        ((torch.tensor([1]), torch.tensor([True]), t(3)), {"": 3}),
        (torch.tensor([1 + 2j]), {"": 1}),
        (None, {}),
        ("text", {}),
        (7, {}),
        (Output, {}),  # the class itself, not an instance
        (object(), {}),
        ((), {}),
        ({}, {}),
    ],
)
def test_tensors_of(output, expected):
    assert seen(output) == expected


def test_depth_and_number_are_limited():
    deep: Any = t(1)
    for _ in range(10):
        deep = [deep]
    assert seen(deep) == {}
    assert seen([[[[t(1)]]]]) == {"": 1}
    assert len(floating_tensors([t(i) for i in range(1000)])) == 32


def test_output_that_contains_itself_ends():
    loop: list[Any] = [t(1)]
    loop.append(loop)
    assert "" in seen(loop)
    assert len(floating_tensors(loop)) <= 32


def test_keys_cannot_break_a_series_name():
    suffixes = [s for s, _ in floating_tensors({"first": t(), "a/b": t(), "x\ny": t(), "<script>": t(), ("k", 1): t()})]
    assert suffixes[1:] == [":a%2Fb", ":x%0Ay", ":<script>", ":('k', 1)"]


def test_tensors_without_values_are_left_alone():
    with FakeTensorMode():
        fake = torch.ones(3)
    meta = torch.ones(3, device="meta")
    assert floating_tensors(fake) == []
    assert floating_tensors(meta) == []
    assert floating_tensors([fake, {"a": meta}]) == []
    assert not is_plain_tensor(meta)
    assert not is_plain_tensor(fake)


def test_subclasses_with_plain_data_are_read_without_calling_their_functions():
    class Mine(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args, **kwargs):
            raise AssertionError

    mine = torch.Tensor._make_subclass(Mine, torch.full((1,), 3.0))
    ((_, first), (_, second)) = floating_tensors((mine, t(2)))
    assert (type(first), first.item(), second.item()) == (torch.Tensor, 3, 2)
    assert [found.item() for _, found in floating_tensors(mine)] == [3]


def test_other_subclasses_are_left_alone():
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, *args, **kwargs):
            raise AssertionError

    assert floating_tensors(torch.Tensor._make_subclass(Wrapper, torch.ones(3))) == []
    assert is_plain_tensor(torch.nn.Parameter(torch.ones(1)))
    assert not is_plain_tensor([1.0])
