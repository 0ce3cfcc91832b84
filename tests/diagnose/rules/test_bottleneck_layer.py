"""One unit between wide layers is named when the loss is stuck; an autoencoder and a net narrow throughout are not."""

from __future__ import annotations

from sonde.diagnose.rules.bottleneck_layer import bottleneck_layer
from sonde.schema.window import Window
from windows import falling, stack, stuck, window

NARROW = stack("Linear 20 64", "Tanh", "Linear 64 1", "Tanh", "Linear 1 64", "Tanh", "Linear 64 8")
RANKS: dict[str, object] = {"unit/0/rank": 12.0, "unit/2/rank": 1.0, "unit/4/rank": 1.5}
CLASSES: dict[str, object] = {"data/target/num_classes": 8.0, "data/target/is_class": 1.0}


def test_a_single_unit_between_wide_layers_is_named() -> None:
    (finding,) = bottleneck_layer(window(NARROW, stuck(80), RANKS | CLASSES))
    assert finding.sites == ("2",)


def test_a_narrow_layer_is_not_a_fault_where_the_loss_falls() -> None:
    assert not list(bottleneck_layer(window(NARROW, falling(80), RANKS | CLASSES)))


def test_an_autoencoder_has_no_classes() -> None:
    assert not list(bottleneck_layer(window(NARROW, stuck(80), RANKS | CLASSES | {"data/target/is_class": 0.0})))


def test_a_net_narrow_throughout_has_no_bottleneck() -> None:
    model = stack("Linear 20 6", "Tanh", "Linear 6 4", "Tanh", "Linear 4 6", "Tanh", "Linear 6 8")
    assert not list(bottleneck_layer(window(model, stuck(80), {"unit/0/rank": 5.0, "unit/2/rank": 3.0} | CLASSES)))


def test_an_empty_window_says_nothing() -> None:
    assert not list(bottleneck_layer(Window()))
