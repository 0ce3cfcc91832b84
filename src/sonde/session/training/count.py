"""Which step training is in: counted from what optimizers and forward passes show of themselves.

Nothing here measures or writes. Each change of the count is made before anyone is told of it, and by itself, so that a
failure elsewhere in sonde keeps no step from being counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from sonde.session.training.passes import Passes, PassesOf, Recorded

if TYPE_CHECKING:
    from sonde.probe.optimizer.hooks import Call


class StepHost(Protocol):
    """Who acts on what is found. None of it may raise."""

    def optimizers(self) -> set[int]:
        """Those that are watched and still there, by `id`."""

    def optimizers_stepped(self, step: int) -> None:
        """All of them, as it seems. The step stays open for `log` until the next one shows itself."""

    def step_ended(self, step: int) -> None:
        """The next one has begun, as it seems."""

    def step_begins(self, step: int) -> None: ...


class Steps:
    """Counts the steps of one training thread. Others may log at its steps or train the same model, hence a lock.

    A step ends when each optimizer has stepped, or when one steps again. A forward pass after that is taken to be of
    the next step until an optimizer steps; then it is known (`passes.py`), and a wrong guess is taken back.
    """

    def __init__(self, first: int, host: StepHost) -> None:
        self.number = first
        """The step that is being made, or that was made last."""
        self.is_over = False
        """Its optimizers have stepped, and nothing of the next one was seen."""
        self.passes = Passes()
        self._host = host
        self.lock = threading.RLock()
        """Taken a few times per step, not once per module. Held while the host acts on what is found."""
        self._is_ahead = False
        """A forward pass was taken to be of the next step, which is not certain yet."""
        self._open: set[int] = set()
        """Optimizers, by `id`, whose steps are being made."""
        self._stepped: set[int] = set()
        """Those that have made theirs in this step."""
        self._usual: set[int] = set()
        """Those that did in the step before. When they have stepped again, this one is probably over."""
        self._num_steps: dict[int, int] = {}
        self._expected: set[int] = set()
        """Those that are watched, as far as was asked."""
        self._is_sight_lost = self._is_told = False
        """Whether some steps are seen by no hook, and whether the user has ended one."""

    @property
    def has_seen_optimizer(self) -> bool:
        return bool(self._num_steps or self._open)

    @property
    def is_counted_by_hooks(self) -> bool:
        """Whether steps end when optimizers have stepped, and not when the user says so."""
        return self.has_seen_optimizer and not self._is_sight_lost

    @property
    def is_count_known(self) -> bool:
        """Whether as many steps were counted as were made."""
        return self._is_told or not self._is_sight_lost

    @property
    def last(self) -> int:
        """The step that an optimizer made last, or is making: what is logged now is of it, unless a pass has begun."""
        return self.number - self._is_ahead

    # ---------------------------------------------------------------------------------------------- forward passes

    def wants_part(self, model: Recorded) -> bool:
        return self.is_over or self.passes.wants_part(model)

    def model_entered(self, model: Recorded) -> None:
        with self.lock:
            self._forward_seen()
            self.passes.begin(model, is_whole=True)

    def part_called(self, model: Recorded, part: object, output: Any) -> None:
        if not self.wants_part(model) and not self.passes.wants_again(model, part):
            return
        with self.lock:
            self._forward_seen()
            self.passes.part_called(model, part, output)

    def model_called(self, model: Recorded, output: Any) -> None:
        with self.lock:
            self._forward_seen()
            self.passes.ended(model, output)

    def _forward_seen(self) -> None:
        if self.is_over:
            self._is_ahead = True
            self._next()

    # --------------------------------------------------------------------------------------------------- optimizers

    def optimizer_begins(self, call: Call) -> None:
        """Decide whether it belongs to the step or begins the next one, and with it what passes were for."""
        key = id(call.optimizer)
        with self.lock:
            if key in self._open and not call.is_retry:
                self._stepped.add(key)  # it has stepped, and whoever should have told us so failed
            self._decide(is_next=self._is_next(key, has_closure=call.has_closure), are_for_step=not call.has_closure)
            self._open.add(key)
        call.counted_by.append(self)  # not before: what failed is done again at the end of the call

    def optimizer_ended(self, call: Call) -> None:
        key, fresh = id(call.optimizer), Passes()
        if self not in call.counted_by:
            self.optimizer_begins(call)
        with self.lock:
            self._open.discard(key)
            self._stepped.add(key)
            self._num_steps[key] = self._num_steps.get(key, 0) + 1
            inside, self.passes = self.passes, fresh
            try:
                inside.settle(self.number, self.number, are_for_step=True)  # of a closure
            finally:
                # With two threads in one model, a pass of the next step may have begun before this call has ended.
                self.is_over = not self._is_ahead and self._seems_over()
                if self.is_over:
                    self._host.optimizers_stepped(self.number)

    def _is_next(self, key: int, *, has_closure: bool = False) -> bool:
        """Whether this optimizer begins the next step. One that has not stepped in this one joins it, as in a GAN."""
        if key in self._stepped or not self._stepped or key in self._num_steps or key in self._expected:
            return key in self._stepped
        # Never seen before. In the first round it is one of several that take turns. Later it was added, and the
        # forward pass since the others stepped is of its own step, as is the one that its closure will make.
        return (has_closure or self.passes.is_any_used) and max(self._num_steps.values()) > 1

    def _seems_over(self) -> bool:
        num = len(self._stepped)
        if self._usual and num >= len(self._usual) and self._stepped >= self._usual:
            return True
        if num < len(self._expected):  # with an optimizer for each parameter, asking every time would take long
            return False
        self._expected = self._host.optimizers()
        return self._stepped >= self._expected

    def _decide(self, *, is_next: bool, are_for_step: bool) -> None:
        passes, self.passes = self.passes, Passes()
        is_ahead, self._is_ahead = self._is_ahead, False
        if is_next:
            self._usual, self._stepped = self._stepped, set()
            before = self.number - is_ahead
            if not is_ahead:
                passes.cut()
                self._next()
        else:
            self.number -= is_ahead
            before = self.number
        self.is_over = False
        if are_for_step or passes.are_known:
            passes.settle(before, self.number, are_for_step=are_for_step)
        else:
            self.passes.hold(passes, before, self.number)

    # ------------------------------------------------------------------------------------------------- by the user

    def wait(self, put: Callable[[int], object]) -> bool:
        """Call it with the step it belongs to, once that is known. False: it is known now, and is `last`."""
        if not (self._is_ahead or self._stepped or self._open):
            return False  # there is no step before this one that it could belong to
        with self.lock:
            if not self.passes.wait(put):
                return False
            if self.passes.is_full:
                self.flush()
        return True

    def flush(self) -> None:
        """Do not wait any longer: what is not known is as it seems."""
        with self.lock:
            self.passes.forget_dead()
            self.passes.tell(self.last, self.number)

    def begin_next(self) -> None:
        """The user says that a batch of the next step comes, unless this one is still being made."""
        with self.lock:
            if self.passes.is_any_used or not (self.is_over or self._is_ahead or not self._stepped):
                return
            passes, self.passes = self.passes, Passes()
            passes.settle(self.last, self.last, are_for_step=False)
            self._forward_seen()
            self.passes.step_begun()

    def close(self) -> None:
        """The user says that the step is over; where optimizers are watched, only if they have stepped."""
        with self.lock:
            self._is_told = self._is_told or not self.is_over
            if self.is_counted_by_hooks and not self.is_over and not (self._is_ahead and not self.passes.is_any_used):
                return
            self.finish()
            self._usual, self._stepped = self._stepped, set()
            self._next()

    def finish(self) -> None:
        """No step follows the passes of which no gradient came back."""
        with self.lock:
            passes, self.passes = self.passes, Passes()
            is_partial = passes.is_any_used or not self.is_counted_by_hooks
            last, step = self.last, self.number
            if self._is_ahead and not is_partial:
                self.number -= 1
                self.is_over = True
            self._is_ahead = False
            passes.settle(last, step, are_for_step=not self.is_counted_by_hooks)

    def lose_sight(self) -> None:
        """Steps are made that no hook shows. What comes now is of the next one, which the user ends."""
        with self.lock:
            if not self._is_sight_lost:
                self._is_sight_lost, self._is_told = True, False
                if self.is_over:
                    self._next()

    def skip(self) -> None:
        """The step counts, though its optimizer was kept from it and no hook tells of it."""
        with self.lock:
            if self.is_over:
                return
            self._decide(is_next=self._is_ahead, are_for_step=True)
            self._stepped = set()
            self._next()

    def restart(self, number: int) -> None:
        """Continue with this step, as if nothing had been made since."""
        with self.lock:
            self.flush()
            self.number = number
            self.is_over = self._is_ahead = False
            self._stepped, self.passes = set(), Passes()
            self._host.step_begins(number)

    # ------------------------------------------------------------------------------------------ between two threads

    def leave(self, model: Recorded, optimizers: set[int]) -> PassesOf:
        """Stop counting this model and its optimizers here. Returns its passes, for `join`."""
        with self.lock:
            for known in (self._open, self._stepped, self._usual):
                known.difference_update(optimizers)
            for key in optimizers:
                self._num_steps.pop(key, None)
            self._expected = self._expected - optimizers
            return self.passes.leave(model)

    def join(self, passes: PassesOf) -> None:
        """Count a model here from now on."""
        with self.lock:
            self.passes.join(passes)

    def _next(self) -> None:
        ended, self.number = self.number, self.number + 1
        self.is_over = False
        try:
            self._host.step_ended(ended)
        finally:
            self._host.step_begins(self.number)
