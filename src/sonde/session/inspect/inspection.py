"""Inspections of one watched model: hands what the taps see to those who measure it, and their numbers to the session.

At an inspected step one forward pass is looked at: the first, or of several before the first backward pass the last.
Numbers stay on their device until the writer fetches them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import nn

from sonde.probe.compiled import has_compiled_parts, num_compiled_frames
from sonde.probe.loss.functional import CallTap
from sonde.probe.model import ModelNames, ModuleRef
from sonde.probe.optimizer.tap import OptimizerStep
from sonde.session.inspect.attention import AttentionInspection
from sonde.session.inspect.model import WholeModelInspection
from sonde.session.inspect.paths import PathInspection
from sonde.session.inspect.recurrence import RecurrenceInspection
from sonde.session.inspect.rotation import RoundRobin
from sonde.session.inspect.units import RARELY, UnitInspection, Values

_MAX_ATTENTIONS: Final = 12
"""Attentions looked at in one inspection; a deep model's take turns."""
_MAX_SITES: Final = 8
"""Function calls of one kind in one module that are told apart."""


class Inspection:
    """Called by `WatchedModel` only, inside its protection and its clock."""

    def __init__(
        self,
        names: ModelNames,
        warn_once: Callable[[str, str], None],
        on_error: Callable[[str, Exception], None],
    ) -> None:
        self.names = names
        self.calls: dict[str, tuple[int, int]] = {}
        """name -> (order of its first call, calls) in the first inspected forward pass."""
        self.num_trainable = 0
        self._functions = CallTap(names, self, on_error)
        self._units = UnitInspection(names)
        self._attention = AttentionInspection()
        self._recurrence = RecurrenceInspection(on_error)
        self._model = WholeModelInspection(names, warn_once)
        self.paths = PathInspection()
        self._attentions = RoundRobin(_MAX_ATTENTIONS)
        self._values: Values = {}
        self._num_calls: dict[str, int] = {}
        self._num_functions: dict[tuple[str, str], int] = {}
        self._num_inspections = -1
        self._is_wanted = self._is_forward_over = self._is_finished = False
        self._may_replace: bool | None = None

    @property
    def is_rare(self) -> bool:
        return self._num_inspections % RARELY == 0

    def begin_step(self, *, is_wanted: bool) -> None:
        self._is_wanted, self._may_replace = is_wanted, None
        self._num_inspections += is_wanted
        self.restart()

    def restart(self) -> None:
        """Look at the pass that begins now; what was seen so far of this step was no part of it."""
        self._functions.close()
        self._is_forward_over = self._is_finished = False
        if self._is_wanted:
            self._values = {}
            self._num_calls.clear()
            self._num_functions.clear()
            self._units.begin(self._num_inspections)
            for part in (self._attention, self._recurrence, self.paths):
                part.begin()

    def detach(self) -> None:
        self._functions.close()
        self._model.forget()
        self._values = {}

    # -------------------------------------------------------------------------------------------- what the taps see

    def forward_begins(self) -> None:
        """Before the first module runs: `F.relu(self.first(x))` looks `relu` up before it calls `first`."""
        if not self._is_forward_over and self._is_replacing_safe():
            self._functions.open()

    def module_called(self, place: ModuleRef, module: nn.Module, args: Any, output: Any, step: int) -> None:
        """At the end of every module's call, children before parents."""
        is_root = place.ref() is self.names.model()
        if not self._is_forward_over:
            self._first_forward(place, module, args, output, is_root)
        if is_root:
            self._functions.close()
            self._model.root_called(self._values, output, step)

    def _first_forward(self, place: ModuleRef, module: nn.Module, args: Any, output: Any, is_root: bool) -> None:
        call = self._num_calls.get(place.name, 0)
        self._num_calls[place.name] = call + 1
        for key in [key for key in self._num_functions if key[0] == place.name]:
            self._num_functions.pop(key, None)  # the next call of this module counts anew
        if place.is_selected:
            if is_root or not module._modules:
                self._units.module_called(self._values, place, module, args, output, call)
            if not is_root:
                self.paths.module_called(self._values, place, module, args, output, call)
            if isinstance(module, nn.RNNBase):
                if self.is_rare and not call:
                    self._recurrence.layer_called(self._values, place, module, args)
            elif not is_root:
                self._recurrence.cell_called(place, module, args, output, call)
        if is_root:
            self._forward_ended(output)

    def _forward_ended(self, output: Any) -> None:
        self._attention.root_called(self._values, output)
        self._recurrence.forward_ended()
        self.paths.forward_ended(output)
        if not self.calls:
            self.calls = {name: (order, calls) for order, (name, calls) in enumerate(self._num_calls.items())}
        self._is_forward_over = True

    def function_called(
        self, name: str, place: ModuleRef, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        if self._is_forward_over or self._num_calls.get(place.name, 0):
            return  # a module called again: its first call is the one that is looked at
        key = (place.name, name)
        number = self._num_functions.get(key, 0)
        self._num_functions[key] = number + 1
        if number >= _MAX_SITES:
            return
        site = f"{place.name}:{name}.{number}" if number else place.name
        if name in ("softmax", "attention"):
            if not self._attentions.is_due(site, self._num_inspections):
                return
            if name == "softmax":
                self._attention.softmax_called(self._values, place, site, args, kwargs, out)
            else:
                self._attention.fused_called(self._values, place, site, args, kwargs)
        else:
            argument = args[0] if args else kwargs.get("input")
            self._units.function_called(self._values, name, place, site, argument, out)

    def _is_replacing_safe(self) -> bool:
        """Code compiled while torch has our functions, or while it has not, would be compiled again for the other."""
        if self._may_replace is None:
            model = self.names.model()
            self._may_replace = model is not None and not num_compiled_frames() and not has_compiled_parts(model)
        return self._may_replace

    # --------------------------------------------------------------------------------------------------- the step

    def gradients(self, step: OptimizerStep) -> Values:
        """Numbers of every step, inspected or not."""
        return self._model.gradients(step)

    def before_update(self, step: int) -> None:
        """Parameters are still what the forward pass saw, and gradients have passed."""
        if not self._is_wanted or self._is_finished:
            return
        self._is_finished = True
        self._functions.close()
        self._recurrence.finish(self._values)
        self.num_trainable = sum(p.requires_grad for n in self.names.parameters.values() if (p := n.ref()) is not None)
        self._units.weights(self._values, is_rare=self.is_rare)
        self._model.finish(self._values, step)

    def take(self) -> Values:
        """The numbers of the step, which is over."""
        if not self._is_wanted:
            return {}
        values, self._values = self._values, {}
        return dict(values)  # a copy: two threads may be in one model
