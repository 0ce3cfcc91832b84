"""Bounded tables of numbers over steps: both ends whole, the middle thinned, holes and repetitions kept right."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sonde.diagnose.block import CAPACITY, EARLY, LATE, Block


def put(block: Block[str], steps: list[int], value: float | None = None, *, key: str = "a") -> None:
    column = np.array(steps, np.int64)
    values = column.astype(float) if value is None else np.full(len(steps), value)
    block.put(column, (key,), values[:, None], None)


def columns(block: Block[str]) -> dict[str, tuple[list[int], list[float]]]:
    return {key: (steps.tolist(), values.tolist()) for key, (steps, values) in block.columns()}


@pytest.mark.parametrize("batch", [1, 7, 300, 5000])
def test_a_long_run_keeps_its_ends_whole_and_its_middle_thinned(batch: int) -> None:
    block: Block[str] = Block()
    for start in range(0, 5000, batch):
        put(block, list(range(start, min(start + batch, 5000))))
    (steps, values) = columns(block)["a"]
    assert len(steps) <= CAPACITY
    assert values == [float(step) for step in steps]
    assert steps[:EARLY] == list(range(EARLY))
    assert steps[-LATE:] == list(range(5000 - LATE, 5000))
    assert max(np.diff(steps)) <= 16


def test_memory_does_not_grow_with_the_run() -> None:
    block: Block[str] = Block()
    sizes = []
    for start in range(0, 60_000, 100):
        put(block, list(range(start, start + 100)))
        sizes.append(block.num_bytes)
    assert sizes[-1] == sizes[200]


def test_a_step_that_comes_again_is_filled_in_and_the_last_value_counts() -> None:
    block: Block[str] = Block()
    put(block, [0, 1, 2], 1.0)
    put(block, [1], 5.0)
    put(block, [1, 2], 7.0, key="b")
    assert columns(block) == {"a": ([0, 1, 2], [1.0, 5.0, 1.0]), "b": ([1, 2], [7.0, 7.0])}


def test_what_was_not_seen_is_a_hole_and_a_nan_is_a_value() -> None:
    block: Block[str] = Block()
    values = np.array([[1.0, np.nan], [2.0, 4.0]])
    block.put(np.array([0, 1]), ("a", "b"), values, np.array([[True, True], [False, True]]))
    found = columns(block)
    assert found["a"] == ([0], [1.0])
    assert found["b"][0] == [0, 1]
    assert np.isnan(found["b"][1][0])


@given(st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=8, unique=True), max_size=12))
def test_steps_in_any_order_end_up_in_order_with_their_newest_value(batches: list[list[int]]) -> None:
    block: Block[str] = Block()
    expected: dict[int, float] = {}
    for number, steps in enumerate(batches):
        put(block, steps, float(number))
        expected.update(dict.fromkeys(steps, float(number)))
    found = columns(block).get("a", ([], []))
    assert dict(zip(*found, strict=True)) == expected
    assert found[0] == sorted(expected)
