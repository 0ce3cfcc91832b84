"""The published rule sets and W&B's `diagnose_run` on the same recorded runs, with their authors' thresholds.

They are re-implementations: the thresholds are theirs, the measurements sonde's, and their labels are translated to the
names of our rules. Rules that need what these runs do not have (an accuracy per epoch, an interactive session) are left
out; each is marked where that happens. Every function takes a window and returns names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from sonde.diagnose.measures.loss import loss_name, validation
from sonde.diagnose.measures.model import structure
from sonde.schema.window import Window

NEEDS: Final = (
    "grad/*/norm", "grad/*/abs_mean", "grad/*/zero_fraction", "grad/*/nonfinite_fraction", "param/*/std",
    "param/*/norm", "param/*/nonfinite_fraction",
    "update/*/ratio", "update/*/norm", "act/*/zero_fraction", "act/*/nonfinite_fraction",
    "act/*/rms", "act/*/max_abs", "unit/*/*", "data/*/*",
)  # fmt: skip


def _values(window: Window, pattern: str) -> list[Any]:
    return [values for _, _, values in window.by_site(pattern) if len(values)]


def _loss(window: Window) -> Any:
    name = loss_name(window)
    return window.get(name)[1] if name else np.empty(0)


def _is_nan(window: Window) -> bool:
    patterns = ("grad/*/nonfinite_fraction", "param/*/nonfinite_fraction", "act/*/nonfinite_fraction")
    return any((v > 0).any() for p in patterns for v in _values(window, p)) or not np.isfinite(_loss(window)).all()


def _medians(window: Window, pattern: str) -> list[float]:
    return [float(np.nanmedian(v)) for v in _values(window, pattern) if np.isfinite(v).any()]


def _matrices(window: Window, stat: str) -> list[float]:
    """Medians over time of a stat of the weight matrices, in the order of the model."""
    names = {p.name for p in structure(window).matrices}
    kind, _, stat = stat.partition("/")
    found = [v for site, _, v in window.by_site(f"{kind}/*/{stat}") if site in names and np.isfinite(v).any()]
    return [float(np.nanmedian(v)) for v in found]


def _input_range(window: Window) -> float:
    return max(
        [float(np.nanmax(v)) for v in _values(window, "data/input/abs_max") if np.isfinite(v).any()], default=0.0
    )


def _rate(window: Window) -> float:
    _, rates = window.get("optim/lr")
    return float(rates[0]) if len(rates) else np.nan


def autotrainer(window: Window) -> set[str]:
    """Zhang et al. 2021. Its checks of the accuracy are applied to the loss: stuck above 0.9 of its start."""
    found, loss = set(), _loss(window)
    is_poor = len(loss) > 5 and not np.nanmedian(loss[-5:]) < 0.7 * loss[0]
    norms = _matrices(window, "grad/norm")
    if is_poor and len(norms) > 1 and norms[-1] > 0 and norms[0] / norms[-1] < 1e-3 and norms[0] < 1e-4:
        found.add("vanishing_gradients")
    if is_poor and (_is_nan(window) or (len(norms) > 1 and norms[-1] > 0 and norms[0] / norms[-1] > 70)):
        found |= {"exploding_gradients", "nan_inf"} if _is_nan(window) else {"exploding_gradients"}
    zeros = _medians(window, "grad/*/zero_fraction")
    if is_poor and zeros and max(zeros) >= 0.7:
        found.add("dead_relu")
    if is_poor and not found and len(loss) > 20 and np.isfinite(loss).all():
        swings = np.abs(np.diff(np.sign(np.diff(loss)))) > 0
        large = np.abs(np.diff(loss)) > 0.03 * abs(loss[0])
        found |= {"loss_oscillation"} if (swings & large[1:]).mean() >= 0.2 else {"lr_too_low", "underfitting"}
    return found


def deepdiagnosis(window: Window) -> set[str]:
    """Wardat et al. 2022."""
    found, loss = set(), _loss(window)
    if _is_nan(window):
        found.add("nan_inf")
    if any(v < 1e-7 for v in _medians(window, "grad/*/abs_mean")):
        found.add("vanishing_gradients")
    if any(v >= 0.7 for v in _medians(window, "act/*/zero_fraction")):
        found.add("dead_relu")
    if any(v > 0.5 for v in _medians(window, "unit/*/saturated")):
        found.add("saturated_activations")
    if any(v**2 > 10 or v**2 < 1e-5 for v in (_first(v) for v in _values(window, "param/*/std"))):
        found.add("init_scale")
    ratios = _matrices(window, "update/ratio")
    if ratios and max(ratios) > 0.1:
        found.add("lr_too_high")
    if ratios and max(ratios) < 1e-5:
        found.add("lr_too_low")
    if _input_range(window) > 1:
        found.add("unnormalised_inputs")
    if len(loss) > 10 and not np.nanmedian(loss[-5:]) < loss[0]:
        found.add("underfitting")
    return found


def _first(values: Any) -> float:
    return float(values[0]) if np.isfinite(values[0]) else 0.1


def deeplocalize(window: Window) -> set[str]:
    """Wardat et al. 2021: NaN or zero in values, gradients or weights, or a loss that does not improve."""
    found, loss = set(), _loss(window)
    if _is_nan(window):
        found.add("nan_inf")
    if any(v >= 1.0 for v in _medians(window, "act/*/zero_fraction")):
        found.add("dead_relu")
    if any(v == 0.0 for v in _medians(window, "grad/*/norm")):
        found.add("vanishing_gradients")
    if any(v == 0.0 for v in _medians(window, "update/*/norm")):
        found.add("lr_too_low")
    if len(loss) > 10 and not np.nanmean(loss[len(loss) // 2 :]) < np.nanmean(loss[: len(loss) // 2]):
        found |= {"lr_too_high", "underfitting"}
    return found


def umlaut(window: Window) -> set[str]:
    """Schoop et al. 2021. Its checks of the source (softmax missing, image shape) are left out."""
    found, loss = set(), _loss(window)
    if _is_nan(window):
        found.add("nan_inf")
    if _input_range(window) > 1:
        found.add("unnormalised_inputs")
    rate = _rate(window)
    found |= {"lr_too_high"} if rate > 0.01 else {"lr_too_low"} if rate < 1e-7 else set()
    _, held = validation(window)
    if len(held) > 2 and len(loss) and held[-1] > held[-2] and held[-1] > np.nanmin(held):
        found.add("overfitting")
    return found


def sagemaker(window: Window) -> set[str]:
    """SageMaker Debugger's built-in rules with their documented defaults."""
    found, loss = set(), _loss(window)
    if any(v < 1e-7 for v in _medians(window, "grad/*/abs_mean")):
        found.add("vanishing_gradients")
    if _is_nan(window):
        found |= {"exploding_gradients", "nan_inf"}
    if any(v > 0.5 for v in _medians(window, "unit/*/dead")):
        found.add("dead_relu")
    if any(v > 0.5 for v in _medians(window, "unit/*/saturated")):
        found.add("saturated_activations")
    ratios = _matrices(window, "update/ratio")
    if ratios and max(ratios) > 10:
        found.add("lr_too_high")
    if ratios and max(ratios) < 1e-8:
        found.add("lr_too_low")
    if any(v == 0.0 for v in _medians(window, "update/*/norm")):
        found |= {"frozen_layers", "optimizer_missing_params"}
    if len(loss) > 20:
        tail = loss[-10:]
        if not np.nanmean(tail[5:]) < 0.999 * np.nanmean(tail[:5]):
            found.add("underfitting")
    _, held = validation(window)
    if len(held) and len(loss) and (held[-1] - loss[-1]) / max(loss[-1], 1e-12) > 0.1:
        found.add("overfitting")
    return found


def fixed_thresholds(window: Window) -> set[str]:
    """The absolute thresholds that tutorials give: a norm below 0.01 vanishes, above 100 explodes."""
    found, loss = set(), _loss(window)
    norms = _medians(window, "grad/*/norm")
    if norms and min(norms) < 0.01:
        found.add("vanishing_gradients")
    if norms and max(norms) > 100:
        found.add("exploding_gradients")
    if _is_nan(window):
        found.add("nan_inf")
    if len(loss) > 12:
        before = np.array([np.nanmean(loss[i - 10 : i]) for i in range(10, len(loss))])
        spread = np.array([np.nanstd(loss[i - 10 : i]) for i in range(10, len(loss))])
        if (np.abs(loss[10:] - before) > 5 * np.maximum(spread, 1e-12)).any():
            found.add("loss_spikes")
    return found


def wandb_diagnose_run(window: Window) -> set[str]:
    """W&B's `diagnose_run`: trends from the means of the two halves of what was logged, 5 % apart.

    Its verdict "converged" does not count as an alarm. It sees only what the user logged.
    """
    logged = Window(scalars={k: v for k, v in window.scalars.items() if not k.startswith(("system/", "optim/"))})
    loss, (_, held) = _loss(logged), validation(logged)
    found = set()
    if len(loss) and not (np.isfinite(loss).all() and np.isfinite(held).all()):
        found.add("nan_inf")
    finite, held = loss[np.isfinite(loss)], held[np.isfinite(held)]
    if _trend(finite) == "increasing":
        found |= {"loss_divergence", "lr_too_high"}
    if (
        len(finite) >= 10
        and len(held) >= 10
        and _trend(finite) == "decreasing"
        and _trend(held) in ("increasing", "plateaued")
    ):
        found.add("overfitting")
    return found


def _trend(values: Any) -> str:
    if len(values) < 10:
        return "insufficient_data"
    first, second = values[: len(values) // 2].mean(), values[len(values) // 2 :].mean()
    tail = values[-max(1, len(values) // 10) :].mean()
    if second < 0.95 * first:
        return "plateaued" if abs(tail - second) / max(abs(second), 1e-8) < 0.05 else "decreasing"
    return "increasing" if second > 1.05 * first else "plateaued"


RULE_SETS: Final[dict[str, Callable[[Window], set[str]]]] = {
    "AUTOTRAINER": autotrainer,
    "DeepDiagnosis": deepdiagnosis,
    "DeepLocalize": deeplocalize,
    "UMLAUT": umlaut,
    "SageMaker Debugger": sagemaker,
    "fixed thresholds": fixed_thresholds,
    "W&B diagnose_run": wandb_diagnose_run,
}
