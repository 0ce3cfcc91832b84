"""Inspections of one watched model: passes what the taps see to the measuring code, and its numbers to the session.

An inspected step inspects one forward pass: the first or, if there are several before the first backward pass, the last
of these. Numbers stay on their device until the writer fetches them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import nn

from sonde.probe.compiled import has_compiled_parts, num_compiled_frames
from sonde.probe.loss.functional import ACTIVATIONS, CallTap
from sonde.probe.model import ModelNames, ModuleRef
from sonde.probe.optimizer.tap import OptimizerStep
from sonde.session.inspect.attention import AttentionInspection
from sonde.session.inspect.model import WholeModelInspection
from sonde.session.inspect.paths import PathInspection
from sonde.session.inspect.recurrence import RecurrenceInspection
from sonde.session.inspect.rotation import RoundRobin
from sonde.session.inspect.units import RARELY, UnitInspection, Values

_MAX_ATTENTIONS: Final = 12
"""Attention layers checked in one inspection; those of a deep model take turns."""
_MAX_SITES: Final = 8
"""Function calls of one kind in one module that are recorded separately."""


class Inspection:
    """Called by `WatchedModel` only, inside its error guard and its clock."""

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
        self._functions = CallTap(names, self, on_error, only=ACTIVATIONS)
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
        self._part = 0, 1

    @property
    def is_first_part(self) -> bool:
        """Whether what belongs to no module is inspected in this step."""
        return self._part[0] == 0 or self._num_inspections < 0

    @property
    def is_rare(self) -> bool:
        return self._num_inspections % RARELY == 0

    def begin_step(self, *, is_wanted: bool, part: tuple[int, int] = (0, 1)) -> None:
        """`part`: (number, parts). An inspection in parts checks some of the modules at each step, in turn."""
        self._is_wanted, self._may_replace, self._part = is_wanted, None, part
        self._num_inspections += is_wanted and self.is_first_part
        self.restart()

    def restart(self) -> None:
        """Inspect the pass that starts now; earlier observations did not belong to this step."""
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

    # ---------------------------------------------------------------------------------------------------- tap callbacks

    def forward_begins(self) -> None:
        """Called before the first module runs: `F.relu(self.first(x))` looks `relu` up before it calls `first`."""
        if not self._is_forward_over and self._is_replacing_safe():
            self._functions.open()

    def module_called(self, place: ModuleRef, module: nn.Module, args: Any, output: Any, step: int) -> None:
        """Called at the end of every module call, children before parents."""
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
            self._num_functions.pop(key, None)  # the next call of this module starts a new count
        if place.is_selected:
            if is_root or not module._modules:
                self._units.pass_through(module)
            if place.is_in(self._part):
                self._inspect(place, module, args, output, call, is_root)
        if is_root:
            self._forward_ended(output)

    def _inspect(self, place: ModuleRef, module: nn.Module, args: Any, output: Any, call: int, is_root: bool) -> None:
        if is_root or not module._modules:
            self._units.module_called(self._values, place, module, args, output, call)
        if not is_root:
            self.paths.module_called(self._values, place, module, args, output, call)
        if isinstance(module, nn.RNNBase):
            if self.is_rare and not call:
                self._recurrence.layer_called(self._values, place, module, args)
        elif not is_root:
            self._recurrence.cell_called(place, module, args, output, call)

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
        if self._is_forward_over or self._num_calls.get(place.name, 0) or not place.is_in(self._part):
            return  # a module called again: only its first call is inspected
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
        """Code compiled with our functions installed in torch would be recompiled without them, and vice versa."""
        if self._may_replace is None:
            model = self.names.model()
            self._may_replace = model is not None and not num_compiled_frames() and not has_compiled_parts(model)
        return self._may_replace

    # ------------------------------------------------------------------------------------------------------------- step

    def gradients(self, step: OptimizerStep) -> Values:
        """Numbers that are compared with those of the step before, inspected or not."""
        return self._model.gradients(step)

    def skip_gradients(self) -> None:
        """The gradients of this step are not seen: those of the next one have nothing to be compared with."""
        self._model.skip_gradients()

    def before_update(self, step: int) -> None:
        """Called when the backward pass is done and parameters are unchanged since the forward pass."""
        if not self._is_wanted or self._is_finished:
            return
        self._is_finished = True
        self._functions.close()
        self._recurrence.finish(self._values)
        self.num_trainable = sum(p.requires_grad for n in self.names.parameters.values() if (p := n.ref()) is not None)
        self._units.weights(self._values, self._part, is_rare=self.is_rare)
        if self.is_first_part:
            self._model.finish(self._values, step)

    def take(self) -> Values:
        """The numbers of the step that has just ended."""
        if not self._is_wanted:
            return {}
        values, self._values = self._values, {}
        return dict(values)  # a copy: two threads may be in one model
