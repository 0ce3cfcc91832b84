"""Forward passes since the last optimizer step whose purpose is not known yet.

A pass after an optimizer step may start the next step, or only evaluate the model (its accuracy, say) and belong to the
previous one. It starts the next step if gradients come back through its output, which a hook on the output detects.
Until an optimizer steps, measurements of each pass and values logged after it are held separately.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from torch import Tensor

MAX_PASSES: Final = 64
"""Maximum number of passes held. With more of them alive, the step counts as started."""
MAX_TARGETS: Final = 8
"""Passes held until it is known whether the pass before them is used, although no gradient can reach them any more."""
MAX_PARTS: Final = 8
"""Passes that a model called by its parts is divided into: a recurrent cell may be called very often."""
MAX_WAITING: Final = 1024
"""Records that may wait for their step."""


class Recorded(Protocol):
    """A watched model, as far as passes concern it."""

    def cut(self) -> Any:
        """The measurements since the last cut, removed from the step."""

    def keep(self, measured: Any) -> None:
        """Put a cut back into the step."""

    def retire(self, measured: Any) -> Any:
        """No gradient can reach the cut any more. Returns the part that may still belong to the step."""

    def drop(self, measured: Any) -> None:
        """The cut belongs to no step."""

    def restart(self) -> None:
        """Make once-per-step measurements in the pass that starts now."""


class Token:
    """A hook that notes that gradients came back. Only the graph holds it."""

    __slots__ = ("__weakref__", "_pass")
    __torch_unserializable__ = True  # otherwise saving the tensor it is attached to would warn

    def __init__(self, of: Pass) -> None:
        self._pass = of

    def __call__(self, grad: Tensor) -> None:
        self._pass.is_used = True


@dataclass(slots=True, eq=False)
class Pass:
    """One call of a model, or of some of its parts."""

    model: Recorded
    is_whole: bool
    """Whether the model itself was called."""
    is_open: bool = True
    is_used: bool = False
    """Whether gradients came back through its output."""
    is_unknown: bool = False
    """Whether this cannot be detected: inside a reentrant checkpoint, or for an unreadable output."""
    first: object = None
    """The part that was called first."""
    tokens: list[weakref.ref[Token]] = field(default_factory=list)
    measured: Any = None
    is_cut: bool = False

    @property
    def is_dead(self) -> bool:
        """Whether its graph is gone: no gradient can come back through it any more."""
        is_alive = not self.tokens or any(token() is not None for token in self.tokens)
        return not (is_alive or self.is_open or self.is_used or self.is_unknown)

    def follow(self, output: Any) -> None:
        """Detect gradients that come back through this output."""
        import torch

        from sonde.probe.guards import quiet
        from sonde.probe.outputs import floating_tensors

        is_grad_enabled = torch.is_grad_enabled()
        with quiet():
            found = floating_tensors(output)
            if not found or not is_grad_enabled or _is_autograd_compiled():
                return
            for tensor in [tensor for _, tensor in found if tensor.grad_fn is not None]:
                token = Token(self)
                tensor.register_hook(token)  # type: ignore[no-untyped-call]
                self.tokens.append(weakref.ref(token))
        self.is_unknown = False


@dataclass(slots=True)
class PassesOf:
    """The passes of one model, moved from one training thread to another."""

    all: list[Pass]
    retired: list[Pass]
    now: Pass | None


class Passes:
    """The passes of one sequence of steps, from one optimizer step to the next: which pass started, and which records
    wait for it."""

    def __init__(self) -> None:
        self._all: list[Pass] = []
        self._now: dict[int, Pass] = {}
        """By model: the current pass, or the last one."""
        self._retired: list[Pass] = []
        """Passes that no gradient can reach any more; the step may still need their measurements."""
        self._waiting: list[tuple[int, Callable[[int], object]]] = []
        """The number of passes that had started, and the callback that takes the step number."""
        self._is_certain = False
        """Whether the step has started; everything from now on belongs to it."""
        self._earlier: Callable[[bool], None] | None = None
        """Settles the passes made before these, see `hold`."""
        self._is_restarted = False

    def __len__(self) -> int:
        return len(self._all)

    # ---------------------------------------------------------------------------------------------------- tap callbacks

    def begin(self, model: Recorded, *, is_whole: bool) -> None:
        """Called when a forward pass of this model starts."""
        self._settle_earlier(are_for_step=False)
        if self._is_certain:
            return
        if any(one.is_used for one in self._all):
            self._is_certain = True
            return
        before = self._now.get(id(model))
        if before is not None:
            before.is_open = False
            self._cut(before)
        else:
            model.keep(model.cut())  # of the step that an optimizer is making
        self.forget_dead()
        if len(self._all) >= MAX_PASSES:
            self._is_certain = self._all[0].is_used = True
            return
        if before is not None:
            model.restart()
        self._now[id(model)] = one = Pass(model, is_whole, is_unknown=is_whole)
        self._all.append(one)

    def wants_part(self, model: Recorded) -> bool:
        """Whether the next call of a part of this model must be seen. Runs at every call: cheap."""
        if self._is_certain:
            return False
        now = self._now.get(id(model))
        return now is None or not now.is_open or (not now.is_whole and not now.tokens)

    def wants_again(self, model: Recorded, part: object) -> bool:
        """Whether a call of this part starts another pass, although no part is of interest. Runs at every call:
        cheap."""
        now = self._now.get(id(model))
        return now is not None and not now.is_whole and now.first is part and not self._is_certain

    def part_called(self, model: Recorded, part: object, output: Any) -> None:
        """Called when a part ran, within the model's own pass or by itself."""
        if self._is_certain:
            return
        now = self._now.get(id(model))
        is_again = now is not None and not now.is_whole and now.first is part and len(self._all) < MAX_PARTS
        if now is None or not now.is_open or is_again:
            self.begin(model, is_whole=False)
            now = self._now.get(id(model))
            if now is None or self._is_certain:
                return
            now.first = part
        if not now.is_whole and not now.tokens:
            now.follow(output)

    def ended(self, model: Recorded, output: Any) -> None:
        """Called with the output of the model itself."""
        if self._is_certain:
            return
        now = self._now.get(id(model))
        if now is None or not now.is_open:
            self.begin(model, is_whole=True)
            now = self._now.get(id(model))
            if now is None or self._is_certain:
                return
        now.is_whole, now.is_open, now.is_unknown = True, False, True
        now.follow(output)

    def leave(self, model: Recorded) -> PassesOf:
        """Remove the passes of this model: another thread counts its steps from now on."""
        mine = {id(one) for one in self._all if one.model is model}
        before = [sum(id(one) in mine for one in self._all[:index]) for index in range(len(self._all) + 1)]
        self._waiting = [(index - before[min(index, len(self._all))], put) for index, put in self._waiting]
        found = PassesOf(
            [one for one in self._all if id(one) in mine],
            [one for one in self._retired if one.model is model],
            self._now.pop(id(model), None),
        )
        self._all = [one for one in self._all if id(one) not in mine]
        self._retired = [one for one in self._retired if one.model is not model]
        return found

    def join(self, passes: PassesOf) -> None:
        self._all += passes.all
        self._retired += passes.retired
        if passes.now is not None:
            self._now[id(passes.now.model)] = passes.now

    def step_begun(self) -> None:
        """The user says that the step has started."""
        self._all.append(Pass(NOBODY, is_whole=True, is_open=False, is_used=True))
        self._is_certain = True

    # --------------------------------------------------------------------------------------------------------- settling

    @property
    def is_any_used(self) -> bool:
        return any(one.is_used for one in self._all)

    def is_used_by(self, model: Recorded) -> bool:
        return any(one.is_used and one.model is model for one in self._all)

    @property
    def are_known(self) -> bool:
        """Whether the purpose of all passes is known: gradients came back, or there are no passes."""
        return self.is_any_used or not (self._all or self._retired)

    @property
    def are_plain(self) -> bool:
        """Whether each pass was a whole pass for training, as far as this can be known."""
        return not self._retired and all(one.is_whole and (one.is_used or one.is_unknown) for one in self._all)

    def wait(self, put: Callable[[int], object]) -> bool:
        """Call `put` with the number of its step once that is known. False: no pass has started, so it is known."""
        for now in self._now.values():
            now.is_open = now.is_open and now.is_whole  # parts that are called after this are another pass
        self.forget_dead()
        if not self._all:
            return False
        self._waiting.append((len(self._all), put))
        return True

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= MAX_WAITING

    def forget_dead(self) -> None:
        """Passes that no gradient can reach any more only evaluated the model: nothing waits for them. One that follows
        a pass that is alive may have been its target, and belongs to the step if that one does."""
        place = 0
        while place < len(self._all) and not self._is_certain:
            if self._all[place].is_dead:
                self._retire(self._all.pop(place))
                self._waiting = [(index - (index > place), put) for index, put in self._waiting]
            elif len(self._all) > MAX_TARGETS:
                place += 1
            else:
                return

    def tell(self, before: int, step: int, *, first: int = 0) -> None:
        """Give waiting records their step: `step` after the pass that started it, the previous step before that."""
        self._settle_earlier(are_for_step=False)
        waiting, self._waiting = self._waiting, []
        for index, put in waiting:
            put(step if index > first else before)

    def cut(self) -> None:
        """Remove all measurements of passes from the step before it is passed on."""
        for one in self._all:
            self._cut(one)

    def hold(self, earlier: Passes, before: int, step: int) -> None:
        """Called when an optimizer starts a step with a closure, which will make these passes. If it makes none, the
        earlier ones are for the step: Lightning's closure does nothing if the user calls `backward`, and others do only
        that."""
        earlier.cut()
        for one in [*earlier._retired, *earlier._all]:
            one.model.restart()
        earlier._is_restarted = True
        self._earlier = lambda are_for_step: earlier.settle(before, step, are_for_step=are_for_step)

    def _settle_earlier(self, *, are_for_step: bool) -> None:
        earlier, self._earlier = self._earlier, None
        if earlier is not None:
            earlier(are_for_step)

    def settle(self, before: int, step: int, *, are_for_step: bool) -> None:
        """Called when an optimizer steps: give the step its measurements, and the previous step the values logged
        before it.

        If no gradient came back anywhere, all passes are for the step, or none is."""
        self._settle_earlier(are_for_step=are_for_step and not self._all)
        first = self._first(0 if are_for_step else len(self._all))
        try:
            self._give(first, are_for_step=are_for_step)
        finally:
            self.tell(before, step, first=first)

    def _first(self, default: int) -> int:
        """The position of the pass that started the step."""
        unknown = None
        for place, one in enumerate(self._all):
            if one.is_used:
                return place
            if one.is_unknown and unknown is None:
                unknown = place
        return default if unknown is None else unknown

    def _give(self, first: int, *, are_for_step: bool) -> None:
        """A model without any gradients was called for the others: a teacher, or a generator while its critic is
        trained."""
        trained = {id(one.model) for one in self._all if one.is_used}
        dropped: dict[int, Recorded] = {}
        for place, one in enumerate([*self._retired, *self._all], -len(self._retired)):
            is_kept = place >= first or (id(one.model) not in trained and (are_for_step or bool(trained)))
            if not is_kept:
                self._drop(one)
                dropped[id(one.model)] = one.model
            elif one.is_cut:
                one.model.keep(one.measured)
            one.measured, one.model = None, NOBODY  # a graph that is kept must not keep us alive too
        for model in dropped.values() if first == len(self._all) and not self._is_restarted else ():
            model.restart()

    def _retire(self, one: Pass) -> None:
        self._cut(one)
        one.measured = one.model.retire(one.measured)
        self._retired.append(one)
        if len(self._retired) > MAX_PASSES:
            self._drop(self._retired.pop(0))

    def _drop(self, one: Pass) -> None:
        self._cut(one)
        one.model.drop(one.measured)

    @staticmethod
    def _cut(one: Pass) -> None:
        if not one.is_cut:
            one.measured, one.is_cut = one.model.cut(), True


class _Nobody:
    """The model of a pass that was only announced, or is settled."""

    def cut(self) -> None: ...

    def keep(self, measured: Any) -> None: ...

    def retire(self, measured: Any) -> None: ...

    def drop(self, measured: Any) -> None: ...

    def restart(self) -> None: ...


NOBODY: Final = _Nobody()


def _is_autograd_compiled() -> bool:
    """Whether the compiler is tracing: it would compile our hook too."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "compiled_autograd_enabled", False))
