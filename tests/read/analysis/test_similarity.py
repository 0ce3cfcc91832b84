"""Cosines between steps and layers, CKA against its definition, low-rank updates against the product they stand for."""

from __future__ import annotations

import numpy as np
import pytest

from sonde.read.tensors.analysis.lora import adapter_pairs, delta_spectrum
from sonde.read.tensors.analysis.representations import as_examples, linear_cka, unbiased_cka, unbiased_hsic
from sonde.read.tensors.analysis.similarity import cosines, gram, mean_cosine, same_turns
from sonde.read.tensors.analysis.spectra import effective_rank

RNG = np.random.default_rng(0)


def test_cosines_of_blocks_are_those_of_the_whole() -> None:
    arrays = [RNG.normal(size=(6, 5)) for _ in range(4)]
    found = cosines(gram([a[:2] for a in arrays]) + gram([a[2:] for a in arrays]))
    for i, a in enumerate(arrays):
        for j, b in enumerate(arrays):
            expected = (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)
            assert found[i, j] == pytest.approx(expected)


def test_zero_gradient_has_no_direction_and_not_finite_is_left_out() -> None:
    found = cosines(gram([np.zeros(2), np.array([1.0, np.nan]), np.array([2.0, 0.0])]))
    assert np.isnan(found[0, 1])
    assert found[1, 2] == pytest.approx(1.0)


def test_layers_that_turn_together_differ_from_those_that_do_not() -> None:
    turns = np.cumsum(RNG.normal(size=(12, 3)), axis=0)
    small = [turn @ RNG.normal(size=(3, 50)) for turn in turns]
    mixing = np.random.default_rng(1).normal(size=(3, 200))
    large = [turn @ mixing for turn in turns]
    other = [RNG.normal(size=200) for _ in turns]
    mixing_small = np.random.default_rng(2).normal(size=(3, 50))
    small = [turn @ mixing_small for turn in turns]
    together = same_turns(cosines(gram(small)), cosines(gram(large)))
    apart = same_turns(cosines(gram(small)), cosines(gram(other)))
    assert together > 0.8
    assert abs(apart) < 0.5
    assert np.isnan(same_turns(np.ones((2, 2)), np.ones((2, 2))))


def test_mean_cosine() -> None:
    x = RNG.normal(size=5)
    assert mean_cosine([(x, x), (x, -x)]) == pytest.approx(0.0)
    assert np.isnan(mean_cosine([(x, np.zeros(5))]))


def slow_cka(x: np.ndarray, y: np.ndarray) -> float:
    n = len(x)
    h = np.eye(n) - 1 / n
    k, m = x @ x.T, y @ y.T
    hsic = lambda a, b: np.trace(a @ h @ b @ h)
    return float(hsic(k, m) / np.sqrt(hsic(k, k) * hsic(m, m)))


@pytest.mark.parametrize(("n", "p", "q"), [(40, 5, 7), (10, 30, 20)])
def test_cka_is_its_definition(n: int, p: int, q: int) -> None:
    x, y = RNG.normal(size=(n, p)), RNG.normal(size=(n, q))
    assert linear_cka(x, y) == pytest.approx(slow_cka(x, y))


def test_cka_does_not_see_rotation_scale_or_shift() -> None:
    x = RNG.normal(size=(60, 8))
    rotation = np.linalg.qr(RNG.normal(size=(8, 8)))[0]
    y = 3.0 * x @ rotation + 5.0
    assert linear_cka(x, y) == pytest.approx(1.0)
    assert unbiased_cka(x, y) == pytest.approx(1.0)


def test_unbiased_hsic_is_the_sum_over_distinct_quadruples() -> None:
    n = 6
    x, y = RNG.normal(size=(n, 2)), RNG.normal(size=(n, 3))
    k, m = x @ x.T, y @ y.T
    terms = []
    for i in range(n):
        for j in range(n):
            for q in range(n):
                for r in range(n):
                    if len({i, j, q, r}) == 4:
                        terms.append(k[i, j] * (m[i, j] + m[q, r] - 2 * m[i, q]))
    assert unbiased_hsic(k, m) == pytest.approx(np.mean(terms))


def test_unbiased_cka_of_unrelated_wide_features_is_near_zero_where_the_biased_one_is_not() -> None:
    x, y = RNG.normal(size=(64, 500)), RNG.normal(size=(64, 500))
    assert linear_cka(x, y) > 0.6
    assert abs(unbiased_cka(x, y)) < 0.1


def test_size_of_batches_hardly_moves_the_unbiased_estimate() -> None:
    x = RNG.normal(size=(2048, 16))
    y = x @ RNG.normal(size=(16, 16)) + RNG.normal(size=(2048, 16))
    assert unbiased_cka(x, y, 64) == pytest.approx(unbiased_cka(x, y, 2048), abs=0.03)


def test_constant_representation_has_no_cka() -> None:
    assert np.isnan(linear_cka(np.ones((8, 3)), RNG.normal(size=(8, 3))))


def test_examples_are_rows_or_positions() -> None:
    activations = RNG.normal(size=(4, 5, 6))
    assert as_examples(activations).shape == (4, 30)
    assert as_examples(activations, per_position=True).shape == (20, 6)
    assert as_examples(np.ones(3)).shape == (3, 1)


@pytest.mark.parametrize("rank", [1, 4])
def test_update_of_an_adapter_is_that_of_the_product(rank: int) -> None:
    a, b = RNG.normal(size=(rank, 30)).astype(np.float32), RNG.normal(size=(20, rank)).astype(np.float32)
    product = 2.0 * (b.astype(float) @ a.astype(float))
    found = delta_spectrum(a, b, 2.0)
    np.testing.assert_allclose(found.values, np.linalg.svd(product, compute_uv=False)[:rank])
    assert found.frobenius == pytest.approx(np.linalg.norm(product))
    p = np.linalg.svd(product, compute_uv=False)[:rank]
    p /= p.sum()
    assert effective_rank(found) == pytest.approx(np.exp(-(p * np.log(p)).sum()))


def test_adapters_are_found_by_name() -> None:
    names = [
        "layers.0.q.base_layer.weight",
        "layers.0.q.lora_A.default.weight",
        "layers.0.q.lora_B.default.weight",
        "layers.0.q.lora_A.other.weight",
        "layers.0.q.lora_B.other.weight",
        "emb.lora_embedding_A.default",
        "emb.lora_embedding_B.default",
        "plain.lora_A",
        "plain.lora_B",
        "lonely.lora_A.weight",
    ]
    found = [(pair.module, pair.adapter, pair.b) for pair in adapter_pairs(names)]
    assert found == [
        ("layers.0.q", "default", "layers.0.q.lora_B.default.weight"),
        ("layers.0.q", "other", "layers.0.q.lora_B.other.weight"),
        ("emb", "default", "emb.lora_embedding_B.default"),
        ("plain", "", "plain.lora_B"),
    ]
