"""Numbers of outputs and of calls of losses against an obvious slow reference."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sonde.reduce.inspect.baseline import Baseline
from sonde.reduce.inspect.loss_call import inspect_loss
from sonde.reduce.inspect.output import inspect_output, take_rows


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def numbers(values) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


def entropy(p: list[float]) -> float:
    return -sum(q * math.log(q) for q in p if q > 0) / math.log(len(p))


def test_logits_of_classes():
    out, y = random(40, 5) * 3, torch.arange(40) % 5
    y[3] = -100
    found = numbers(inspect_output(out, y))
    chosen = out.argmax(1).tolist()
    right = [c == label for c, label in zip(chosen, y.tolist(), strict=True) if label != -100]
    assert found["accuracy"] == pytest.approx(sum(right) / len(right))
    assert found["top_share"] == pytest.approx(max(Counter(chosen).values()) / 40)
    assert found["entropy"] == pytest.approx(sum(entropy(row) for row in out.softmax(1).tolist()) / 40, rel=1e-4)
    assert found["log_z"] == pytest.approx(float(out.logsumexp(1).abs().mean()), rel=1e-5)
    assert found["logit_max"] == pytest.approx(float(out.abs().max()))
    assert found["std"] == pytest.approx(float(out.std(correction=0)), rel=1e-5)
    spread = out.std(0, correction=0).mean() / out.square().mean().sqrt()
    assert found["batch_std"] == pytest.approx(float(spread), rel=1e-5)
    assert (found["width"], found["min"], found["max"]) == (5, float(out.min()), float(out.max()))
    assert (found["is_distribution"], found["is_log_distribution"], found["column_distribution"]) == (0, 0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_distributions_are_recognised(dtype):
    out = random(32, 10)
    rows = numbers(inspect_output(out.softmax(1).to(dtype)))
    logs = numbers(inspect_output(out.log_softmax(1).to(dtype)))
    columns = numbers(inspect_output(out.softmax(0).to(dtype)))
    assert (rows["is_distribution"], rows["is_log_distribution"], rows["column_distribution"]) == (1, 0, 0)
    assert (logs["is_distribution"], logs["is_log_distribution"], logs["column_distribution"]) == (0, 1, 0)
    log_columns = numbers(inspect_output(out.log_softmax(0).to(dtype)))
    assert (columns["is_distribution"], columns["column_distribution"]) == (0, 1)
    assert (log_columns["is_log_distribution"], log_columns["column_distribution"]) == (0, 1)


def test_the_entropy_of_a_distribution_is_its_own():
    p = torch.tensor([[0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    assert float(inspect_output(p)["entropy"]) == pytest.approx(0.25)


def test_softmax_over_one_unit():
    found = numbers(inspect_output(random(8, 1).softmax(-1)))
    assert (found["is_distribution"], found["batch_std"], found["min"], found["max"]) == (1, 0, 1, 1)


def test_classes_in_dimension_one():
    out = random(3, 4, 6, 5)
    y = out.argmax(1)
    y[0] = (y[0] + 1) % 4
    found = numbers(inspect_output(out, y, class_dim=1))
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["width"] == 4


def test_rows_taken_from_a_view_are_rows_of_its_copy():
    moved = random(3, 4, 6, 5).movedim(1, -1)
    for picks in [(1, 90), (7, 12)]:
        stride, size = picks
        expected = moved.reshape(-1, 4)[: (size - 1) * stride + 1 : stride]
        assert torch.equal(take_rows(moved, picks), expected)


def test_one_unit_decides_by_its_threshold():
    out = torch.tensor([[-1.0], [2.0], [0.3], [0.4]])
    y = torch.tensor([[0.0], [1.0], [1.0], [0.0]])
    assert float(inspect_output(out, y)["accuracy"]) == 0.75
    assert float(inspect_output(out, y, threshold=0.5)["accuracy"]) == 0.75
    assert float(inspect_output(out, y, threshold=0.5)["top_share"]) == 0.75


@pytest.mark.parametrize(
    "out",
    [
        torch.tensor(3.0),
        torch.empty(0, 3),
        torch.ones(3, 2, dtype=torch.complex64),
        torch.arange(4),
        torch.full((2, 3), torch.nan),
        torch.eye(3).to_sparse(),
        torch.ones(5),
        torch.ones(1, 3),
        torch.ones(3, 4, dtype=torch.float16).T,
    ],
)
def test_no_kind_of_output_breaks_it(out):
    for target in (None, torch.tensor(0), torch.zeros(3), torch.empty(0)):
        assert all(isinstance(float(value), float) for value in inspect_output(out, target).values())


def call(name: str, out: Tensor, y: Tensor, reduction: str = "mean") -> dict[str, dict[str, float]]:
    result = getattr(F, name)(out, y, reduction=reduction)
    found = inspect_loss(name, out, y, result, reduction, -100, Baseline())
    return {site: numbers(values) for site, values in found.items()}


def test_a_call_of_cross_entropy():
    out, y = random(6, 4), torch.tensor([0, 0, 0, 1, 2, -100])
    found = call("cross_entropy", out, y, "sum")
    assert found["loss"]["value"] == pytest.approx(float(F.cross_entropy(out, y, reduction="sum")))
    assert (found["loss"]["reduction"], found["loss"]["numel"], found["loss"]["target_numel"]) == (1, 6, 6)
    assert found["loss"]["baseline"] == pytest.approx(entropy([0.6, 0.2, 0.2]) * math.log(3), rel=1e-5)
    assert found["target"]["num_classes"] == 3
    assert "accuracy" in found["output"]


def test_cross_entropy_of_one_sample_of_pictures_and_of_probabilities():
    assert call("cross_entropy", random(4), torch.tensor(2))["output"]["width"] == 4
    found = call("cross_entropy", random(2, 4, 5, 5), torch.zeros(2, 5, 5).long())
    assert (found["loss"]["numel"], found["output"]["width"]) == (50, 4)
    soft = call("cross_entropy", random(6, 4), F.one_hot(torch.tensor([0, 0, 0, 1, 2, 3]), 4).float())
    assert (soft["target"]["num_classes"], soft["target"]["top_share"], soft["loss"]["numel"]) == (4, 0.5, 6)
    assert "accuracy" in soft["output"]


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_forgotten_dimension_squares_the_number_of_terms():
    assert call("mse_loss", random(6, 1), random(6))["loss"]["numel"] == 36
    assert call("mse_loss", random(6, 1), random(6, 1))["loss"]["numel"] == 6


def test_losses_without_reduction_are_averaged():
    found = call("mse_loss", random(6, 2), torch.zeros(6, 2), "none")["loss"]
    assert (found["reduction"], found["value"]) == (2, pytest.approx(float(random(6, 2).square().mean())))


def test_an_unknown_reduction_is_said_to_be_unknown():
    found = inspect_loss("mse_loss", random(2), random(2), torch.tensor(0.0), "", -100, Baseline())
    assert found["loss"]["reduction"] == -1


def test_baselines_run_over_all_targets_seen():
    batches = [random(8, 3) * 2 + 1e6, random(16, 3) + 1e6 + 3]
    variance, absolute = Baseline(), Baseline()
    for y in batches:
        found = variance.of_loss("mse_loss", y, 3, -100)
        apart = absolute.of_loss("l1_loss", y, 3, -100)
    together = torch.cat(batches).double()
    assert float(found) == pytest.approx(float(together.var(0, correction=0).mean()), rel=1e-5)
    assert float(apart) == pytest.approx(float((batches[-1] - together.mean(0)).abs().mean()), rel=1e-5)


def test_the_baseline_of_binary_targets_is_the_entropy_of_their_mean():
    y = torch.tensor([[1.0], [0.0], [0.0], [0.0]])
    expected = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert float(Baseline().of_loss("binary_cross_entropy", y, 1, -100)) == pytest.approx(expected)


def test_class_frequencies_run_on_and_large_vocabularies_have_none():
    baseline = Baseline()
    baseline.of_loss("cross_entropy", torch.tensor([0, 0, 0]), 2, -100)
    found = baseline.of_loss("cross_entropy", torch.tensor([1]), 2, -100)
    assert float(found) == pytest.approx(entropy([0.75, 0.25]) * math.log(2))
    assert baseline.of_loss("cross_entropy", torch.tensor([1]), 50_000, -100) is None
    assert baseline.of_loss("kl_div", torch.rand(3), 3, -100) is None
    assert baseline.of_loss("mse_loss", torch.empty(0), 1, -100) is None
