"""A window gives series by pattern and cuts to the last steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sonde.errors import UnknownNameError
from sonde.schema.names import Series
from sonde.schema.window import Window

STEPS = np.arange(10)


def a_window() -> Window:
    return Window(
        {
            Series("grad", "1.weight", "rms"): (STEPS, STEPS * 1.0),
            Series("grad", "0.weight", "rms"): (STEPS[::2], STEPS[::2] * 2.0),
            Series("grad", "0.weight", "norm"): (STEPS, STEPS * 3.0),
            Series("act", "0", "rms"): (STEPS, STEPS * 4.0),
        },
        {"loss": (STEPS, 1.0 / (1 + STEPS))},
        {"model": "Sequential"},
    )


def test_series_come_by_pattern_in_the_order_in_which_they_were_first_measured() -> None:
    assert [site for site, _, _ in a_window().by_site("grad/*/rms")] == ["1.weight", "0.weight"]
    assert [site for site, _, _ in a_window().by_site("*/*/rms")] == ["1.weight", "0.weight", "0"]
    assert list(a_window().by_site("grad/2.*/rms")) == []


def test_misspelt_kind_in_a_pattern_is_an_error_not_an_empty_answer() -> None:
    with pytest.raises(UnknownNameError):
        list(a_window().by_site("grads/*/rms"))


@given(st.integers(1, 15))
def test_last_keeps_the_newest_steps_of_every_series(num_steps: int) -> None:
    cut = a_window().last(num_steps)
    for name, (steps, values) in a_window().series.items():
        kept = steps > 9 - num_steps
        np.testing.assert_array_equal(cut.series[name][0], steps[kept])
        np.testing.assert_array_equal(cut.series[name][1], values[kept])
    assert len(cut.scalars["loss"][0]) == min(num_steps, 10)
    assert cut.facts == {"model": "Sequential"}


def test_a_window_of_nothing_stays_one() -> None:
    assert Window().last(5) == Window()
    assert list(Window().by_site("*")) == []


def test_a_grid_sets_sites_side_by_side_with_nan_where_a_step_is_missing() -> None:
    grid = a_window().grid("grad/*/rms")
    assert grid.sites == ("1.weight", "0.weight")
    np.testing.assert_array_equal(grid.steps, STEPS)
    np.testing.assert_array_equal(grid.row("1.weight"), STEPS * 1.0)
    np.testing.assert_array_equal(grid.row("0.weight"), np.where(STEPS % 2 == 0, STEPS * 2.0, np.nan))
    assert len(a_window().grid("grad/none/rms")) == 0


def test_one_series_or_scalar_is_found_by_its_full_name() -> None:
    np.testing.assert_array_equal(a_window().get("grad/0.weight/norm")[1], STEPS * 3.0)
    np.testing.assert_array_equal(a_window().get("loss")[0], STEPS)
    assert len(a_window().get("val_loss")[0]) == 0


def test_a_site_with_slashes_is_found_by_its_full_name() -> None:
    column = (STEPS, STEPS * 1.0)
    window = Window({Series("grad", "a/b//c", "rms"): column}, {"val/loss": column})
    assert window.get("grad/a/b//c/rms") == column
    assert window.get("val/loss") == column
    assert len(window.get("grad/a/rms")[0]) == 0


def test_a_scalar_that_bears_the_name_of_a_series_does_not_hide_it() -> None:
    own, logged = (STEPS, STEPS * 1.0), (STEPS[:1], STEPS[:1] * 0.0)
    assert Window({Series("grad", "0", "rms"): own}, {"grad/0/rms": logged}).get("grad/0/rms") == own


def test_a_sample_of_the_machine_is_not_a_step() -> None:
    window = Window({}, {"loss": (STEPS, STEPS * 1.0), "system/cpu_percent": (np.array([10]), np.array([50.0]))}, {})
    assert window.last_step == 9
    assert len(window.last(2).scalars["loss"][0]) == 2
