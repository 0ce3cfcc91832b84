"""Kind `model`: training mode, graphs that stay alive, memory, and the direction and age of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sonde.budget.memory import gpu_mb, resident_mb
from sonde.probe.alive import GraphTokens
from sonde.probe.model import ModelNames
from sonde.probe.optimizer.tap import OptimizerStep
from sonde.probe.outputs import floating_tensors
from sonde.probe.structure import is_mode_dependent
from sonde.reduce.inspect.grads import GradientDirection
from sonde.session.inspect.units import Values


class WholeModelInspection:
    """Fills `values`; keeps a sample of the last gradient, and tokens by weak reference."""

    def __init__(self, names: ModelNames, warn_once: Callable[[str, str], None]) -> None:
        self.names, self._warn_once = names, warn_once
        self.site = names.prefix.rstrip(".") or "model"
        self._tokens = GraphTokens()
        self._directions: dict[int, tuple[int, GradientDirection]] = {}

    def forget(self) -> None:
        self._tokens.forget()
        self._directions.clear()

    def root_called(self, values: Values, output: Any, step: int) -> None:
        modules = [module for place in self.names.places.values() if (module := place.ref()) is not None]
        modes = [module.training for module in modules if is_mode_dependent(module)]
        if modes:
            values[f"model/{self.site}/eval_share"] = 1.0 - sum(modes) / len(modes)
        for _, tensor in floating_tensors(output)[:1]:
            self._tokens.mark(step, tensor)

    def finish(self, values: Values, step: int) -> None:
        alive, num = self._tokens.count(step)
        if num:
            values[f"model/{self.site}/alive"], values[f"model/{self.site}/alive_of"] = alive, num
        try:
            values[f"model/{self.site}/rss_mb"] = resident_mb()
        except OSError as error:  # no file can be opened, or /proc does not exist
            self._warn_once("resident memory", f"cannot read the memory use of this process: {error}.")
        model = self.names.model()
        parameter = next(model.parameters(), None) if model is not None else None
        on_gpu = gpu_mb(parameter.device) if parameter is not None else None
        if on_gpu is not None:
            values[f"model/{self.site}/gpu_mb"] = on_gpu

    def skip_gradients(self) -> None:
        for _, direction in self._directions.values():
            direction.forget()

    def gradients(self, step: OptimizerStep) -> Values:
        """Values that compare this step with the one before."""
        groups = step.optimizer.param_groups
        num = sum(len(group["params"]) for group in groups)
        known, direction = self._directions.get(step.number) or (-1, GradientDirection())
        if known != num:
            direction.choose([p for group in groups for p in group["params"]])
            self._directions[step.number] = num, direction
        cosine, is_kept = direction.compare()
        site = f"{self.site}:{step.number}" if step.number else self.site
        values: Values = {}
        if isinstance(cosine, Tensor):
            values[f"model/{site}/grad_cosine"] = cosine
        if is_kept is not None:
            values[f"model/{site}/grad_kept"] = float(is_kept)
        return values
