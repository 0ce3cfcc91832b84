"""Linear layers in a row are named; pairs that save parameters, adapters and single layers are not."""

from __future__ import annotations

import pytest

from sonde.diagnose.rules.missing_nonlinearity import missing_nonlinearity
from sonde.schema.window import Window
from windows import falling, stack, stuck, window


def test_two_linear_layers_in_a_row_are_named() -> None:
    model = stack("Linear 8 32", "Linear 32 3", fed_by={"1": "0"})
    (finding,) = missing_nonlinearity(window(model, stuck(60), {}))
    assert (finding.severity, finding.sites) == ("warning", ("0", "1"))


def test_convolutions_in_a_row_are_named() -> None:
    model = stack("Conv2d 1 12 3 3", "Conv2d 12 16 3 3", fed_by={"1": "0"})
    assert [f.sites for f in missing_nonlinearity(window(model, stuck(60), {}))] == [("0", "1")]


@pytest.mark.parametrize(
    "layers",
    [
        ("Linear 64 8", "Linear 8 64"),  # low rank
        ("Conv2d 16 16 3 3", "Conv2d 16 32 1 1"),  # depthwise, then pointwise
        ("Linear 16 32", "Conv1d 1 32 4"),  # pointwise over tokens, then depthwise
        ("Conv2d 16 16 1 3", "Conv2d 16 16 3 1"),  # a square kernel in two parts
    ],
)
def test_pairs_that_save_parameters_are_made_on_purpose(layers: tuple[str, str]) -> None:
    assert not list(missing_nonlinearity(window(stack(*layers, fed_by={"1": "0"}), stuck(60), {})))


def test_layers_that_do_not_feed_each_other_are_fine() -> None:
    assert not list(missing_nonlinearity(window(stack("Linear 8 32", "Linear 32 3"), stuck(60), {})))


def test_whoever_learns_the_task_with_it_gets_a_remark() -> None:
    model = stack("Linear 8 32", "Linear 32 3", fed_by={"1": "0"})
    (finding,) = missing_nonlinearity(window(model, falling(100, end=0.01), {}))
    assert finding.severity == "info"


def test_an_empty_window_says_nothing() -> None:
    assert not list(missing_nonlinearity(Window()))
