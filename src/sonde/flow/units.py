"""Silent units and saturated values, by module, in one pass."""

from __future__ import annotations

from dataclasses import dataclass
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

    functions: Final = ("relu", "tanh", "sigmoid")
    """The calls of interest."""

    def __init__(self) -> None:
        self._silent: dict[str, list[Tensor]] = {}
        self._saturated: dict[str, list[Tensor]] = {}

    def module_called(self, place: ModuleRef, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(module, RECTIFIERS):
            self._rectified(place.name, output)
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
        if isinstance(module, (*RECTIFIERS, *SIGMOIDS)):
            return  # the module was already reported
        if name == "relu":
            self._rectified(place.name, out)
        elif name in ("tanh", "sigmoid"):
            self._squashed(place.name, given)

    def _rectified(self, name: str, out: Any) -> None:
        if is_plain_tensor(out) and out.ndim >= 2 and out.numel():
            channel = 1 if out.ndim >= 4 else out.ndim - 1
            if out.numel() // max(out.shape[channel], 1) >= MIN_ROWS:
                self._silent.setdefault(name, []).append(is_silent(out, channel))

    def _squashed(self, name: str, given: Any) -> None:
        if is_plain_tensor(given) and given.ndim and given.numel():
            self._saturated.setdefault(name, []).append(saturated(given))

    def together(self) -> Units:
        """By module, over all its calls: units that were zero for every sample, and values beyond ±5."""
        return Units(
            {name: torch.cat(masks).float().mean() for name, masks in self._silent.items()},
            {name: torch.stack(shares).mean() for name, shares in self._saturated.items()},
        )


@dataclass(frozen=True, slots=True)
class Units:
    """Fractions by module, still on their device."""

    silent: dict[str, Tensor]
    saturated: dict[str, Tensor]

    def shares(self) -> tuple[dict[str, float], dict[str, float]]:
        """The same as numbers. Waits for the device, once."""
        numbers = [share for (share,) in fetch([*self.silent.values(), *self.saturated.values()])]
        num = len(self.silent)
        return (
            dict(zip(self.silent, numbers[:num], strict=True)),
            dict(zip(self.saturated, numbers[num:], strict=True)),
        )
