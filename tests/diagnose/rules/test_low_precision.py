"""float16 gradients that underflow and activations that nearly overflow are named; other types, scaled losses not."""

from __future__ import annotations

from sonde.diagnose.rules.low_precision_overflow import low_precision_overflow
from sonde.diagnose.rules.low_precision_underflow import low_precision_underflow
from sonde.schema.window import Window
from windows import stack, stuck, window

MODEL = stack("Linear 8 8", "ReLU", "Linear 8 3")


def gradients(dtype: str, below_normal: float, below: float = 0.0) -> Window:
    series: dict[str, object] = {}
    for site in ("0.weight", "2.weight"):
        series |= {f"grad/{site}/below_fp16_normal": below_normal, f"grad/{site}/fp16_underflow_fraction": below}
    dtypes = {f"grad/{site}": dtype for site in ("0.weight", "2.weight")}
    return window(MODEL, stuck(40), series, {"dtypes": dtypes})


def test_float16_gradients_that_lose_digits_are_named() -> None:
    (finding,) = low_precision_underflow(gradients("float16", 0.9))
    assert "GradScaler" in finding.remedy


def test_small_gradients_of_other_types_are_fine() -> None:
    assert not list(low_precision_underflow(gradients("float32", 0.9)))
    assert not list(low_precision_underflow(gradients("bfloat16", 0.9)))


def test_gradients_that_were_scaled_back_are_fine() -> None:
    assert not list(low_precision_underflow(gradients("float16", 0.9, below=0.3)))


def activations(dtype: str, largest: float) -> Window:
    return window(MODEL, stuck(40), {"act/0/max_abs": largest}, {"dtypes": {"act/0": dtype}})


def test_float16_values_near_their_end_are_named() -> None:
    (finding,) = low_precision_overflow(activations("float16", 40000.0))
    assert finding.sites == ("0",)


def test_the_same_values_in_bfloat16_are_fine() -> None:
    assert not list(low_precision_overflow(activations("bfloat16", 40000.0)))
    assert not list(low_precision_overflow(activations("float16", 400.0)))


def test_an_empty_window_says_nothing() -> None:
    assert not list(low_precision_underflow(Window()))
    assert not list(low_precision_overflow(Window()))
