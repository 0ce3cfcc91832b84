"""Weights that look as if they had just been initialised: the size and shape of a random draw, before any training."""

from __future__ import annotations

from typing import Final

import numpy as np

from sonde.diagnose.measures.model import Parameter
from sonde.schema.window import Window

MIN_ELEMENTS: Final = 64
"""Fewer elements do not show how they are distributed."""
DEVIATIONS: Final = 4.0
"""Standard errors by which a sample may differ from its distribution; 6 in 100,000 draws differ by more."""
_GATES: Final = {"LSTM": 4, "GRU": 3, "RNN": 1}
SAMPLE: Final = 65_536
"""Number of elements of a large weight that were measured."""


def looks_fresh(window: Window, parameter: Parameter) -> bool:
    """Whether a frozen weight is distributed as one of torch's initialisations: uniform up to a bound that follows from
    its shape, or normal with such a standard deviation. Training moves a weight away from both at once."""
    rms, top = _first(window, parameter, "frozen_rms"), _first(window, parameter, "frozen_max")
    size = int(np.prod(parameter.shape))
    if size < MIN_ELEMENTS or not rms > 0 or not top > 0:
        return False
    size = min(size, SAMPLE)
    return _is_uniform(parameter, size, rms, top) or _is_normal(parameter, size, rms, top)


def starts_fresh(window: Window, parameter: Parameter) -> bool:
    """The same for a trained weight, of which only the root mean square is known at the first step."""
    values = window.get(f"param/{parameter.name}/rms")[1]
    size = int(np.prod(parameter.shape))
    if size < MIN_ELEMENTS or not len(values) or not values[0] > 0:
        return False
    rms, fan_in = float(values[0]), _fans(parameter)[0]
    uniform = any(abs(rms * np.sqrt(3) / bound - 1) < DEVIATIONS * 0.45 / np.sqrt(size) for bound in _bounds(parameter))
    # Without its largest element, a standard deviation of 1 over the root of the fan-in looks like any trained weight.
    known = (0.02, np.sqrt(2 / fan_in))
    return uniform or any(abs(rms / std - 1) < DEVIATIONS * 0.71 / np.sqrt(size) for std in known)


def _first(window: Window, parameter: Parameter, stat: str) -> float:
    values = window.get(f"unit/{parameter.name}/{stat}")[1]
    return float(values[0]) if len(values) else np.nan


def _is_uniform(parameter: Parameter, size: int, rms: float, top: float) -> bool:
    """The root mean square of n uniform draws has a relative standard error of 0.45 / sqrt(n); their largest is within
    about 10 / n of the bound."""
    error = DEVIATIONS * 0.45 / np.sqrt(size) + 0.01
    if abs(rms / top * np.sqrt(3) - 1) > error + 10 / size:
        return False
    return any(bound * (1 - 10 / size - 1e-3) <= top <= bound * (1 + 1e-3) for bound in _bounds(parameter))


def _bounds(parameter: Parameter) -> tuple[float, ...]:
    """The bounds of `nn.Linear` and `nn.Conv2d`, of recurrent layers, of kaiming_uniform_, and of xavier_uniform_ with
    and without a gain for tanh or ReLU."""
    fan_in, fan_out = _fans(parameter)
    gates = next((n for kind, n in _GATES.items() if parameter.module_type.startswith(kind)), 0)
    if gates:
        return (1 / np.sqrt(parameter.shape[0] / gates),)
    xavier = np.sqrt(6 / (fan_in + fan_out))
    return 1 / np.sqrt(fan_in), np.sqrt(6 / fan_in), np.sqrt(3 / fan_in), xavier, xavier * 5 / 3, xavier * np.sqrt(2)


def _is_normal(parameter: Parameter, size: int, rms: float, top: float) -> bool:
    """The same for normal draws: 0.71 / sqrt(n); the largest of n is near sqrt(2 ln n), within about 1."""
    if abs(top / rms - np.sqrt(2 * np.log(size))) > 1.2:
        return False
    fan_in, fan_out = _fans(parameter)
    known = (0.02, 1.0, np.sqrt(2 / fan_in), np.sqrt(1 / fan_in), np.sqrt(2 / fan_out), np.sqrt(2 / (fan_in + fan_out)))
    return any(abs(rms / std - 1) < DEVIATIONS * 0.71 / np.sqrt(size) for std in known)


def _fans(parameter: Parameter) -> tuple[int, int]:
    fan_in = max(parameter.fan_in or int(np.prod(parameter.shape[1:])), 1)
    return fan_in, max(int(np.prod(parameter.shape)) // fan_in, 1) * max(int(np.prod(parameter.shape[2:])), 1)
