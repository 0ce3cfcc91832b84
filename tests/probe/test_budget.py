"""What recording adds to a run stays within some seconds and a fraction of the time, at every step and on any model.

Time is simulated: the governor is pure arithmetic on the times that it is given.
"""

from __future__ import annotations

import math
import random
import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sonde.budget.governor import IN_PARTS, Governor
from sonde.budget.ledger import Ledger
from sonde.budget.strides import KINDS, MAX_STRIDE
from sonde.budget.thread_clock import ThreadClock

RARE = {"activations": 0.1, "inspect": 0.1}
"""Scheduled at every tenth step."""
times = st.floats(1e-6, 10.0)


@dataclass
class Training:
    """A training loop on a host that queues work on a device. `host` and `device` are the times of our work by kind;
    without a device the host does all of it."""

    host: dict[str, float]
    host_s: float
    device: dict[str, float] = field(default_factory=dict)
    device_s: float = 0.0
    attach_s: float = 0.5
    compile_s: float = 0.0
    fixed_s: float = 10e-6
    threads: float = 0.1
    """CPU time of our threads per second of recording on the host."""
    hidden_s: float = 0.0
    """Time on the host that following a step takes, in addition to what any clock of ours sees."""
    rest_s: float = 0.0
    """The same for a step that is only counted."""
    finish_s: float = 0.0
    noise: float = 0.01
    shares: dict[str, float] = field(default_factory=lambda: dict(RARE))
    budget: float | None = 0.01
    seconds: float = 5.0

    def __post_init__(self) -> None:
        self.now = self.added = self.longest_s = 0.0
        self.step, self.random, self.num_seen = 0, random.Random(0), Counter[str]()
        self.ledger = Ledger(self.budget, self.seconds, clock=lambda: self.now)
        self.now = self.added = self.attach_s
        self.ledger.begin(0.0)
        self.governor = Governor(self.ledger)
        for kind in self.host:
            self.governor.want(kind, self.shares.get(kind, 1.0))
        self.recorded: list[set[str]] = []
        self.turns: list[dict[str, tuple[int, int]]] = []
        self.extra: list[float] = []
        """What each step took longer because of us."""
        self.changes: list[Any] = []
        self.used_at = -1
        """The step at which half of the seconds was used."""

    def run(self, num: int) -> Training:
        end = self.step + num
        while self.step < end:
            if not self._rest(end):
                self._make_step()
            excess_s = self.added - self.seconds - (self.budget or 1.0) * self.now
            whole = sum(cost for kind, cost in self.host.items() if kind not in IN_PARTS)
            trials_s = 3 * (whole + len(IN_PARTS) * max(0.25 * self.host_s, 0.002))
            before_s = self.attach_s + trials_s if not self.seconds else 0.0
            assert excess_s <= self.longest_s + before_s, f"step {self.step}: {excess_s:.3f} s too much"
        return self

    def finish(self) -> Training:
        """The end of the run: nothing of it can be left out."""
        self.now += self.finish_s
        self.added += self.finish_s
        return self

    def _is_scheduled(self, step: int, kind: str) -> bool:
        return step < 20 or step % round(1 / self.shares.get(kind, 1.0)) == 0

    def _rest(self, end: int) -> int:
        """Only count until something may be recorded, as `Rest` does. Returns the number of steps."""
        schedules = ((kind, lambda step, kind=kind: self._is_scheduled(step, kind)) for kind in self.host)
        until = min(self.governor.next_recorded(self.step - 1, schedules), end)
        num = until - self.step
        if num < 2 or len(self.recorded) < 9:
            return 0
        bare = [(1 + abs(self.random.gauss(0, self.noise))) * max(self.host_s, self.device_s) for _ in range(num)]
        seconds, self.step = sum(bare) + num * self.rest_s, until
        self.now += seconds
        change = self.governor.rested(until - 1, num, seconds, num * self.rest_s)
        self.governor.compare_rest(until - 1, seconds / num - self.rest_s)
        self.added += num * self.rest_s
        self.recorded += [set()] * num
        self.turns += [{}] * num
        self.extra += [self.rest_s] * num
        self.changes += [change] if change else []
        return num

    def _make_step(self) -> None:
        step, noise = self.step, 1 + abs(self.random.gauss(0, self.noise))
        scheduled = [kind for kind in self.host if self._is_scheduled(step, kind)]
        was_quiet = step < self.governor.quiet_until(list(self.host))
        kinds = self.governor.choose(step, scheduled)
        assert not (was_quiet and kinds)
        part = {kind: 1 / self.governor.turn(kind)[1] for kind in kinds}
        own_host = {kind: self.host[kind] * part[kind] for kind in kinds}
        own_device = {kind: self.device.get(kind, 0.0) * part[kind] for kind in kinds}
        is_first = any(self.num_seen[kind] < 2 for kind in kinds)
        if kinds and not self.num_seen:
            own_host[next(iter(kinds))] += self.compile_s
        self.num_seen.update(kinds)
        host_s = noise * self.host_s + sum(own_host.values()) + self.fixed_s + self.hidden_s
        device_s = noise * self.device_s + sum(own_device.values())
        is_host_bound, bare_s = host_s >= device_s, noise * max(self.host_s, self.device_s)
        threads_s = self.threads * sum(own_host.values()) * is_host_bound
        step_s = max(host_s, device_s)
        self.now += step_s + threads_s
        self.ledger.spend("threads", threads_s)
        costs = {k: max(own_host[k], own_device[k]) if is_host_bound else own_device[k] for k in kinds}
        other_s = self.fixed_s * is_host_bound
        change = (
            self.governor.observe(step, costs, step_s=step_s, lengths=own_host, other_s=other_s, is_first=is_first)
            if costs or not was_quiet
            else self.governor.pass_by(step, step_s, other_s)
        )
        self.added += step_s - bare_s + threads_s
        self.longest_s = max(self.longest_s, step_s - bare_s + threads_s)
        self.recorded.append(kinds)
        self.turns.append({kind: self.governor.turn(kind) for kind in kinds})
        self.extra.append(step_s - bare_s)
        self.changes += [change] if change else []
        if self.used_at < 0 and not self.governor.is_dense:
            self.used_at = step
        self.step += 1

    def blocks(self, first: int, size: int = 100) -> list[float]:
        """How many times as long as without recording the steps from this one on took, in blocks."""
        bare_s = size * max(self.host_s, self.device_s)
        return [1 + sum(self.extra[at : at + size]) / bare_s for at in range(first, len(self.extra) - size + 1, size)]

    def longest_gap(self, kind: str, first: int = 0) -> int:
        at = [step for step, kinds in enumerate(self.recorded) if kind in kinds and step >= first]
        return max(b - a for a, b in pairwise(at))


def resnet(**options: Any) -> Training:
    """Recording everything in one step takes five times as long as the step."""
    costs = {"scalars": 3e-4, "grads": 1e-3, "optimizer": 4e-3, "activations": 0.06, "inspect": 0.08, "finite": 5e-3}
    return Training(costs, 0.03, **options)


def mlp(**options: Any) -> Training:
    costs = {
        "scalars": 2e-4, "grads": 3e-4, "optimizer": 7e-4, "activations": 4e-4, "inspect": 9e-4, "finite": 2e-4,
    }  # fmt: skip
    return Training(costs, 0.0017, **options)


def llama(**options: Any) -> Training:
    """A device that always lags the host."""
    device = {"scalars": 1e-4, "grads": 3e-3, "optimizer": 0.012, "activations": 0.03, "inspect": 0.012, "finite": 4e-3}
    host = dict.fromkeys(device, 2e-3)
    return Training(host, 0.09, device, 0.17, **options)


def vit(**options: Any) -> Training:
    """A device that waits for the host while much is recorded."""
    device = {"scalars": 1e-4, "grads": 7e-4, "optimizer": 3e-3, "activations": 0.01, "inspect": 0.005, "finite": 1e-3}
    host = {"scalars": 5e-4, "grads": 1e-3, "optimizer": 2e-3, "activations": 0.02, "inspect": 0.03, "finite": 6e-3}
    return Training(host, 0.045, device, 0.058, **options)


SHAPES = {
    "resnet": resnet,
    "mlp": mlp,
    "llama": llama,
    "vit": vit,
    "compiled": lambda: resnet(compile_s=3.0, attach_s=1.5),
    "slow": lambda: Training({"grads": 0.1, "optimizer": 0.4, "activations": 1.0, "inspect": 1.0}, 10.0, noise=0.001),
    "noisy": lambda: resnet(noise=0.3),
    "busy threads": lambda: resnet(threads=1.0),
    "no seconds": lambda: resnet(seconds=0.0),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_at_no_time_more_is_added_than_the_seconds_and_the_fraction(shape):
    training = SHAPES[shape]()
    training.run(12_000 if shape == "mlp" else 3000)
    assert training.governor.is_dense is False
    assert all(training.num_seen[kind] >= 3 for kind in training.host), "the promise is not kept by recording nothing"


@pytest.mark.parametrize(("shape", "most"), [("resnet", 1.02), ("vit", 1.02), ("llama", 1.02), ("mlp", 1.03)])
def test_after_the_seconds_blocks_of_steps_take_one_percent_longer(shape, most):
    training = SHAPES[shape]().run(8000)
    blocks = training.blocks(training.used_at + 1000 + round(6 / training.host_s))
    assert max(blocks) <= most
    assert sum(blocks) / len(blocks) == pytest.approx(1.008, abs=0.005), "and the budget is used"


@pytest.mark.parametrize("shape", ["resnet", "vit", "llama"])
def test_gradients_are_recorded_at_least_at_every_tenth_step(shape):
    training = SHAPES[shape]().run(4000)
    assert training.longest_gap("grads") <= 10


def test_gradients_that_do_not_fit_are_recorded_more_rarely():
    training = Training({"grads": 0.05, "optimizer": 0.05}, 0.03).run(6000)
    assert 100 < training.longest_gap("grads", 4000) <= MAX_STRIDE


@pytest.mark.parametrize("shape", SHAPES)
def test_no_step_becomes_much_longer_once_half_of_the_seconds_is_used(shape):
    training = SHAPES[shape]().run(4000)
    bare_s = (1 + 0.7 * training.noise) * max(training.host_s, training.device_s)
    grads_s = training.host["grads"] + training.host.get("scalars", 0.0)
    assert max(training.extra[training.used_at + 1 :]) <= max(0.25 * bare_s, 0.002) * 1.15 + grads_s


def test_everything_is_recorded_as_scheduled_until_half_of_the_seconds_is_used():
    training = resnet().run(400)
    first = training.recorded[: training.used_at]
    assert all(len(kinds) == 6 for kinds in first[:20])
    assert all({"scalars", "grads", "optimizer"} <= kinds for kinds in first)
    assert training.ledger.spent_s > 2.5
    assert sum(training.extra[: training.used_at - 1]) < 2.5


def test_cheap_recording_is_never_thinned():
    training = Training({"grads": 1e-4, "optimizer": 2e-4}, 0.1).run(3000)
    assert all(kinds == {"grads", "optimizer"} for kinds in training.recorded)
    assert not training.changes


def test_parts_take_turns_and_miss_no_module():
    training = resnet().run(20_000)
    for kind in IN_PARTS:
        num = Counter(turns[kind] for turns in training.turns[5000:] if kind in turns)
        parts = training.governor.parts[kind]
        assert parts > 4
        recent = {turn: count for turn, count in num.items() if turn[1] == parts}
        assert set(recent) == {(number, parts) for number in range(parts)}
        assert max(recent.values()) - min(recent.values()) <= 1


def test_what_is_scheduled_rarely_is_recorded_at_its_steps_only():
    training = llama().run(4000)
    at = [step for step, kinds in enumerate(training.recorded) if "activations" in kinds and step >= 20]
    assert len(at) > 5
    assert all(step % 10 == 0 for step in at)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_recorded_with_every_update(shape):
    training = SHAPES[shape]().run(4000)
    assert all("grads" in kinds for kinds in training.recorded[200:] if "optimizer" in kinds)


def test_scalars_that_are_thinned_come_in_pairs():
    training = mlp().run(8000)
    at = [step for step, kinds in enumerate(training.recorded) if "scalars" in kinds and step > 5000]
    assert len(at) > 10
    alone = [step for step in at[1:-1] if step - 1 not in at and step + 1 not in at]
    assert len(alone) <= len(training.changes)


# ------------------------------------------------------------------------------------------------------- changing times


def test_steps_of_another_length_keep_to_the_budget():
    training = resnet()
    for host_s in (0.03, 0.3, 0.01, 0.05):
        training.host_s = host_s
        training.run(1500)
    assert max(training.blocks(5500)) <= 1.02


def test_recording_that_becomes_dearer_keeps_to_the_budget():
    training = resnet().run(2000)
    training.host = {kind: 5 * cost for kind, cost in training.host.items()}
    training.run(4000)
    assert max(training.blocks(3000, size=500)) <= 1.015


def test_recording_that_becomes_cheaper_is_more_frequent():
    training = Training({"optimizer": 0.04}, 0.1).run(3000)
    stride = training.governor.stride("optimizer")
    training.host = {"optimizer": 0.004}
    training.run(4000)
    assert stride > 30
    assert training.governor.stride("optimizer") <= 6


def test_a_pause_is_not_a_step_and_saves_up_nothing():
    training = resnet().run(3000)
    before_s, total_s = training.ledger.remaining_s, training.governor.total_s
    training.now += 36_000.0
    training.governor.observe(training.step, {}, step_s=36_000.0)
    assert training.ledger.remaining_s - before_s < 0.01
    assert training.governor.total_s == total_s


def test_steps_that_become_longer_for_good_are_no_pauses():
    training = Training({"optimizer": 0.01}, 0.01).run(3000)
    thin, training.host_s = training.governor.stride("optimizer"), 1.0
    training.run(300)
    assert thin > 5
    assert training.governor.stride("optimizer") == 1.0


def test_another_budget_holds_from_then_on():
    training = resnet().run(3000)
    training.ledger.fraction = training.budget = 0.05
    training.run(2000)
    assert sum(training.blocks(4000)) / 10 == pytest.approx(1.05, abs=0.012)
    training.ledger.fraction, training.budget = None, None
    training.governor.choose(training.step, KINDS)
    assert all(training.governor.allows(training.step + 1, kind) for kind in KINDS)


def test_without_a_budget_everything_is_allowed():
    training = Training({"optimizer": 1.0}, 1.0, budget=None)
    training.seconds = math.inf
    assert all(training.run(300).recorded)
    assert training.governor.unsure_s is None
    assert not training.changes


def test_after_a_return_to_an_earlier_step_recording_continues():
    training = resnet().run(4000)
    training.governor.restart(100)
    training.step = 100
    num = len(training.recorded)
    training.run(400)
    assert "grads" in set().union(*training.recorded[num : num + 10])
    assert training.longest_gap("grads", num) <= 10


def test_training_threads_share_one_allowance():
    one = resnet()
    other = Governor(one.ledger)
    for kind in one.host:
        other.want(kind, one.shares.get(kind, 1.0))
    governors = [one.governor, other]
    for step in range(8000):
        one.governor, one.step = governors[step % 2], step // 2
        one.run(1)
    assert max(one.blocks(6000)) <= 1.02


# ---------------------------------------------------------------------------------------------------------- the account


@pytest.mark.parametrize("shape", SHAPES)
def test_the_account_is_close_to_what_was_added(shape):
    training = SHAPES[shape]().run(4000)
    assert training.ledger.spent_s == pytest.approx(training.added, rel=0.35)
    assert training.ledger.elapsed_s == pytest.approx(training.now)


def test_what_is_learned_from_comparing_steps_corrects_the_account():
    """Half of our work overlaps with the model's."""
    training = Training({"grads": 0.001, "optimizer": 0.004}, 0.1, noise=0.0, seconds=0.0, attach_s=0.0, threads=0.0)
    governor, lost_s = training.governor, 0.0
    for step in range(3000):
        kinds = governor.choose(step, ("grads", "optimizer"))
        costs = {kind: training.host[kind] for kind in kinds}
        lost_s += sum(costs.values()) / 2
        training.now += 0.1 + sum(costs.values()) / 2
        governor.observe(step, costs, step_s=0.1 + sum(costs.values()) / 2)
    assert governor.scale.value == pytest.approx(0.5, abs=0.1)
    assert governor.lost_s == pytest.approx(lost_s, rel=0.1)
    assert governor.unsure_s < governor.lost_s


def test_a_step_that_was_all_ours_is_counted_whole():
    training = resnet().run(3000)
    before_s = training.governor.lost_s
    training.governor.observe(training.step, {"grads": 0.7}, step_s=0.72)
    assert training.governor.lost_s - before_s == pytest.approx(0.7)


def test_what_happens_once_is_paid_for_but_not_expected_again():
    training = resnet(compile_s=3.0).run(1)
    assert training.ledger.spent_s > 3.5
    training.run(50)
    assert training.governor.costs.of("scalars") < 0.01


def test_time_without_recording_is_saved_up_to_the_seconds():
    now = 0.0
    ledger = Ledger(0.01, 5.0, clock=lambda: now)
    ledger.spend("attach", 4.0)
    for _ in range(1000):
        now += 1.0
        ledger.pass_time(60.0)
    assert ledger.remaining_s == pytest.approx(5.0)


def test_finish_is_part_of_the_account_and_ends_it():
    now = 10.0
    ledger = Ledger(0.01, 5.0, clock=lambda: now)
    now = 20.0
    ledger.begin(9.0)
    now = 100.0
    began_s = now
    now = 102.0
    ledger.finish(began_s)
    now = 500.0
    assert ledger.spent_by == {"attach": 11.0, "finish": 2.0}
    assert (ledger.spent_s, ledger.elapsed_s) == (13.0, 93.0)


def test_cpu_time_of_another_thread_is_known_even_after_its_end():
    clock, is_marked, may_work, is_done = ThreadClock(), *(threading.Event() for _ in range(3))

    def work() -> None:
        clock.mark()
        is_marked.set()
        may_work.wait()
        sum(range(300_000))
        clock.mark()
        is_done.set()

    thread = threading.Thread(target=work)
    thread.start()
    is_marked.wait()
    clock.reset()
    idle_s = clock.read()
    may_work.set()
    is_done.wait()
    busy_s = clock.read()
    thread.join()
    assert 0.0 <= idle_s < busy_s <= clock.read()


# ------------------------------------------------------------------------------------------------------------ decisions


def test_trials_of_unknown_kinds_are_apart_from_one_another():
    now = 0.0
    ledger = Ledger(0.01, 0.0, clock=lambda: now)
    now, governor, tried = 1.0, Governor(ledger), []
    ledger.pass_time(60.0)
    for step in range(10):
        tried.append(governor.choose(step, ("grads", "optimizer", "inspect")))
    assert tried[0] == {"grads", "optimizer", "inspect"}
    assert all(len(kinds) <= 1 for kinds in tried[1:])
    assert set().union(*tried[1:]) == {"grads", "optimizer", "inspect"}


def test_a_silent_step_now_and_then_where_gradients_are_in_every_other():
    training = Training({"grads": 0.001, "optimizer": 0.02}, 0.1, budget=0.05, seconds=0.0, attach_s=0.0).run(600)
    silent = [step for step, kinds in enumerate(training.recorded[200:]) if not kinds]
    assert 10 <= len(silent) <= 40


def test_steady_costs_change_the_strides_a_few_times():
    training = resnet().run(10_000)
    assert 1 <= len(training.changes) <= 10


def test_short_memory_thins_and_critical_memory_leaves_gradients_only():
    training = Training({"grads": 0.0001, "optimizer": 0.0001}, 0.1, budget=0.5).run(100)
    change = training.governor.press(4.0)
    assert change is not None
    assert change.strides["optimizer"] == 4.0
    assert change.strides["grads"] == 1.0
    training.run(100)
    assert sum("optimizer" in kinds for kinds in training.recorded[100:]) <= 26
    training.governor.press(math.inf)
    assert all("optimizer" not in kinds for kinds in training.run(100).recorded[200:])
    training.governor.press(1.0)
    assert sum("optimizer" in kinds for kinds in training.run(100).recorded[300:]) > 80


def test_asked_twice_it_says_the_same():
    governor = resnet().run(1000).governor
    for step in range(1000, 1100):
        assert governor.choose(step, KINDS) == governor.choose(step, KINDS)


@given(
    st.lists(st.tuples(times | st.just(0.0), times | st.just(0.0), st.booleans()), max_size=200),
    st.floats(0.001, 1.0),
    st.floats(0.0, 5.0),
)
def test_any_times_leave_everything_in_range(observed, budget, seconds):
    now = 0.0
    governor = Governor(Ledger(budget, seconds, clock=lambda: now))
    for step, (own_s, step_s, is_recorded) in enumerate(observed):
        governor.choose(step, KINDS)
        now += step_s
        governor.observe(step, {"optimizer": own_s, "grads": own_s / 2} if is_recorded else {}, step_s=step_s)
        assert all(1 <= governor.stride(kind) <= MAX_STRIDE for kind in KINDS)
        assert all(1 <= parts <= 64 for parts in governor.parts.values())
        assert math.isfinite(governor.lost_s)
        assert governor.lost_s >= 0


def test_what_makes_a_step_longer_than_a_bare_one_counts_whatever_it_is() -> None:
    """On a device, hooks and waiting for the interpreter are in no clock of ours."""
    ledger = Ledger(0.01, 5.0, clock=lambda: 0.0)
    governor = Governor(ledger)
    governor.is_compared = True
    bare = [step for step in range(20) if not governor.choose(step, ("grads",))]
    assert bare == [4, 9, 19]
    for step in range(10):
        is_bare = step in bare
        governor.observe(step, {} if is_bare else {"grads": 0.01}, step_s=0.03 if is_bare else 0.10)
    assert governor.lost_s == pytest.approx(8 * 0.07)


def test_a_host_without_a_device_has_no_bare_steps() -> None:
    governor = Governor(Ledger(0.01, 5.0, clock=lambda: 0.0))
    assert all(governor.choose(step, ("grads",)) for step in range(50))


def test_ranks_with_different_strides_record_common_steps() -> None:
    """Parts of a tensor from different steps cannot be joined, and ranks do not talk to each other."""
    recorded = []
    for stride in (3.1, 5.0):
        governor = Governor(Ledger(0.01, seconds=0.0), is_aligned=True)
        governor.strides = dict.fromkeys(KINDS, stride)
        governor.costs.measured = {kind: deque([(0, 1e-3)]) for kind in KINDS}
        recorded.append({step for step in range(1, 200) if governor.choose(step, ["grads"])})
    assert recorded[1] <= recorded[0]
    assert recorded[1] == set(range(8, 200, 8))


# ------------------------------------------------------------------------------------- what no clock of ours can see


def resnet50() -> Training:
    """As measured on an H200: attaching takes a second, and so does the end; following a step takes time that is in no
    clock, because hooks delay the launches of kernels."""
    host = {"scalars": 3e-4, "grads": 6e-4, "optimizer": 1.5e-3, "activations": 0.02, "inspect": 0.16, "finite": 1e-3}
    return Training(host, 0.0294, hidden_s=6e-4, rest_s=1e-4, attach_s=1.0, finish_s=0.9)


def small_mlp() -> Training:
    """As measured on an H200: three modules and steps of 1.6 ms. A step that is followed but records nothing takes a
    third longer."""
    host = {"scalars": 2e-4, "grads": 3e-4, "optimizer": 7e-4, "activations": 4e-4, "inspect": 9e-4, "finite": 2e-4}
    return Training(host, 0.0016, hidden_s=5e-4, rest_s=15e-6, attach_s=0.65, finish_s=0.5, noise=0.03)


@pytest.mark.parametrize(("made", "steps", "most"), [(resnet50, 2000, 1.02), (small_mlp, 20_000, 1.05)])
def test_what_no_clock_sees_is_found_by_comparing_steps_with_rests(made, steps, most):
    training = made().run(steps).finish()
    assert training.added <= 5.0 + 0.015 * training.now
    assert max(training.blocks(steps // 2)) <= most
    assert training.ledger.spent_s + training.finish_s == pytest.approx(training.added, rel=0.15)
    late = [kind for kinds in training.recorded[steps // 2 :] for kind in kinds]
    assert {"grads", "finite", "optimizer"} <= set(late), "the promise is not kept by recording nothing"


def test_gradients_fit_at_every_tenth_step_of_a_resnet():
    training = resnet50().run(2000)
    assert training.longest_gap("grads") <= 10
