"""Numbers of inputs and targets against an obvious slow reference, and tensors of all kinds."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sonde.reduce.inspect.data import duplicates, inspect_input, inspect_target
from sonde.reduce.inspect.tokens import alignment, shift


def numbers(values) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def reference(table: np.ndarray) -> dict[str, float]:
    """Of a (rows, features) table, feature by feature."""
    std = [float(np.std(column)) for column in table.T]
    top = [float(np.max(np.abs(column))) for column in table.T]
    return {
        "std": float(np.std(table)),
        "mean": float(np.mean(table)),
        "abs_max": max(top),
        "feature_std_ratio": max(std) / min(s for s in std if s > 0),
        "feature_abs_max_ratio": max(top) / min(t for t in top if t > 0),
        "constant": sum(len(set(column)) == 1 for column in table.T) / table.shape[1],
    }


def test_a_table_of_features():
    x = random(50, 7) * torch.tensor([1.0, 100.0, 0.01, 3.0, 1.0, 1.0, 1.0])
    x[:, 5] = 0.1  # whose deviation, as rounded, is not zero
    x[:, 6] = 0.0
    found = numbers(inspect_input(x))
    expected = reference(x.numpy().astype(np.float64))
    assert found == pytest.approx({**expected, "size": 50, "is_token": 0, "duplicates": 0, **_spread(x)}, rel=1e-4)


def _spread(x: Tensor) -> dict[str, float]:
    flat = x.reshape(len(x), -1).numpy().astype(np.float64)
    std = [np.std(column) if len(set(column)) > 1 else 0.0 for column in flat.T]
    return {"sample_std": float(np.mean(std) / np.sqrt(np.mean(flat**2)))}


def test_features_of_images_are_their_channels():
    x = random(6, 3, 8, 8) * torch.tensor([1.0, 10.0, 0.1]).view(3, 1, 1)
    expected = reference(x.permute(0, 2, 3, 1).reshape(-1, 3).numpy().astype(np.float64))
    found = numbers(inspect_input(x))
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    channels_last = numbers(inspect_input(x.to(memory_format=torch.channels_last)))
    assert channels_last["feature_std_ratio"] == pytest.approx(found["feature_std_ratio"], rel=1e-5)


def test_features_of_sequences_are_the_last_dimension():
    x = random(6, 9, 4) * torch.tensor([1.0, 10.0, 0.1, 1.0])
    expected = reference(x.reshape(-1, 4).numpy().astype(np.float64))
    found = numbers(inspect_input(x))
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4)


def test_large_inputs_are_sampled():
    x = random(300, 3, 64, 64) * 2 + 1
    found = numbers(inspect_input(x))
    assert found["std"] == pytest.approx(2, rel=0.05)
    assert found["mean"] == pytest.approx(1, abs=0.1)
    assert found["sample_std"] == pytest.approx(2 / math.sqrt(5), rel=0.05)
    assert found["feature_std_ratio"] == pytest.approx(1, rel=0.1)


def test_the_same_sample_over_and_over():
    x = random(1, 10).expand(8, 10)
    found = numbers(inspect_input(x))
    assert found["sample_std"] == 0
    assert found["duplicates"] == 1
    assert found["constant"] == 1
    assert found["feature_std_ratio"] == 0


def test_duplicates_count_every_row_that_has_a_twin():
    x = random(10, 5)
    x[7], x[3], x[9] = x[0], x[0], x[1]
    rows = Counter(tuple(row) for row in x.tolist())
    expected = sum(rows[tuple(row)] > 1 for row in x.tolist()) / 10
    assert float(duplicates(x)) == pytest.approx(expected)
    assert float(duplicates(x.bfloat16())) == pytest.approx(expected)


def test_rows_that_differ_in_one_place_are_no_duplicates():
    x = torch.zeros(64, 784)
    x[torch.arange(64), torch.arange(64) * 7] = 1.0
    assert float(duplicates(x)) == 0


def test_tokens_have_no_scale_of_features():
    x = torch.arange(40).reshape(4, 10)
    found = inspect_input(x)
    assert found["is_token"] == 1
    assert "feature_std_ratio" not in found
    assert float(found["duplicates"]) == 0
    picture = inspect_input(torch.zeros(2, 3, 4, 4, dtype=torch.uint8))
    assert picture["is_token"] == 0


KINDS = {
    "integers": torch.arange(12).reshape(3, 4),
    "bytes": torch.arange(12, dtype=torch.uint8).reshape(3, 4),
    "bools": torch.arange(12).reshape(3, 4) % 2 == 0,
    "complex": torch.randn(3, 4, dtype=torch.complex64),
    "half": torch.ones(3, 4, dtype=torch.float16),
    "bfloat16": torch.ones(3, 4, dtype=torch.bfloat16),
    "float8": torch.ones(3, 4).to(torch.float8_e4m3fn),
    "double": torch.ones(3, 4, dtype=torch.float64),
    "nan": torch.full((3, 4), torch.nan),
    "inf": torch.full((3, 4), torch.inf),
    "empty": torch.empty(0, 4),
    "no features": torch.empty(3, 0),
    "a number": torch.tensor(3.0),
    "a whole number": torch.tensor(3),
    "one dimension": torch.arange(5.0),
    "one row": torch.ones(1, 4),
    "transposed": torch.arange(12.0).reshape(3, 4).T,
    "expanded": torch.ones(1, 4).expand(3, 4),
    "sparse": torch.eye(3).to_sparse(),
    "five dimensions": torch.ones(2, 3, 2, 2, 2),
    "unsigned": torch.ones(3, 4, dtype=torch.uint16),
}


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_tensor_breaks_it(kind):
    for values in (inspect_input(KINDS[kind]), inspect_target(KINDS[kind])):
        assert all(isinstance(float(value), float) for value in values.values())


def test_half_precision_does_not_overflow():
    x = torch.full((8, 100), 300.0, dtype=torch.float16)
    x[:4] = -300
    found = numbers(inspect_input(x))
    assert (found["std"], found["abs_max"]) == (300, 300)


def classes(y: list[int], ignored: int = -100) -> dict[str, float]:
    valid = [label for label in y if label != ignored]
    return {
        "is_class": 1,
        "num_classes": len(set(valid)),
        "top_share": max(Counter(valid).values()) / len(valid),
        "std": float(np.std(valid)),
        "mean": float(np.mean(valid)),
        "min": min(valid),
        "max": max(valid),
        "counted": pytest.approx(len(valid) / len(y)),
    }


@pytest.mark.parametrize("ignored", [-100, 3])
def test_classes_without_the_ignored(ignored):
    y = torch.randint(0, 7, (60,), generator=torch.Generator().manual_seed(1))
    y[::4] = ignored
    assert numbers(inspect_target(y, ignored)) == pytest.approx(classes(y.tolist(), ignored))


def test_targets_of_a_regression():
    y = random(40, 1) * 5 + 2
    found = numbers(inspect_target(y))
    assert found["is_class"] == 0
    assert found["num_classes"] == 40
    assert found["std"] == pytest.approx(float(np.std(y.numpy())), rel=1e-5)
    assert (found["min"], found["max"]) == (float(y.min()), float(y.max()))


def test_floats_of_zero_and_one_are_classes():
    found = numbers(inspect_target(torch.tensor([[0.0], [1.0], [1.0], [1.0]])))
    assert (found["is_class"], found["num_classes"], found["top_share"]) == (1, 2, 0.75)


def test_classes_written_out_are_counted_as_classes():
    y = torch.nn.functional.one_hot(torch.tensor([0, 1, 2, 2]), 5).float()
    found = numbers(inspect_target(y))
    assert (found["num_classes"], found["top_share"]) == (3, 0.5)
    several = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    assert float(inspect_target(several)["top_share"]) == pytest.approx(4 / 6)


def tokens() -> Tensor:
    return torch.randint(0, 1000, (4, 11), generator=torch.Generator().manual_seed(2))


def test_shift_finds_the_next_token_as_target():
    text = tokens()
    x, y = text[:, :-1], text[:, 1:]
    assert float(shift(x, y)) == 1
    assert float(shift(x, y.reshape(-1))) == 1
    assert float(shift(text, text[:, 1:].reshape(-1))) == 1
    padded = torch.nn.functional.pad(text[:, 1:], (0, 1), value=-100)
    assert float(shift(text, padded)) == 1


def test_shift_of_other_targets_is_their_share_of_agreement():
    text = tokens()
    assert float(shift(text, text)) < 0.1
    assert float(shift(text, text, is_raw=True)) == 1
    y = text.roll(-1, 1)
    y[:2] = -1
    assert float(shift(text, y)) == 0.5
    y[:2] = -100
    assert float(shift(text, y)) == 1


def test_shift_needs_two_sequences_of_tokens():
    assert shift(torch.ones(4, 3), torch.ones(4, 3).long()) is None
    assert shift(tokens(), torch.arange(4)) is None
    assert shift(torch.arange(4), torch.arange(4)) is None


def test_alignment_of_texts_with_their_targets() -> None:
    text = torch.randint(2, 50, (6, 12), generator=torch.Generator().manual_seed(3))
    text[:, 8:] = 1  # one end of text, and three of padding
    once = numbers(alignment(text, F.pad(text[:, 1:], (0, 1), value=-100)))
    assert once["shift"] == 1
    assert once["padding"] == pytest.approx(3 / 11)
    masked = F.pad(text[:, 1:], (0, 1), value=-100)
    masked[:, 8:] = -100
    assert numbers(alignment(text, masked))["padding"] == 0
    twice = numbers(alignment(text, F.pad(text[:, 2:], (0, 2), value=-100)))
    assert twice["skip"] == 1
    assert numbers(alignment(text, text))["copy"] == 1
    assert alignment(text.float(), text) == {}
