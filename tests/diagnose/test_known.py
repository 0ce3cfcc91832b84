"""What is known of values some of which are not."""

from __future__ import annotations

import numpy as np
import pytest

from sonde.diagnose.measures.curves import nanmax, nanmean, nanmedian, nanstd

ALL = {nanmean: np.nanmean, nanmedian: np.nanmedian, nanmax: np.nanmax, nanstd: np.nanstd}


@pytest.mark.parametrize("ours", ALL, ids=[f.__name__ for f in ALL.values()])
def test_equal_to_numpy_where_something_is_known(ours) -> None:  # type: ignore[no-untyped-def]
    values = np.array([[1.0, np.nan, 5.0], [2.0, 3.0, np.nan]])
    assert ours(values) == ALL[ours](values)
    np.testing.assert_array_equal(ours(values, axis=0), ALL[ours](values, axis=0))


@pytest.mark.parametrize("ours", ALL, ids=[f.__name__ for f in ALL.values()])
def test_where_nothing_is_known_the_answer_is_nan_without_a_warning(ours) -> None:  # type: ignore[no-untyped-def]
    assert np.isnan(ours([]))
    assert np.isnan(ours([np.nan, np.nan]))
    np.testing.assert_array_equal(ours(np.array([[1.0, np.nan], [1.0, np.nan]]), axis=0)[1], np.nan)
