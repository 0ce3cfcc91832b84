"""Counts training steps from optimizer steps and forward passes.

Nothing here measures or writes. Each change of the count is made separately and before anyone is notified, so a failure
elsewhere in sonde never prevents a step from being counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

from sonde.session.training.passes import Passes, PassesOf, Recorded

if TYPE_CHECKING:
    from sonde.probe.optimizer.hooks import Call


_PLAIN: Final = 8
"""The number of consecutive steps of one pattern after which the next are expected to follow it."""


class StepHost(Protocol):
    """Acts on the events that `Steps` detects. No method may raise."""

    def optimizers(self) -> set[int]:
        """The watched optimizers that still exist, by `id`."""

    def optimizers_stepped(self, step: int) -> None:
        """Called when all optimizers seem to have stepped. The step stays open for `log` until the next one starts."""

    def step_ended(self, step: int) -> None:
        """Called when the next step seems to have started."""

    def step_begins(self, step: int) -> None: ...


class Steps:
    """Counts the steps of one training thread. Others may log at its steps or train the same model, hence a lock.

    A step ends when each optimizer has stepped, or when one steps again. A forward pass after that is assigned to the
    next step provisionally; the next optimizer step settles it (`passes.py`), and a wrong guess is corrected.
    """

    def __init__(self, first: int, host: StepHost) -> None:
        self.number = first
        """The current step, or the last one that was made."""
        self.is_over = False
        """Whether its optimizers have stepped and nothing of the next step was seen."""
        self.passes = Passes()
        self._host = host
        self.lock = threading.RLock()
        """Acquired a few times per step, not once per module. Held while the host acts on an event."""
        self._is_ahead = False
        """Whether a forward pass was provisionally assigned to the next step."""
        self._open: set[int] = set()
        """Optimizers, by `id`, that are stepping now."""
        self._stepped: set[int] = set()
        """Optimizers that have stepped in this step."""
        self._usual: set[int] = set()
        """Optimizers that stepped in the previous step. When they have stepped again, this step is probably over."""
        self._num_steps: dict[int, int] = {}
        self._expected: set[int] = set()
        """The watched optimizers, as of the last query."""
        self._is_sight_lost = self._is_told = False
        """Whether some steps are seen by no hook, and whether the user has ended one."""
        self._num_plain = 0
        """Consecutive steps of the same optimizers in which every pass was for training."""
        self._resting: frozenset[int] = frozenset()
        """While nothing is recorded: the optimizers of a step, and those that have yet to step in this one."""
        self._left: set[int] = set()
        self._is_resting = False

    @property
    def has_seen_optimizer(self) -> bool:
        return bool(self._num_steps or self._open)

    @property
    def is_counted_by_hooks(self) -> bool:
        """Whether steps end when optimizers have stepped, and not when the user says so."""
        return self.has_seen_optimizer and not self._is_sight_lost

    @property
    def is_count_known(self) -> bool:
        """Whether the number of counted steps equals the number of steps made."""
        return self._is_told or not self._is_sight_lost

    @property
    def last(self) -> int:
        """The step that an optimizer made last, or is making: values logged now belong to it, unless a pass has
        started."""
        return self.number - self._is_ahead

    # --------------------------------------------------------------------------------------------------- forward passes

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

    # ------------------------------------------------------------------------------------------------------- optimizers

    def optimizer_begins(self, call: Call) -> None:
        """Decide whether an optimizer belongs to this step or starts the next one, and thereby what passes were for."""
        key = id(call.optimizer)
        with self.lock:
            if key in self._open and not call.is_retry:
                self._stepped.add(key)  # it has stepped, but the end of its step was not reported
            self._decide(is_next=self._is_next(key, has_closure=call.has_closure), are_for_step=not call.has_closure)
            self._open.add(key)
        call.counted_by.append(self)  # not earlier: a failed part is repeated at the end of the call

    def optimizer_ended(self, call: Call) -> None:
        key, fresh, is_plain = id(call.optimizer), Passes(), self.passes.are_plain and not call.is_unusual
        if self not in call.counted_by:
            self.optimizer_begins(call)
        with self.lock:
            self._open.discard(key)
            self._stepped.add(key)
            self._num_steps[key] = self._num_steps.get(key, 0) + 1
            inside, self.passes = self.passes, fresh
            self._num_plain = self._num_plain + 1 if is_plain else 0
            try:
                inside.settle(self.number, self.number, are_for_step=True)  # of a closure
            finally:
                # With two threads in one model, a pass of the next step may have started before this call has ended.
                self.is_over = not self._is_ahead and self._seems_over()
                if self.is_over:
                    self._host.optimizers_stepped(self.number)

    def _is_next(self, key: int, *, has_closure: bool = False) -> bool:
        """Whether this optimizer starts the next step. One that has not stepped in this step joins it, as in a GAN."""
        if key in self._stepped or not self._stepped or key in self._num_steps or key in self._expected:
            return key in self._stepped
        # Never seen before. In the first round it is one of several that take turns. Later it was added, and the
        # forward pass since the others stepped belongs to its own step, as does the one that its closure will make.
        return (has_closure or self.passes.is_any_used) and max(self._num_steps.values()) > 1

    def _seems_over(self) -> bool:
        num = len(self._stepped)
        if self._usual and num >= len(self._usual) and self._stepped >= self._usual:
            return True
        if num < len(self._expected):  # with one optimizer per parameter, asking every time would take long
            return False
        self._expected = self._host.optimizers()
        return self._stepped >= self._expected

    def _decide(self, *, is_next: bool, are_for_step: bool) -> None:
        if not self.passes.are_plain:  # first: if this fails, nothing has changed
            self._num_plain = 0
        passes, self.passes = self.passes, Passes()
        is_ahead, self._is_ahead = self._is_ahead, False
        if is_next:
            if self._usual != self._stepped:
                self._num_plain = 0
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

    # ------------------------------------------------------------------------------------------------ calls by the user

    def wait(self, put: Callable[[int], object]) -> bool:
        """Call `put` with the step it belongs to, once that is known. False: it is already known, and is `last`."""
        if not (self._is_ahead or self._stepped or self._open):
            return False  # there is no previous step that it could belong to
        with self.lock:
            if not self.passes.wait(put):
                return False
            if self.passes.is_full:
                self.flush()
        return True

    def flush(self) -> None:
        """Stop waiting: settle open questions provisionally."""
        with self.lock:
            self.passes.forget_dead()
            self.passes.tell(self.last, self.number)

    def begin_next(self) -> None:
        """The user announces a batch of the next step, unless this one is still in progress."""
        with self.lock:
            if self._is_resting:  # an announced pass would never be settled, and values logged later would wait for it
                self.enter_resting()
                return
            if self.passes.is_any_used or not (self.is_over or self._is_ahead or not self._stepped):
                return
            passes, self.passes = self.passes, Passes()
            passes.settle(self.last, self.last, are_for_step=False)
            self._forward_seen()
            self.passes.step_begun()

    def close(self) -> None:
        """The user ends the step; with watched optimizers, only if they have stepped."""
        with self.lock:
            self._is_told = self._is_told or not self.is_over
            if self.is_counted_by_hooks and not self.is_over and not (self._is_ahead and not self.passes.is_any_used):
                return
            self.finish()
            self._usual, self._stepped = self._stepped, set()
            self._next()

    def finish(self) -> None:
        """No step follows the passes without gradients."""
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
        """Called when steps are made that no hook sees. What follows belongs to the next step, which the user ends."""
        with self.lock:
            if not self._is_sight_lost:
                self._is_sight_lost, self._is_told = True, False
                if self.is_over:
                    self._next()

    def skip(self) -> None:
        """Count a step that its optimizer skipped and no hook reports."""
        with self.lock:
            if self.is_over:
                return
            self._decide(is_next=self._is_ahead, are_for_step=True)
            self._stepped, self._num_plain = set(), 0
            self._next()

    def restart(self, number: int) -> None:
        """Continue with this step, as if nothing had been made since."""
        with self.lock:
            self.flush()
            self.number = number
            self.is_over = self._is_ahead = False
            self._stepped, self.passes = set(), Passes()
            self._host.step_begins(number)

    # ------------------------------------------------------------------------------------- steps that are only counted

    @property
    def is_plain(self) -> bool:
        """Whether the last steps were alike: each pass was for training, and the same optimizers stepped once each."""
        is_whole = self.is_over and not self._open and self._stepped == self._usual
        return is_whole and self._num_plain >= _PLAIN and self.is_counted_by_hooks and not self._is_told

    def rest(self) -> None:
        """Only count from now on, after a step that is over."""
        with self.lock:
            self._resting, self._left, self._is_resting = frozenset(self._stepped), set(self._stepped), True
            self._host.step_ended(self.number)

    def is_usual(self, optimizer: object) -> bool:
        """Whether this optimizer is expected to step now."""
        return id(optimizer) in self._left

    def enter_resting(self) -> None:
        """A pass of the next step starts."""
        if self.is_over:
            self.number += 1
            self.is_over = False

    def step_resting(self, optimizer: object) -> bool:
        """An optimizer has stepped. Returns whether that was expected."""
        if id(optimizer) not in self._left:
            return False
        self.enter_resting()
        self._left.discard(id(optimizer))
        if not self._left:
            self._left, self.is_over = set(self._resting), True
        return True

    def wake(self) -> None:
        """Follow every pass and step again. A step in progress records nothing."""
        with self.lock:
            self._is_resting = False
            self._usual = set(self._resting)
            self._stepped = set(self._resting) if self.is_over else set(self._resting - self._left)

    # ------------------------------------------------------------------------------------------- moving between threads

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
