"""Projections that do not learn together are named; the usual gap between values and the rest is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sonde.diagnose.measures.model import projections
from sonde.diagnose.rules.qkv_imbalance import qkv_imbalance
from sonde.schema.window import Window
from windows import falling, window


def model(names: tuple[str, str, str], optimizer: str = "AdamW") -> dict[str, Any]:
    parts = [*names, "out"]
    return {
        "modules": [
            {"name": f"attn.{name}", "type": "Linear", "kind": "linear", "order": place}
            for place, name in enumerate(parts)
        ],
        "parameters": [
            {"name": f"attn.{name}.weight", "shape": [8, 8], "owner": f"attn.{name}", "module_type": "Linear"}
            for name in parts
        ],
        "optimizers": [{"type": optimizer, "groups": [{"lr": 1e-3}]}],
    }


def seen(grads: tuple[object, object, object], moves: tuple[object, object, object], **options: Any) -> Window:
    names = ("q_proj", "k_proj", "v_proj")
    series = {f"grad/attn.{name}.weight/rms": value for name, value in zip(names, grads, strict=True)}
    series |= {f"update/attn.{name}.weight/ratio": value for name, value in zip(names, moves, strict=True)}
    return window(model(names, **options), falling(60), series)


def test_keys_with_a_hundred_times_the_gradient_of_queries_are_named() -> None:
    (finding,) = qkv_imbalance(seen((1e-5, 1e-3, 1e-3), (0.01, 0.01, 0.01)))
    assert finding.sites == ("attn.k_proj.weight", "attn.q_proj.weight")


def test_queries_that_hardly_move_are_named() -> None:
    (finding,) = qkv_imbalance(seen((1e-3, 1e-3, 1e-3), (1e-6, 1e-3, 1e-3)))
    assert "parameter group" in finding.remedy


def test_keys_without_any_gradient_are_named() -> None:
    (finding,) = qkv_imbalance(seen((1e-3, 0.0, 1e-3), (0.01, 0.01, 0.01)))
    assert "has been zero" in finding.message
    assert all(np.isfinite(evidence.value) for evidence in finding.evidence)


def test_small_initial_weights_leave_the_values_a_larger_gradient() -> None:
    assert not list(qkv_imbalance(seen((1e-5, 1.2e-5, 1e-3), (0.01, 0.011, 0.03))))


def test_plain_descent_may_move_values_more() -> None:
    gap = (1e-5, 1e-5, 1.5e-3)
    assert not list(qkv_imbalance(seen((1e-3, 1e-3, 2e-2), gap, optimizer="SGD")))
    assert list(qkv_imbalance(seen((1e-3, 1e-3, 2e-2), gap)))


@pytest.mark.parametrize("names", [("query", "key", "value"), ("wq", "wk", "wv"), ("to_q", "to_k", "to_v")])
def test_projections_are_found_by_their_usual_names(names: tuple[str, str, str]) -> None:
    (layer,) = projections(window(model(names), falling(3), {}))
    assert layer.names == tuple(f"attn.{name}.weight" for name in names)


def test_projections_without_a_name_are_found_by_their_place() -> None:
    (layer,) = projections(window(model(("a", "b", "c")), falling(3), {"attn/attn/entropy": 0.9}))
    assert layer.query == "attn.a.weight"


def test_layers_of_several_shapes_are_not_taken_for_queries_keys_and_values() -> None:
    """One for keys and values together, for instance, or one for positions."""
    fused = model(("q", "kv", "sr"))
    fused["parameters"][1]["shape"] = [16, 8]
    assert not projections(window(fused, falling(3), {"attn/attn/entropy": 0.9}))


def test_an_empty_window_says_nothing() -> None:
    assert not list(qkv_imbalance(Window()))
