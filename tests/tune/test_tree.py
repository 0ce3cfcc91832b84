"""Everything a state dictionary may hold comes back as it was, through JSON."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sonde.errors import CorruptError, UsageError
from sonde.tune.checkpoint.tree import Encoder, decode


def back(value: Any) -> Any:
    encoder = Encoder()
    return decode(json.loads(json.dumps(encoder.encode(value, "x"), allow_nan=False)), encoder.tensors)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner)
    ),
    max_leaves=20,
)


@given(plain)
def test_plain_values(value):
    found = back(value)
    assert found == value
    assert repr(found) == repr(value)


@given(st.floats())
def test_floats_keep_their_bits(value):
    found = back(value)
    assert struct.pack("d", found) == struct.pack("d", value) or (math.isnan(found) and math.isnan(value))


@pytest.mark.parametrize(
    "value",
    [
        Counter({3: 2, 5: 1}),
        deque([1, 2], maxlen=4),
        {1, 2},
        frozenset({"a"}),
        {"$": "tuple", "items": [1]},
        torch.float8_e4m3fn,
        torch.device("cuda:1"),
        (1, [2, (3,)]),
        2**70,
        {(1, 2): "pair"},
    ],
)
def test_other_containers(value):
    found = back(value)
    assert (found, type(found)) == (value, type(value))
    assert getattr(found, "maxlen", None) == getattr(value, "maxlen", None)


def test_arrays_and_tensors():
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    shared = torch.randn(2)
    found = back({"a": array, "t": [shared, shared], "scalar": np.float32(0.1), "o": OrderedDict(x=shared.bfloat16())})
    assert found["a"].dtype == array.dtype
    assert np.array_equal(found["a"], array)
    assert found["t"][0] is found["t"][1]
    assert torch.equal(found["t"][0], shared)
    assert found["scalar"] == np.float32(0.1)
    assert found["o"]["x"].dtype == torch.bfloat16


@pytest.mark.parametrize("value", [object(), lambda: 0, np.array([object()]), {"a": {"b": print}}])
def test_invalid_data_is_refused_with_its_place(value):
    with pytest.raises(UsageError, match=r'"x(\.a\.b)?" is a .*never pickles'):
        Encoder().encode(value, "x")


@pytest.mark.parametrize(
    "hostile",
    [
        {"$": "import", "value": "os"},
        {"$": "tensor", "name": "missing"},
        {"$": "tuple"},
        {"$": "dtype", "value": "torch.nn"},
        {"$": "device", "value": "x" * 100},
        {"$": "array", "dtype": "O", "shape": [1], "value": "AAAA"},
        {"$": "array", "dtype": "f4", "shape": [9], "value": "AAAA"},
        {"$": "bytes", "value": "***"},
        {"$": ["tuple"]},
        {"$": "dict", "items": [[[1], 2]]},
    ],
)
def test_a_foreign_encoding_is_refused(hostile):
    with pytest.raises(CorruptError):
        decode(hostile, {})
