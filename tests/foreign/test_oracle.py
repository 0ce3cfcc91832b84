"""The oracle finds nothing wrong with a right run, and finds every bug that is planted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from torch import nn

import sonde
from comparison import compare
from identity import differences, imprint, seed_all
from oracle import Oracle

pytestmark = pytest.mark.slow
NUM_STEPS = 12


class Net(nn.Module):
    """In-place functions, a module that is called twice, several outputs, an unused and a shared parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.cell = nn.GRU(8, 8, batch_first=True)
        self.mix = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.2))
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(8))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, ids: torch.Tensor) -> dict[str, Any]:
        hidden, last = self.cell(self.embed(ids))
        mixed = self.mix(self.mix(hidden)) * self.scale
        return {"logits": self.head(mixed), "more": [last, ids], "nothing": None}


def train(watch: Callable[[nn.Module, Any], Callable[[Any], None]]) -> dict[str, Any]:
    """`watch` is given model and optimizer, and returns what each loss is logged with."""
    seed_all(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    log = watch(model, optimizer)
    losses = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        for _ in range(2):  # micro-batches
            ids = torch.randint(0, 7, (4, 5))
            loss = nn.functional.cross_entropy(model(ids)["logits"].flatten(0, 1), ids.flatten())
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        log({"loss": loss})
        losses.append(loss.item())
    return imprint(model, [optimizer], losses)


def with_oracle(steps: Any = None) -> Oracle:
    found = []

    def watch(model: nn.Module, optimizer: Any) -> Any:
        found.append(Oracle(model, optimizer, steps=steps))
        return found[0].log

    train(watch)
    found[0].detach()
    return found[0]


@pytest.fixture(scope="module")
def witness() -> Oracle:
    return with_oracle()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("oracle")

    def watch(model: nn.Module, optimizer: Any) -> Any:
        return sonde.init(dir=folder, verbose=False).watch(model, optimizer).log

    train(watch)
    sonde.finish()
    return sonde.open(folder / "latest")


class Changed:
    """A run with a bug: its tables go through a function first."""

    def __init__(self, run: Any, stats: Any = lambda table: table, scalars: Any = lambda table: table) -> None:
        self.stats = lambda pattern: stats(pa.table(run.stats(pattern)))
        self.scalars = lambda pattern: scalars(pa.table(run.scalars(pattern)))


def of_series(table: pa.Table, name: str) -> Any:
    kind, site, stat = name.split("/")
    columns = (pc.cast(table.column(key), pa.string()) for key in ("kind", "site", "stat"))
    is_kind, is_site, is_stat = (pc.equal(c, v) for c, v in zip(columns, (kind, site, stat), strict=True))
    return pc.and_(pc.and_(is_kind, is_site), is_stat)


def set_column(table: pa.Table, name: str, values: Any) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, values)


def test_a_right_run_has_no_problem(run: Any, witness: Oracle) -> None:
    result = compare(run, witness)
    assert not result.problems, result
    assert result.num_values > 10_000


def test_the_oracle_changes_nothing() -> None:
    plain = train(lambda model, optimizer: lambda values: None)
    assert not differences(plain, train(lambda model, optimizer: Oracle(model, optimizer).log))


@pytest.mark.parametrize(
    "name",
    [
        *(f"optim/cell.weight_hh_l0.exp_avg_sq/{stat}" for stat in ("mean", "std", "rms", "norm", "min", "max", "n")),
        *(f"update/mix.0.weight/{stat}" for stat in ("abs_mean", "norm", "ratio", "grad_update_dot", "moment_cosine")),
        "act/head/sumsq",
        "grad/embed.weight/clip_factor",
    ],
)
def test_a_value_that_is_wrong_by_two_millionths_is_found(run: Any, witness: Oracle, name: str) -> None:

    def scaled(table: pa.Table) -> pa.Table:
        is_it = pc.and_(of_series(table, name), pc.equal(table.column("step"), 3))
        value = table.column("value")
        return set_column(table, "value", pc.if_else(is_it, pc.multiply(value, 1 + 2e-6), value))

    (problem,) = compare(Changed(run, stats=scaled), witness).problems
    assert problem.startswith(f"{name} at step 3:")


@pytest.mark.parametrize("kind", ["param", "grad", "update", "optim", "act"])
def test_steps_that_are_off_by_one_are_found(run: Any, witness: Oracle, kind: str) -> None:
    def late(table: pa.Table) -> pa.Table:
        is_it = pc.cast(pc.equal(pc.cast(table.column("kind"), pa.string()), kind), pa.int64())
        return set_column(table, "step", pc.add(table.column("step"), is_it))

    result = compare(Changed(run, stats=late), witness)
    assert all(line.startswith(f"{kind}/") for line in result.problems)
    assert result.missing
    assert result.extra
    assert result.different


def test_a_loss_logged_one_step_late_is_found(run: Any, witness: Oracle) -> None:
    def late(table: pa.Table) -> pa.Table:
        return set_column(table, "step", pc.add(table.column("step"), 1))

    result = compare(Changed(run, scalars=late), witness)
    assert "scalar loss at step 0" in result.missing
    assert any(line.startswith("scalar loss at step 1:") for line in result.different)
    assert f"scalar loss at step {NUM_STEPS}" in result.extra


def test_a_series_that_is_missing_is_found(run: Any, witness: Oracle) -> None:
    def without(table: pa.Table) -> pa.Table:
        return table.filter(pc.invert(of_series(table, "act/mix.0/rms")))

    result = compare(Changed(run, stats=without), witness)
    assert result.missing == [f"act/mix.0/rms at step {step}" for step in range(NUM_STEPS)]


def test_a_site_that_is_missing_is_found(run: Any, witness: Oracle) -> None:
    def without(table: pa.Table) -> pa.Table:
        return table.filter(pc.not_equal(pc.cast(table.column("site"), pa.string()), "cell:1"))

    result = compare(Changed(run, stats=without), witness)
    assert result.problems == ["act/cell:1 at steps 0, 1, 2, 3, 4, 5, 6, 7 … (12 in all)"]


def test_a_row_that_is_missing_in_a_step_that_is_not_measured_is_found(run: Any) -> None:
    def without(table: pa.Table) -> pa.Table:
        is_site = pc.equal(pc.cast(table.column("site"), pa.string()), "head")
        return table.filter(pc.invert(pc.and_(is_site, pc.equal(table.column("step"), 7))))

    witness = with_oracle(steps={0, 1, NUM_STEPS - 1})
    assert not compare(run, witness).problems
    assert compare(Changed(run, stats=without), witness).problems == ["act/head at steps 7 (1 in all)"]


def test_a_quantile_in_another_bin_is_found(run: Any, witness: Oracle) -> None:
    def wrong(table: pa.Table) -> pa.Table:
        is_it, value = of_series(table, "param/mix.0.weight/abs_q50"), table.column("value")
        return set_column(table, "value", pc.if_else(is_it, pc.multiply(value, 4), value))

    problems = compare(Changed(run, stats=wrong), witness).problems
    assert [problem.partition(":")[0] for problem in problems] == [
        f"param/mix.0.weight/abs_q50 at step {step}" for step in (0, 10)
    ]


def test_a_bit_that_differs_is_found() -> None:
    seed_all(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = imprint(model, [optimizer], [1.0])
    assert not differences(before, imprint(model, [optimizer], [1.0]))
    assert differences(before, imprint(model, [optimizer], [1.0 + 2.0**-52])) == ["loss 0"]
    model.weight.data.view(torch.int32)[0, 0] ^= 1
    torch.rand(1)
    assert differences(before, imprint(model, [optimizer], [1.0])) == ["param weight", "torch's random numbers"]
