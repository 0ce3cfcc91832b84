"""Forward passes since an optimizer last stepped, while it is not known what they are for.

A pass after an optimizer step may begin the next step, or be a look at the model (its accuracy, say) that belongs to
the step before. It begins the next step if gradients come back through its output: a hook on the output tells. Until an
optimizer steps, what was measured in each pass and what was logged after it is held apart.
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
"""Passes of which something is held. With more of them alive, the step is taken to have begun."""
MAX_TARGETS: Final = 8
"""Passes held until it is known whether the one before them is used, though no gradient can reach them any more."""
MAX_PARTS: Final = 8
"""Passes that a model called by its parts is divided into: a cell of a recurrent network may be called very often."""
MAX_WAITING: Final = 1024
"""Records that wait for their step."""


class Recorded(Protocol):
    """A watched model, as far as passes concern it."""

    def cut(self) -> Any:
        """What was measured since the last cut, taken out of the step."""

    def keep(self, measured: Any) -> None:
        """Put into the step what was cut."""

    def retire(self, measured: Any) -> Any:
        """No gradient can reach what was cut any more. What of it may still belong to the step."""

    def drop(self, measured: Any) -> None:
        """What was cut belongs to no step."""

    def restart(self) -> None:
        """What is measured in one pass of a step is measured in the pass that begins now."""


class Token:
    """A hook that notes that gradients came back. The graph holds it; nobody else does."""

    __slots__ = ("__weakref__", "_pass")
    __torch_unserializable__ = True  # or saving the tensor it hangs on would warn

    def __init__(self, of: Pass) -> None:
        self._pass = of

    def __call__(self, grad: Tensor) -> None:
        self._pass.is_used = True


@dataclass(slots=True, eq=False)
class Pass:
    """One call of a model, or of some of its parts."""

    model: Recorded
    is_whole: bool
    """The model itself was called."""
    is_open: bool = True
    is_used: bool = False
    """Gradients came back through its output."""
    is_unknown: bool = False
    """It cannot be told whether they do: inside a reentrant checkpoint, or of an output that cannot be read."""
    first: object = None
    """The part that was called first."""
    tokens: list[weakref.ref[Token]] = field(default_factory=list)
    measured: Any = None
    is_cut: bool = False

    @property
    def is_dead(self) -> bool:
        """Its graph is gone: no gradient can come back through it any more."""
        is_alive = not self.tokens or any(token() is not None for token in self.tokens)
        return not (is_alive or self.is_open or self.is_used or self.is_unknown)

    def follow(self, output: Any) -> None:
        """Be told when gradients come back through this output."""
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
    """Of one line of steps, from one optimizer step to the next. Knows which pass began, and what waits for which."""

    def __init__(self) -> None:
        self._all: list[Pass] = []
        self._now: dict[int, Pass] = {}
        """By model: the one that is being made, or was made last."""
        self._retired: list[Pass] = []
        """Passes that no gradient can reach any more; what they measured may be of use to the step all the same."""
        self._waiting: list[tuple[int, Callable[[int], object]]] = []
        """How many passes had begun, and what takes the number of the step."""
        self._is_certain = False
        """The step has begun; what comes from now on is a part of it."""
        self._earlier: Callable[[bool], None] | None = None
        """Settles the passes made before these, see `hold`."""
        self._is_restarted = False

    def __len__(self) -> int:
        return len(self._all)

    # -------------------------------------------------------------------------------------------- what the taps see

    def begin(self, model: Recorded, *, is_whole: bool) -> None:
        """A forward pass of this model begins."""
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
            model.keep(model.cut())  # of the step that an optimizer has been making
        self.forget_dead()
        if len(self._all) >= MAX_PASSES:
            self._is_certain = self._all[0].is_used = True
            return
        if before is not None:
            model.restart()
        self._now[id(model)] = one = Pass(model, is_whole, is_unknown=is_whole)
        self._all.append(one)

    def wants_part(self, model: Recorded) -> bool:
        """Whether the next call of a part of this model must be seen. Asked at every call: cheap."""
        if self._is_certain:
            return False
        now = self._now.get(id(model))
        return now is None or not now.is_open or (not now.is_whole and not now.tokens)

    def wants_again(self, model: Recorded, part: object) -> bool:
        """Whether a call of this part, though no part's is wanted, begins another pass. Asked at every call: cheap."""
        now = self._now.get(id(model))
        return now is not None and not now.is_whole and now.first is part and not self._is_certain

    def part_called(self, model: Recorded, part: object, output: Any) -> None:
        """A part ran, within the model's own pass or by itself."""
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
        """The model itself has returned this."""
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
        """Take the passes of this model out: another thread counts its steps from now on."""
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
        """The user says so."""
        self._all.append(Pass(NOBODY, is_whole=True, is_open=False, is_used=True))
        self._is_certain = True

    # ---------------------------------------------------------------------------------------------- what it comes to

    @property
    def is_any_used(self) -> bool:
        return any(one.is_used for one in self._all)

    def is_used_by(self, model: Recorded) -> bool:
        return any(one.is_used and one.model is model for one in self._all)

    @property
    def are_known(self) -> bool:
        """Whether it is known what they are for: gradients came back, or there are none."""
        return self.is_any_used or not (self._all or self._retired)

    def wait(self, put: Callable[[int], object]) -> bool:
        """Call it with the number of its step once that is known. False: no pass has begun, so it is known."""
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
        """Passes that no gradient can reach any more were looks at the model: nothing waits for them. One that follows
        a pass that is alive may have been its target, and is a part of the step if that is."""
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
        """Tell what waits its step: after the pass with which it began `step`, before that the step before."""
        self._settle_earlier(are_for_step=False)
        waiting, self._waiting = self._waiting, []
        for index, put in waiting:
            put(step if index > first else before)

    def cut(self) -> None:
        """Take everything that passes have measured out of the step, before that is handed over."""
        for one in self._all:
            self._cut(one)

    def hold(self, earlier: Passes, before: int, step: int) -> None:
        """An optimizer begins to step with a closure, which will make these passes. If it makes none, the earlier ones
        are for the step: Lightning's closure does nothing where the user calls `backward`, and others only do that."""
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
        """An optimizer steps: give the step what belongs to it, and the step before what was logged until it began.

        Where no gradient came back anywhere, all passes are for the step, or none is."""
        self._settle_earlier(are_for_step=are_for_step and not self._all)
        first = self._first(0 if are_for_step else len(self._all))
        try:
            self._give(first, are_for_step=are_for_step)
        finally:
            self.tell(before, step, first=first)

    def _first(self, default: int) -> int:
        """The place of the pass with which the step began."""
        unknown = None
        for place, one in enumerate(self._all):
            if one.is_used:
                return place
            if one.is_unknown and unknown is None:
                unknown = place
        return default if unknown is None else unknown

    def _give(self, first: int, *, are_for_step: bool) -> None:
        """A model that no gradient came back through at all was called for the others: a teacher, or a generator while
        its critic is trained."""
        trained = {id(one.model) for one in self._all if one.is_used}
        dropped: dict[int, Recorded] = {}
        for place, one in enumerate([*self._retired, *self._all], -len(self._retired)):
            is_kept = place >= first or (id(one.model) not in trained and (are_for_step or bool(trained)))
            if not is_kept:
                self._drop(one)
                dropped[id(one.model)] = one.model
            elif one.is_cut:
                one.model.keep(one.measured)
            one.measured, one.model = None, NOBODY  # a graph that is kept must not keep us as well
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
    """The model of a pass that was only announced, or is done with."""

    def cut(self) -> None: ...

    def keep(self, measured: Any) -> None: ...

    def retire(self, measured: Any) -> None: ...

    def drop(self, measured: Any) -> None: ...

    def restart(self) -> None: ...


NOBODY: Final = _Nobody()


def _is_autograd_compiled() -> bool:
    """Then a hook of ours would be compiled as well."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "compiled_autograd_enabled", False))
