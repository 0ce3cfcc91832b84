"""Addends: encoded and decoded exactly, and nothing after a damaged frame."""

from __future__ import annotations

import numpy as np

from sonde.schema.addends import Addends, decode_addends, encode_addends


def a_record(step: int, dtype: type = np.float32) -> Addends:
    values = [np.array([1.5, -2.25], dtype), np.zeros(0, dtype), np.array([np.nan], dtype)]
    return Addends(step, np.array([3, 4, 9], np.int32), values, np.array([1.0, 0.5, 1.0]))


def test_both_widths_are_exact() -> None:
    for dtype in (np.float32, np.float64):
        (found,) = decode_addends(encode_addends(0, a_record(7, dtype), 2), 0)
        assert (found.step, found.attempt, found.site_ids.tolist(), found.factors.tolist()) == (
            7, 2, [3, 4, 9], [1.0, 0.5, 1.0],
        )  # fmt: skip
        for value, wanted in zip(found.values, a_record(7, dtype).values, strict=True):
            assert value.dtype == dtype
            assert np.array_equal(value, wanted, equal_nan=True)


def test_reading_stops_at_a_flipped_bit_or_a_torn_end() -> None:
    data = b"".join(encode_addends(step, a_record(step), 0) for step in range(3))
    size = len(data) // 3
    damaged = bytearray(data)
    damaged[size + 40] ^= 4
    assert [record.step for record in decode_addends(bytes(damaged), 0)] == [0]
    assert [record.step for record in decode_addends(data[:-1], 0)] == [0, 1]
