"""How far steps move the weights: matrices only, and small initial weights are not a reason for alarm."""

from __future__ import annotations

import numpy as np
import pytest

from sonde.diagnose.measures.motion import motion
from sonde.schema.window import Window
from windows import falling, stack, window

NET = stack("Linear 16 16", "ReLU", "Linear 16 4")


def moved(update: object, weight: object) -> Window:
    names = {"update/0.weight/norm": update, "param/0.weight/norm": weight}
    return window(NET, falling(10), {**names, "update/0.bias/norm": 1.0, "param/0.bias/norm": 1e-3})


def test_the_ratio_is_update_over_weight_and_biases_do_not_count() -> None:
    found = motion(moved(1.0, 8.0))
    assert found is not None
    assert found.sites == ("0.weight",)
    assert found.at_first == pytest.approx(1 / 8)


def test_a_weight_counts_as_no_smaller_than_one_over_the_root_of_its_inputs() -> None:
    found = motion(moved(1.0, 0.01))
    assert found is not None
    assert found.at_first == pytest.approx(1 / 4)  # 16 x 16 elements of 1/4 have the norm 4


def test_what_begins_at_zero_is_left_out() -> None:
    assert motion(moved(1.0, np.r_[0.0, np.ones(9)])) is None
    assert motion(Window()) is None


def test_without_a_structure_large_tensors_are_taken_by_their_names() -> None:
    names = {
        **{f"update/{site}/norm": 1.0 for site in ("a.weight", "a.bias")},
        **{f"param/{site}/norm": 2.0 for site in ("a.weight", "a.bias")},
        **{f"param/{site}/n": 256.0 for site in ("a.weight", "a.bias")},
    }
    found = motion(window({}, falling(10), names))
    assert found is not None
    assert found.sites == ("a.weight",)
    assert found.typical == pytest.approx(0.5)
