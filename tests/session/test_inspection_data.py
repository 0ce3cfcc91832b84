"""What a session logs of the data, from real training loops of all shapes."""

from __future__ import annotations

import gc
import re
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sonde
from sonde.schema.names import is_inspection

DOCS = Path(__file__).parents[2] / "docs"


def values(run: Any, name: str) -> dict[int, float]:
    table = run.scalars(name)
    return dict(zip(table["step"].to_pylist(), table["value"].to_pylist(), strict=True))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def batches(num: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator)) for _ in range(num)
    ]


def train(model: nn.Module, data: list[Any], loss_fn: Any = F.cross_entropy, tell: Any = None) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, y in data:
        if tell is not None:
            tell(x, y)
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_inputs_targets_outputs_and_loss_are_seen_at_inspected_steps(begin, reopen):
    model = net()
    session = begin().watch(model, inspect=sonde.first(2) | sonde.every(4))
    losses = train(model, batches(6))
    assert session.recording.breaker.num_errors == 0
    assert session.steps.data.loss_name == "cross_entropy"
    run = reopen()
    assert list(values(run, "data/input/std")) == [0, 1, 4]
    assert values(run, "data/loss/value") == {step: pytest.approx(losses[step], rel=1e-6) for step in (0, 1, 4)}
    x, y = batches(6)[4]
    assert values(run, "data/input/std")[4] == pytest.approx(float(x.std(correction=0)), rel=1e-5)
    share = float(torch.bincount(y).max() / 6)
    assert values(run, "data/target/top_share")[4] == pytest.approx(share)
    assert values(run, "data/batch/label_purity")[4] == pytest.approx(share)
    assert values(run, "data/output/width")[0] == 3
    assert run.window(["data/*/*"]).facts["loss"] == "cross_entropy"


def test_every_batch_has_an_identity_and_one_that_comes_back_has_the_same(begin, reopen):
    model = net()
    begin().watch(model)
    data = batches(30)
    train(model, data + data[:5])
    found = values(reopen(), "data/batch/hash")
    assert list(found) == list(range(35))
    assert len({found[step] for step in range(30)}) == 30
    assert [found[30 + step] for step in range(5)] == [found[step] for step in range(5)]


def test_batch_tells_identity_ids_and_purity_at_every_step(begin, reopen):
    model = net()
    session = begin(hist_every=1000).watch(model, inspect=False)
    train(model, batches(25), tell=lambda x, y: sonde.batch(x, y, ids=["a", "b"]))
    run = reopen()
    assert session.recording.breaker.num_errors == 0
    for name in ("hash", "ids_hash", "label_purity"):
        assert list(values(run, f"data/batch/{name}")) == list(range(25))
    assert len(set(values(run, "data/batch/ids_hash").values())) == 1
    assert "data/input/std" not in set(run.scalars("data/*")["name"].to_pylist())


def test_what_batch_was_given_stands_in_for_what_is_not_seen(begin, reopen):
    model = net()
    begin().watch(model)

    def own_loss(out: Tensor, y: Tensor) -> Tensor:
        return -out.log_softmax(1)[torch.arange(len(y)), y].mean()

    train(model[0:], batches(3), own_loss, tell=lambda x, y: sonde.batch({"x": x}, y))
    run = reopen()
    assert len(values(run, "data/input/std")) == 3
    assert values(run, "data/target/num_classes")[0] == len(set(batches(1)[0][1].tolist()))
    assert "data/loss/value" not in set(run.scalars("data/*")["name"].to_pylist())


def test_the_model_is_believed_more_than_what_was_given(begin, reopen):
    model = net()
    begin().watch(model)
    train(model, batches(3), tell=lambda x, y: sonde.batch(x * 1000, y))
    assert max(values(reopen(), "data/input/std").values()) < 2


def test_outputs_are_judged_with_given_targets_where_the_loss_is_the_users_own(begin, reopen):
    model = net()
    begin().watch(model)

    def own_loss(out: Tensor, y: Tensor) -> Tensor:
        return -out.log_softmax(1)[torch.arange(len(y)), y].mean()

    train(model, batches(3), own_loss, tell=sonde.batch)
    assert list(values(reopen(), "data/output/accuracy")) == [0, 1, 2]


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


class Language(nn.Module):
    """Called with keywords, computes its loss inside, gives back a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, *, input_ids: Tensor, labels: Tensor) -> Output:
        logits = self.head(self.embed(input_ids))
        shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
        return Output(nn.functional.cross_entropy(logits.view(-1, 20), shifted.reshape(-1)), logits)


def test_a_model_that_computes_its_loss_inside(begin, reopen):
    model = Language()
    session = begin().watch(model)
    ids = torch.randint(0, 20, (4, 9), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    assert session.recording.breaker.num_errors == 0
    run = reopen()
    assert list(values(run, "data/target/shift").values()) == [1, 1]
    assert values(run, "data/input/is_token")[0] == 1
    assert values(run, "data/output/width")[0] == 20


def test_of_several_losses_the_one_of_the_models_output_speaks(begin, reopen):
    model = net()
    session = begin().watch(model)

    def two(out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model[0].weight, torch.zeros(8, 4)) + F.cross_entropy(out, y) + F.l1_loss(out, out * 0)

    train(model, batches(2), two)
    assert session.steps.data.loss_name == "cross_entropy"
    assert values(reopen(), "data/output/width") == {0: 3, 1: 3}


def test_micro_batches_are_one_step_and_validation_does_not_count(begin, reopen):
    model = net()
    begin().watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for x, y in batches(3):
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        F.cross_entropy(torch.ones(2, 3, requires_grad=True), torch.tensor([0, 1]))
        with torch.no_grad():
            F.cross_entropy(model(x), y)
    run = reopen()
    for name in ("data/input/std", "data/loss/value", "data/batch/hash"):
        assert run.scalars(name)["step"].to_pylist() == [0, 1]


def test_training_is_the_same_to_the_bit_and_nothing_is_left(begin):
    code = F.cross_entropy.__code__
    bare = net()
    expected = train(bare, batches(12))
    rng = torch.get_rng_state()
    model = net()
    session = begin().watch(model, inspect=sonde.every(1))
    assert train(model, batches(12), tell=lambda x, y: sonde.batch(x, y, ids=[1])) == expected
    assert torch.equal(torch.get_rng_state(), rng)
    for a, b in zip(bare.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert session.recording.breaker.num_errors == 0
    sonde.finish()
    assert F.cross_entropy.__code__ is code
    assert not hasattr(F.cross_entropy, "__wrapped__")


def test_no_batch_is_kept_beyond_its_step(begin):
    model = Language()
    begin().watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(0, 20, (4, 9))
    seen = weakref.ref(ids)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    del ids
    gc.collect()
    assert seen() is None


AWKWARD = {
    "numpy": (np.ones((3, 2)), np.array([0, 1, 1])),
    "a number": (1, None),
    "numbers": ([1, 2, 3], [0, 0, 1]),
    "texts": (["a", "b"], None),
    "dict": ({"a": torch.ones(2), "n": None, "t": "text"}, {"y": torch.zeros(2)}),
    "nested": ([torch.ones(2), (torch.ones(3), torch.ones(1))], None),
    "nothing": (None, None),
    "empty": (torch.empty(0, 3), torch.empty(0).long()),
    "complex": (torch.ones(2, dtype=torch.complex64), None),
    "half": (torch.ones(2, 2, dtype=torch.float16), torch.tensor([True, False])),
}


@pytest.mark.parametrize("kind", AWKWARD)
def test_whatever_batch_is_given_training_continues(begin, capfd, kind):
    model = net()
    session = begin().watch(model)
    train(model, batches(2), tell=lambda x, y: sonde.batch(*AWKWARD[kind]))
    assert session.recording.breaker.num_errors == 0
    assert session.step_number + session.recording.is_step_over == 2


def test_batch_works_without_a_model(begin, reopen):
    session = begin()
    for number in range(3):
        session.batch(np.full(4, number), ids=[number])
        session.step()
    assert len(set(values(reopen(), "data/batch/hash").values())) == 3


def test_a_model_that_gives_and_takes_structures(begin, reopen):
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Linear(2, 2)

        def forward(self, batch: dict[str, Any]) -> tuple[Any, ...]:
            return None, {"out": self.inside(batch["x"])}, "text"

    model = Odd()
    session = begin().watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model({"x": torch.ones(3, 2), "name": "text"})[1]["out"].sum().backward()
    optimizer.step()
    assert session.recording.breaker.num_errors == 0
    run = reopen()
    assert values(run, "data/input/size") == {0: 3}
    assert values(run, "data/output/width") == {0: 2}


def test_the_documentation_names_every_series(begin, reopen):
    documented = set(re.findall(r"`(data/[a-z]+/[a-z_]+)`", (DOCS / "inspections.md").read_text("utf-8")))
    model, text = net(), Language()
    session = begin().watch(model)
    train(model, batches(2), tell=lambda x, y: sonde.batch(x, y, ids=[1]))
    session.steps.unwatch(session.steps.models[:])
    session.watch(text)
    ids = torch.randint(0, 20, (4, 9), generator=torch.Generator().manual_seed(0))
    train_text(text, ids)
    with torch.no_grad():
        text(input_ids=ids, labels=ids)
    for model, train_model in ((net(), accumulate), (nn.Linear(4, 16), distil), (net(), train_sum)):
        session.steps.unwatch(session.steps.models[:])
        session.watch(model)
        train_model(model)
    assert set(reopen().scalars("data/*")["name"].to_pylist()) == documented


def accumulate(model: nn.Module) -> None:
    """Weighted classes from a loader, gradients cleared between micro-batches, and a validation in train mode."""
    x, y = torch.randn(24, 4), torch.randint(0, 3, (24,))
    loader, weight = DataLoader(TensorDataset(x, y), batch_size=4), torch.tensor([1.0, 2.0, 3.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (part, labels) in enumerate(loader):
        F.cross_entropy(model(part), labels, weight=weight).backward()
        if number % 2:
            optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        F.cross_entropy(model(x), y, weight=weight)


def train_sum(model: nn.Module) -> None:
    train(model, batches(2), lambda output, y: F.cross_entropy(output, y, reduction="sum") / len(y))


def distil(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        student, teacher = model(torch.randn(6, 4)), torch.randn(6, 16)
        F.kl_div(F.log_softmax(student, 1), F.softmax(teacher, 1), reduction="batchmean").backward()
        optimizer.step()
        optimizer.zero_grad()


def train_text(model: nn.Module, ids: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


def test_watching_again_continues_inspecting(begin, reopen):
    model = net()
    session = begin().watch(model)
    train(model, batches(2))
    session.watch(model, inspect=sonde.every(1))
    train(model, batches(2))
    assert len(values(reopen(), "data/loss/value")) == 4


def test_views_list_the_loss_only_of_what_is_recorded_for_rules(begin, reopen):
    from sonde.show.summary import loss_series, scalar_series

    model = net()
    session = begin().watch(model)
    train(model, batches(3))
    session.log({"data/epoch": 1.0})
    run = reopen()
    loss = loss_series(run)
    assert loss is not None
    names = [series.name for series in scalar_series(run)]
    assert [name for name in names if is_inspection(name)] == [loss.name]
    assert "data/epoch" in names
    compared = sonde.compare(run, run).metrics["name"].to_pylist()
    assert [name for name in compared if is_inspection(name)] == [loss.name]
    assert "data/input" not in run._repr_html_()
    assert run.scalars("data/*").num_rows > 50
