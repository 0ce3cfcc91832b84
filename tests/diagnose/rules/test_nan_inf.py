"""The place where a value stopped being finite: data, module, loss, way back, update, or weights as they came."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sonde.diagnose.finding import Finding
from sonde.diagnose.rules.nan_inf import nan_inf
from sonde.schema.sketch import Array
from sonde.schema.window import Window
from windows import falling, stack, window

NUM = 40
MODEL = stack("Linear 8 8", "Length", "Linear 8 2")


def from_step(step: int, share: float = 1.0) -> Array:
    return np.where(np.arange(NUM) >= step, share, 0.0)


def bad_loss(step: int) -> Array:
    return np.where(np.arange(NUM) >= step, np.nan, falling(NUM))


def event(step: int, site: str, **details: Any) -> dict[str, Any]:
    known = {"site": site, "role": "output", "came_with_data": False, "micro_batch": 0, "value": "nan", "sites": [site]}
    return {"type": "nonfinite", "step": step, "details": {**known, **details}}


def only(window: Window) -> Finding:
    (finding,) = nan_inf(window)
    return finding


def seen(loss: Array, series: Mapping[str, object], *events: dict[str, Any]) -> Window:
    grads = {f"grad/{site}/nonfinite_fraction": 0.0 for site in ("0.weight", "2.weight")}
    return window(MODEL, loss, {**grads, **series}, {"events": list(events)})


def test_a_module_that_made_it_is_named_with_step_and_micro_batch() -> None:
    grads = {f"grad/{site}/nonfinite_fraction": from_step(12) for site in ("0.weight", "2.weight")}
    made = event(12, "1", after="0", micro_batch=3, sites=["1", "2"])
    finding = only(seen(bad_loss(12), {**grads, "act/0/max_abs": 2.0}, made, event(13, "0")))
    assert (finding.step, finding.sites, finding.severity) == (12, ("1",), "critical")
    assert "1 (Length) produced NaN from finite inputs" in finding.message
    assert "it then spread to 1 later module" in finding.message
    assert "micro-batch 3" in finding.message


def test_code_between_modules_is_distinguished_from_modules() -> None:
    finding = only(seen(bad_loss(12), {}, event(12, "2", role="input", after="1")))
    assert "between 1 and 2" in finding.message


def test_an_output_that_was_freed_makes_the_place_an_interval() -> None:
    made = event(12, "2", after="0", unknown=["1"], sites=["2"], micro_batch=3)
    finding = only(seen(bad_loss(12), {}, made))
    assert finding.sites == ("1", "2")
    assert "NaN appeared between 0 and 2 (micro-batch 3); the output of 1 was freed before the check" in finding.message
    assert "it then spread to 1 later module" in finding.message
    assert finding.remedy.startswith("Inspect 1 and 2.")
    assert finding.confidence < only(seen(bad_loss(12), {}, event(12, "2"))).confidence


def test_a_recorded_output_narrows_the_interval() -> None:
    made = event(12, "2", after="0", unknown=["1"], sites=["2"])
    finite = only(seen(bad_loss(12), {"act/1/nonfinite_fraction": 0.0}, made))
    assert finite.sites == ("2",)
    assert "produced NaN from finite inputs" in finite.message
    bad = only(seen(bad_loss(12), {"act/1/nonfinite_fraction": from_step(12)}, made))
    assert bad.sites == ("1",)
    assert "1 (Length) produced NaN from finite inputs" in bad.message


def test_the_only_module_that_can_have_made_it_is_named() -> None:
    made = event(12, "2", role="input", after="0", unknown=["1"], suspect="1", sites=["2"])
    finding = only(seen(bad_loss(12), {}, made))
    assert finding.sites == ("1",)
    assert "NaN appeared between 0 and 2, most likely in 1 (Length)" in finding.message


def test_what_came_with_the_data_is_not_blamed_on_a_module() -> None:
    finding = only(seen(bad_loss(5), {"custom/batch.0/nonfinite_fraction": from_step(5)}, event(5, "0")))
    assert "The inputs of the batch contained NaN or infinity" in finding.message
    assert "contained NaN or infinity" in only(seen(bad_loss(5), {}, event(5, "0", came_with_data=True))).message


def test_a_mask_of_infinities_that_was_always_there_is_not_the_cause() -> None:
    finding = only(seen(bad_loss(12), {"custom/batch.2/nonfinite_fraction": 0.5}, event(12, "1")))
    assert finding.sites == ("1",)


def test_targets_are_named() -> None:
    finding = only(seen(bad_loss(5), {"custom/batch.1/nonfinite_fraction": from_step(5)}, event(6, "0")))
    assert "The targets" in finding.message


def test_an_update_that_broke_with_sound_gradients_is_the_optimizers() -> None:
    finding = only(seen(bad_loss(8), {"update/0.weight/nonfinite_fraction": from_step(7)}, event(8, "0")))
    assert (finding.step, finding.sites) == (7, ("0.weight",))
    assert "SGD" in finding.message


def test_a_slope_that_is_infinite_is_placed_between_bad_and_sound_gradients() -> None:
    finding = only(seen(bad_loss(21), {"grad/0.weight/nonfinite_fraction": from_step(20)}, event(21, "0")))
    assert finding.step == 20
    assert finding.sites == ("1", "0.weight")


def test_a_loss_of_finite_outputs_is_blamed_on_the_loss() -> None:
    finding = only(seen(bad_loss(10), {"act/2/nan_fraction": 0.0, "act/2/max_abs": 1e25}))
    assert "The loss (cross_entropy)" in finding.message
    assert "already grown to 1e25 in 2" in finding.message


def test_outputs_are_called_finite_only_if_they_were_checked() -> None:
    rarer = {"type": "cadence", "step": 4, "details": {"stride": {"finite": 6.0}}}
    again = {"type": "cadence", "step": 9, "details": {"stride": {"finite": 1.0}}}
    assert "all outputs of the model were finite" in only(seen(bad_loss(12), {}, event(13, "0"))).message
    assert "outputs were not recorded at this step" in only(seen(bad_loss(12), {}, rarer, event(13, "0"))).message
    assert "outputs of the model were finite" in only(seen(bad_loss(12), {}, rarer, again, event(13, "0"))).message


def test_weights_that_were_loaded_nonfinite_are_distinguished_from_updates() -> None:
    finding = only(seen(bad_loss(0), {"param/0.weight/nonfinite_fraction": 0.1}, event(0, "0")))
    assert "loaded or initialised" in finding.message


def test_without_sight_of_the_forward_pass_it_is_said_how_little_is_known() -> None:
    grads = {f"grad/{site}/nonfinite_fraction": from_step(12) for site in ("0.weight", "2.weight")}
    finding = only(seen(bad_loss(12), grads))
    assert finding.confidence <= 0.5
    assert "activations=True" in finding.remedy


def test_one_bad_step_that_was_survived_is_a_warning() -> None:
    loss = falling(NUM)
    loss[10] = np.inf
    assert only(seen(loss, {"act/2/nan_fraction": 0.0})).severity == "warning"


def test_nan_that_stays_inside_is_a_remark() -> None:
    assert only(seen(falling(NUM), {}, event(3, "1"))).severity == "info"


def test_steps_that_a_grad_scaler_skipped_are_no_fault() -> None:
    overflow = np.where(np.arange(NUM) == 4, 1.0, 0.0)
    skipped = {"type": "skipped_step", "step": 4, "details": {}}
    assert not list(nan_inf(seen(falling(NUM), {"grad/0.weight/nonfinite_fraction": overflow}, skipped)))


def test_a_scaler_that_skips_for_ever_is_not_looking_for_its_scale() -> None:
    """The loss stays finite and no weight changes: the run looks healthy but learns nothing."""
    skipped = [{"type": "skipped_step", "step": step, "details": {}} for step in (2, 3, *range(15, NUM))]
    bad = np.where((np.arange(NUM) >= 15) | (np.arange(NUM) == 2), 1.0, 0.0)
    finding = only(seen(falling(NUM), {"grad/0.weight/nonfinite_fraction": bad}, *skipped))
    assert (finding.step, finding.severity) == (15, "critical")
    assert f"{NUM - 15} consecutive steps were skipped" in finding.message


def test_finite_runs_and_empty_windows_say_nothing() -> None:
    assert not list(nan_inf(seen(falling(NUM), {"act/1/max_abs": 3.0})))
    assert not list(nan_inf(Window()))
