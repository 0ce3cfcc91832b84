"""Norms, distances and cosines against numpy's own, block by block and whole."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from sonde.read.tensors.analysis.evolution import evolution, evolution_columns, evolution_sums


def walk(num_steps: int = 5, shape: tuple[int, ...] = (6, 7), seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return list(np.cumsum(rng.normal(size=(num_steps, *shape)), axis=0))


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))


def test_columns_are_what_the_formulas_say() -> None:
    arrays = walk()
    found = evolution(arrays)
    for step, now in enumerate(arrays):
        assert found["norm"][step] == pytest.approx(np.linalg.norm(now))
        assert found["from_first"][step] == pytest.approx(np.linalg.norm(now - arrays[0]))
        assert found["relative_from_first"][step] == pytest.approx(
            np.linalg.norm(now - arrays[0]) / np.linalg.norm(arrays[0])
        )
        assert found["cosine_first"][step] == pytest.approx(cosine(now, arrays[0]))
    for step in range(1, len(arrays)):
        before, now = arrays[step - 1 : step + 1]
        assert found["from_previous"][step] == pytest.approx(np.linalg.norm(now - before))
        assert found["relative_change"][step] == pytest.approx(np.linalg.norm(now - before) / np.linalg.norm(before))
        assert found["cosine_previous"][step] == pytest.approx(cosine(now, before))
    assert np.isnan(found["from_previous"][0])


def test_sums_of_blocks_add_up_to_the_whole() -> None:
    arrays = walk()
    blocks = sum(evolution_sums([array[rows] for array in arrays]) for rows in (slice(0, 2), slice(2, 6)))
    whole = evolution(arrays)
    for column, values in evolution_columns(np.asarray(blocks)).items():
        np.testing.assert_allclose(values, whole[column], rtol=1e-12)


def test_small_change_of_a_large_weight_is_exact() -> None:
    weight = np.full(1000, 1e8)
    moved = weight.copy()
    moved[0] += 1e-3
    assert evolution([weight, moved])["from_previous"][1] == pytest.approx(1e-3, rel=1e-4)


def test_not_finite_is_counted_and_left_out_of_pairs() -> None:
    before, now = np.array([1.0, np.inf, 2.0, 3.0]), np.array([1.0, 5.0, np.nan, 4.0])
    found = evolution([before, now])
    assert found["nonfinite"].tolist() == [1, 1]
    assert found["from_previous"][1] == pytest.approx(1.0)
    assert found["cosine_previous"][1] == pytest.approx(cosine(np.array([1.0, 4.0]), np.array([1.0, 3.0])))


def test_other_shape_has_a_norm_and_no_distance() -> None:
    found = evolution([np.ones((2, 3)), np.ones((2, 2))])
    assert found["norm"][1] == pytest.approx(2.0)
    assert np.isnan(found["from_first"][1])
    assert np.isnan(found["cosine_previous"][1])


def test_zeros_have_no_direction() -> None:
    found = evolution([np.zeros(3), np.ones(3)])
    assert np.isnan(found["cosine_first"][1])
    assert np.isnan(found["relative_from_first"][1])
    assert found["from_first"][1] == pytest.approx(np.sqrt(3))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float16, np.int8, np.bool_])
def test_types_are_counted_in_float64(dtype: type) -> None:
    arrays = [np.array([0, 1, 1]).astype(dtype), np.array([1, 1, 1]).astype(dtype)]
    assert evolution(arrays)["from_first"][1] == 1.0


def test_complex_is_measured_as_it_is() -> None:
    found = evolution([np.array([0j]), np.array([3 + 4j])])
    assert found["from_previous"][1] == pytest.approx(5.0)
