"""Silent units and saturated values, by module, in one pass."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor, nn

from sonde.flow.fetch import fetch
from sonde.probe.model import ModuleRef
from sonde.probe.outputs import is_plain_tensor
from sonde.reduce.inspect.units import is_silent, saturated

RECTIFIERS: Final = (nn.ReLU, nn.ReLU6, nn.Threshold)
SIGMOIDS: Final = (nn.Sigmoid, nn.Tanh)
CLIPPED: Final = (nn.Hardtanh, nn.Hardsigmoid)
WATCHED: Final = (*RECTIFIERS, *SIGMOIDS, *CLIPPED)
"""The modules whose calls are checked."""
MIN_ROWS: Final = 8
"""With fewer samples, a healthy unit may be silent for all of them by chance."""


class UnitWatch:
    """Collects while a forward pass runs; numbers stay on their device until they are needed."""

    functions: Final = ("relu", "clamp", "tanh", "sigmoid", "detach")
    """The calls of interest."""

    def __init__(self) -> None:
        self.producers: dict[Any, str] = {}
        """The module that computed a tensor, by the tensor's node."""
        self.detached: list[Any] = []
        """The nodes of tensors that were detached."""
        self._silent: dict[str, dict[_Call, list[Tensor]]] = {}
        self._saturated: dict[str, list[Tensor]] = {}

    def module_called(self, place: ModuleRef, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(module, RECTIFIERS):
            self._rectified(place.name, self._call(args[0] if args else None), output)
        elif isinstance(module, SIGMOIDS) and args:
            self._squashed(place.name, args[0])
        elif isinstance(module, CLIPPED) and is_plain_tensor(output) and output.numel():
            at_an_end = (output == output.amin()) | (output == output.amax())
            self._saturated.setdefault(place.name, []).append(at_an_end.float().mean())

    def function_called(
        self, name: str, place: ModuleRef, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        module = place.ref()
        given = args[0] if args else kwargs.get("input")
        if name == "detach":
            self.detached.append(getattr(given, "grad_fn", None))
        elif isinstance(module, (*RECTIFIERS, *SIGMOIDS, *CLIPPED)):
            return  # the module was already reported
        elif name == "relu" or (name == "clamp" and _is_rectifier(args[1:], kwargs)):
            self._rectified(place.name, self._call(given) or _line_in(module), out)
        elif name in ("tanh", "sigmoid"):
            self._squashed(place.name, given)

    def _call(self, given: Any) -> _Call | None:
        """Named after the layer whose output is rectified."""
        name = self.producers.get(getattr(given, "grad_fn", None))
        return _Call(f"after {name}") if name is not None else None

    def _rectified(self, name: str, call: _Call | None, out: Any) -> None:
        if is_plain_tensor(out) and out.ndim >= 2 and out.numel():
            channel = 1 if out.ndim >= 4 else out.ndim - 1
            if out.numel() // max(out.shape[channel], 1) >= MIN_ROWS:
                calls = self._silent.setdefault(name, {})
                calls.setdefault(call or _Call(""), []).append(is_silent(out, channel))

    def _squashed(self, name: str, given: Any) -> None:
        if is_plain_tensor(given) and given.ndim and given.numel():
            self._saturated.setdefault(name, []).append(saturated(given))

    def together(self) -> Units:
        """By module: units of a call that were zero for every sample, and values beyond ±5 over all its calls."""
        return Units(
            {
                (name, call): _silent_share(masks)
                for name, calls in self._silent.items()
                for call, masks in calls.items()
            },
            {name: torch.stack(shares).mean() for name, shares in self._saturated.items()},
        )


@dataclass(frozen=True, slots=True)
class _Call:
    """A place in the code where a module calls a rectifier, or the layer whose output it rectifies."""

    where: str
    position: tuple[object, int] | None = None


def _line_in(module: nn.Module | None) -> _Call | None:
    """The line of the module's code that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_locals.get("self") is module:
            return _Call(f"in line {frame.f_lineno}", (frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return None


def _is_rectifier(limits: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Whether a clamp with these limits sets everything negative to zero, as ReLU does."""
    low = limits[0] if limits else named.get("min")
    high = limits[1] if len(limits) > 1 else named.get("max")
    return isinstance(low, int | float) and low == 0 and (high is None or (isinstance(high, int | float) and high > 0))


def _silent_share(masks: list[Tensor]) -> Tensor:
    """Fraction of units. Those called several times, as in a loop over time, are silent if they always are."""
    if all(mask.shape == masks[0].shape for mask in masks):
        return torch.stack(masks).all(0).float().mean()
    return torch.cat(masks).float().mean()


@dataclass(frozen=True, slots=True)
class Units:
    """Fractions by module, and by call for silent units, still on their device."""

    silent: dict[tuple[str, _Call], Tensor]
    saturated: dict[str, Tensor]

    def shares(self) -> tuple[dict[str, tuple[float, str]], dict[str, float]]:
        """The same as numbers: of a module's calls, the one with most silent units, and where it is. Waits for the
        device, once."""
        numbers = [share for (share,) in fetch([*self.silent.values(), *self.saturated.values()])]
        silent: dict[str, tuple[float, str]] = {}
        for (name, call), share in zip(self.silent, numbers, strict=False):
            if name not in silent or share > silent[name][0]:
                silent[name] = share, call.where
        return silent, dict(zip(self.saturated, numbers[len(self.silent) :], strict=True))
