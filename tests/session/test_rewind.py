"""Returning to an earlier step: two histories are never mixed, and the abandoned one stays readable."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import sonde
from sonde.diagnose.rule import RULES, Found, Rule, Severity
from sonde.errors import UsageError
from sonde.session.null import NullSession
from sonde.session.observers import rules as live
from sonde.session.observers import rules_process

QUICK = {"writer": {"seal_steps": 8, "flush_interval_s": 0.01, "heartbeat_s": 0.05}, "system_metrics": False}
Step = tuple[float, float]
"""The loss, and the norm of the gradient of the first weight, by hand and in float64."""


class Loop:
    """A training loop that keeps its own list: `histories[k]` is what attempt k shows, by step."""

    def __init__(self, session: Any) -> None:
        torch.manual_seed(0)
        self.session = session
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.data = torch.Generator().manual_seed(1)
        session.watch(self.model, self.optimizer, inspect=False, params=False, optim=False)
        self.histories: list[dict[int, Step]] = [{}]
        self.step = 0

    def train(self, num_steps: int) -> Loop:
        for _ in range(num_steps):
            loss = self.model(torch.randn(8, 3, generator=self.data)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            norm = float(self.model[0].weight.grad.double().square().sum().sqrt())
            self.optimizer.step()
            self.session.log({"loss": loss.item()})
            self.histories[-1][self.step] = loss.item(), norm
            self.step += 1
        return self

    def save(self) -> tuple[Any, ...]:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def rewind(self, step: int, saved: tuple[Any, ...] | None = None) -> Loop:
        """The data continues: the second history differs from the first."""
        if saved is not None:
            self.model.load_state_dict(saved[0])
            self.optimizer.load_state_dict(saved[1])
        assert self.session.rewind(step)
        self.histories.append({at: made for at, made in self.histories[-1].items() if at < step})
        self.step = step
        return self


def read(run: sonde.Run) -> dict[int, Step]:
    losses = run.scalars("loss")
    norms = run.stats("grad/0.weight/norm")
    assert norms["step"].to_pylist() == losses["step"].to_pylist() == sorted(set(losses["step"].to_pylist()))
    values = zip(losses["value"].to_pylist(), norms["value"].to_pylist(), strict=True)
    return dict(zip(losses["step"].to_pylist(), values, strict=True))


def check(run: sonde.Run, history: dict[int, Step]) -> None:
    found = read(run)
    assert list(found) == sorted(history)
    for step, (loss, norm) in history.items():
        assert found[step][0] == loss
        assert math.isclose(found[step][1], norm, rel_tol=1e-6)
    assert run.last_step == max(history, default=-1)


def check_all(run: sonde.Run, loop: Loop) -> None:
    check(run, loop.histories[-1])
    assert run.num_attempts == len(loop.histories)
    for number, history in enumerate(loop.histories):
        check(run.attempt(number), history)


def test_a_rewind_replaces_what_was_recorded_and_keeps_it_as_an_attempt(begin, reopen):
    loop = Loop(begin(**QUICK)).train(10)
    saved = loop.save()
    loop.train(10).rewind(10, saved).train(4)
    run = reopen()
    check_all(run, loop)
    assert run.verify() == run.warnings == []
    table = run.attempts().to_pydict()
    assert (table["attempt"], table["first_step"], table["last_step"]) == ([0, 1], [0, 10], [19, 13])
    assert table["reason"] == ["start", "rewind"]
    assert table["started"][0] < table["started"][1]


def test_several_rewinds_to_a_later_and_to_an_earlier_step(begin, reopen):
    loop = (
        Loop(begin(**QUICK)).train(20).rewind(12).train(6).rewind(15).train(2).rewind(4).train(30).rewind(33).train(3)
    )
    check_all(reopen(), loop)


def test_a_live_reader_follows_a_rewind(begin, tmp_path):
    loop = Loop(begin(**QUICK)).train(12)
    assert loop.session.flush()
    run = sonde.open(tmp_path / "runs" / "latest")
    check_all(run, loop)
    loop.rewind(5).train(3)
    assert loop.session.flush()
    check_all(run, loop)


def test_follow_says_that_steps_were_abandoned(begin, tmp_path):
    loop = Loop(begin(**QUICK)).train(12)
    loop.session.flush()
    updates = sonde.open(tmp_path / "runs" / "latest").follow("grad/0.weight/norm", "loss", poll_s=0.01)
    seen: dict[int, float] = {}

    def take(update: Any) -> None:
        if update.rewound_to is not None:
            for step in [step for step in seen if step >= update.rewound_to]:
                del seen[step]
        seen.update(zip(update.scalars["step"].to_pylist(), update.scalars["value"].to_pylist(), strict=True))
        norms.extend(update.stats["step"].to_pylist())

    norms: list[int] = []
    take(next(updates))
    assert list(seen) == list(range(12))
    loop.rewind(5).train(3)
    loop.session.finish()
    for update in updates:
        take(update)
    assert seen == {step: loss for step, (loss, _) in loop.histories[-1].items()}
    assert norms == [*range(12), *range(5, 8)]


def test_the_step_in_progress_is_given_up(begin, reopen):
    """As when a loss is NaN: the forward pass was made, something was logged, and no optimizer stepped."""
    loop = Loop(begin(**QUICK)).train(6)
    loop.model(torch.randn(8, 3)).sum().backward()
    loop.session.log({"loss": float("nan")})
    loop.rewind(6).train(2)
    run = reopen()
    check(run, loop.histories[-1])
    assert run.attempt(0).scalars("loss")["step"].to_pylist() == list(range(7))


def test_nothing_is_lost_by_a_rewind_to_the_next_step(begin, reopen):
    loop = Loop(begin(**QUICK)).train(6).rewind(6).train(2)
    run = reopen()
    check_all(run, loop)
    (event,) = [row for row in run.events().to_pylist() if row["type"] == "rewound"]
    assert (event["severity"], event["step"]) == ("info", 6)


def test_an_event_names_the_abandoned_steps(begin, reopen):
    Loop(begin(**QUICK)).train(9).rewind(4).train(1)
    (event,) = [row for row in reopen().events().to_pylist() if row["type"] == "rewound"]
    assert event["message"].startswith("returned to step 4: steps 4 to 8 of attempt 0 are abandoned")
    assert json.loads(event["details"]) == {"attempt": 1, "first_step": 4, "abandoned": [4, 8]}


@pytest.mark.parametrize("step", [7, -1, 1.5, "3", None])
def test_a_step_that_cannot_be_is_ignored_with_one_warning(begin, reopen, step, capsys):
    loop = Loop(begin(**QUICK)).train(6)
    assert not loop.session.rewind(step)
    assert not sonde.rewind(step)
    assert capsys.readouterr().err.count("rewind(") == 1
    loop.train(2)
    run = reopen()
    check_all(run, loop)


def test_an_attempt_without_rows_leaves_no_trace(begin, reopen):
    loop = Loop(begin(**QUICK)).train(6)
    loop.session.rewind(2)
    loop.session.rewind(5)  # the second one replaces the first, and may lie ahead of it
    loop.histories.append({step: made for step, made in loop.histories[0].items() if step < 5})
    loop.step = 5
    loop.train(2)
    check_all(reopen(), loop)


def test_a_run_may_begin_at_the_step_of_a_checkpoint_from_elsewhere(begin, reopen):
    session = begin(**QUICK)
    assert session.rewind(500)
    loop = Loop(session)
    loop.step = 500
    run = loop.train(3) and reopen()
    check_all(run, loop)
    assert run.attempts()["first_step"].to_pylist() == [500]


def test_after_finish_and_when_disabled_nothing_happens(begin):
    session = begin(**QUICK)
    session.finish()
    assert not session.rewind(0)
    assert not NullSession().rewind(0)


def test_an_unknown_attempt_is_refused_with_those_there_are(begin, reopen):
    Loop(begin(**QUICK)).train(4).rewind(2).train(1)
    run = reopen()
    assert run.attempt(-1).last_step == run.last_step
    with pytest.raises(UsageError, match=r"no attempt 2 in .*It has: 0 to 1"):
        run.attempt(2)


@pytest.mark.slow
def test_the_pyramid_and_the_heat_map_hold_one_history(begin, reopen):
    """Long enough for three levels on both sides of a step that divides a merged row."""
    loop = Loop(begin(**QUICK))
    for first, num_steps in ((None, 150), (70, 110), (101, 90)):
        if first is not None:
            loop.rewind(first)
        for _ in range(num_steps // 10):
            loop.train(10)
            loop.session.flush()  # or all of it would make one segment
    run = reopen()
    check_all(run, loop)
    for number in (0, 1, 2):
        check_merged(run.attempt(number), loop.histories[number])
    check_merged(run, loop.histories[-1])
    norms = [norm for _, norm in loop.histories[-1].values()]
    for points in (2, 5, 1000):
        values = run.overview("grad/0.weight/norm", points=points)["value"].to_pylist()
        assert math.isclose(max(values), max(norms), rel_tol=1e-6)
        assert math.isclose(min(values), min(norms), rel_tol=1e-6)


def check_merged(run: sonde.Run, history: dict[int, Step]) -> None:
    """Rows of merged steps are the root mean square of the steps in them, by hand."""
    from sonde.read.run.segments import EVERYTHING
    from sonde.read.run.steps import ALL_STEPS
    from sonde.read.series.heatmap import HeatQuestion, live_cells, merged_segments, sealed_cells
    from sonde.read.series.pyramid import read_level
    from sonde.read.series.stats import ask
    from sonde.schema.thinning import join

    state = run._now
    question = ask(state.catalog.sites, "grad/0.weight/norm")
    num_levels = max(segment.level for segment in state.catalog.segments)
    assert num_levels >= 3
    for level in range(1, num_levels + 1):
        table = read_level(state, question, ALL_STEPS, level)
        expected: dict[int, list[float]] = {}
        for step, (_, norm) in history.items():
            expected.setdefault(step // 4**level * 4**level, []).append(norm)
        assert table["step"].to_pylist() == sorted(expected)
        for step, value in zip(table["step"].to_pylist(), table["value"].to_pylist(), strict=True):
            assert math.isclose(value, math.sqrt(np.mean(np.square(expected[step]))), rel_tol=1e-6)
    (site,) = question.ids.tolist()
    asked = HeatQuestion.of(state, "norm", [site])
    cells = [sealed_cells(state, asked, segment) for segment in state.segments_of("stats")]
    whole = join([*cells, live_cells(state, asked, EVERYTHING)])
    assert whole.steps.tolist() == sorted(history)
    places = [math.log10(history[step][1]) for step in sorted(history)]
    np.testing.assert_allclose(whole.places[:, 0], places, rtol=1e-5, atol=1e-5)
    merged = [sealed_cells(state, asked, segment) for segment in merged_segments(state, EVERYTHING, 2)]
    steps = sorted({int(step) // 16 * 16 for part in merged for step in part.steps})
    assert steps == sorted({step // 16 * 16 for step in history})


def test_sql_and_the_views_of_a_run_hold_one_history(begin, reopen):
    loop = Loop(begin(**QUICK)).train(20).rewind(10).train(4)
    run = reopen()
    for number, history in ((None, loop.histories[-1]), (0, loop.histories[0]), (1, loop.histories[1])):
        shown = run if number is None else run.attempt(number)
        rows = shown.sql("select step, value from scalars where name = 'loss' order by step").to_pydict()
        assert rows == {"step": sorted(history), "value": [history[step][0] for step in sorted(history)]}
        (norms,) = shown.sql("select sum(norm) as x from stats where kind = 'grad' and site = '0.weight'")[
            "x"
        ].to_pylist()
        assert math.isclose(norms, sum(norm for _, norm in history.values()), rel_tol=1e-6)
        assert shown.sql("select last_step from runs").to_pydict() == {"last_step": [max(history)]}
        assert shown.sql("select max(step) as x from checkpoints").to_pydict() == {"x": [max(history)]}
        window = shown.window()
        assert window.get("loss")[0].tolist() == sorted(history)


def test_numbers_logged_by_a_count_of_the_users_own_stay(begin, reopen):
    """Samples seen, epochs: a resume or a rewind abandons what was logged in abandoned steps, whatever its number."""
    loop = Loop(begin(**QUICK))
    kept: dict[int, int] = {}
    for step in range(12):
        loop.train(1)
        loop.session.log({"samples": step}, step=1000 * step)
        kept[1000 * step] = step
    loop.rewind(7)
    kept = {label: step for label, step in kept.items() if step < 7}
    loop.train(1)
    loop.session.log({"samples": 70}, step=7500)
    kept[7500] = 70
    loop.train(1)
    run = reopen()
    table = run.scalars("samples")
    assert dict(zip(table["step"].to_pylist(), table["value"].to_pylist(), strict=True)) == kept
    assert run.attempt(0).scalars("samples")["step"].to_pylist() == [1000 * step for step in range(12)]


# ----------------------------------------------------------------------------------------------------------- live rules


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[Any], int | None]], None]:
    """One planted rule, which another process would not know, and a check at every flush."""

    def no_process() -> None:
        raise OSError("planted: no process can be started")

    monkeypatch.setattr(rules_process, "Link", no_process)

    def plant(name: str, judge: Callable[[Any], int | None]) -> None:
        def function(window: Any) -> Any:
            step = judge(window)
            if step is not None:
                yield Found(f"{name} is planted", step=step, confidence=0.95, remedy="mend it", sites=())

        rule = Rule(
            name=name,
            severity=Severity.CRITICAL,
            needs=("grad/*/norm",),
            causes=(),
            references=(),
            function=function,
        )
        monkeypatch.setitem(RULES, name, rule)

    from sonde.diagnose.check import all_rules

    for name in list(all_rules()):
        monkeypatch.delitem(RULES, name)
    for name in ("FIRST_LOOK_S", "SHORTEST_PAUSE_S"):
        monkeypatch.setattr(live, name, 0.0)
    monkeypatch.setattr(live, "SHARE", 1e9)
    return plant


def test_a_finding_on_abandoned_steps_is_neither_shown_nor_repeated(begin, reopen, only):
    def is_high(window: Any) -> int | None:
        steps, values = window.get("signal")
        high = steps[values > 10]
        return int(high[0]) if len(high) else None

    only("high", is_high)
    session = begin(**QUICK)
    loop = Loop(session)
    for step in range(20):
        session.log({"signal": 100.0 if step == 15 else 1.0})
        loop.train(1)
    recorded, end = sonde.open(session.path), time.monotonic() + 30
    while not recorded.live_findings().num_rows and time.monotonic() < end:
        session.flush()
    assert recorded.live_findings()["rule"].to_pylist() == ["high"]
    loop.rewind(10)
    for _ in range(12):
        session.log({"signal": 1.0})
        loop.train(1)
    run = reopen()
    assert not [row for row in run.live_findings().to_pylist() if row["rule"] == "high"]
    assert not run.findings()
    assert [finding.rule for finding in run.attempt(0).findings()] == ["high"]
    assert [row["rule"] for row in run.attempt(0).live_findings().to_pylist()] == ["high"]


def test_a_finding_that_comes_back_is_announced_again(begin, reopen, only):
    def is_high(window: Any) -> int | None:
        steps, values = window.get("signal")
        return int(steps[-1]) if len(steps) and values[-1] > 10 else None

    only("high", is_high)
    session = begin(**QUICK)
    loop = Loop(session)
    for signal, first in ((100.0, None), (1.0, 10), (100.0, None)):
        if first is not None:
            loop.rewind(first)
        for _ in range(15):
            session.log({"signal": signal})
            loop.train(1)
            session.flush()
    run = reopen()
    (row,) = [row for row in run.live_findings().to_pylist() if row["rule"] == "high"]
    assert row["step"] >= 10


def test_the_process_of_the_rules_forgets_abandoned_steps_too(begin, reopen, monkeypatch):
    monkeypatch.setattr(live, "FIRST_LOOK_S", 1e9)  # NaN is not kept waiting
    session = begin(**QUICK)
    loop = Loop(session).train(8)
    saved, recorded = loop.save(), sonde.open(session.path)

    def diverge(until: Callable[[], bool]) -> None:
        with torch.no_grad():
            loop.model[0].weight.fill_(math.nan)
        end = time.monotonic() + 60
        while not until():
            assert time.monotonic() < end, "it never happened"
            loop.train(1)
            assert session.flush()

    def found(run: sonde.Run) -> list[int]:
        return [row["step"] for row in run.live_findings().to_pylist() if row["rule"] == "nan_inf"]

    loop.train(4)
    diverge(lambda: found(recorded) == [12])
    loop.rewind(8, saved).train(20)
    assert session.flush()
    assert found(sonde.open(session.path)) == []
    diverge(lambda: loop.step > 40)
    run = reopen()
    assert found(run) == [28]
    assert found(run.attempt(0)) == [12]


def test_a_snapshot_of_an_abandoned_step_is_marked_and_left_out(begin, reopen):
    loop = Loop(begin(**QUICK))
    loop.session.watch(loop.model, loop.optimizer, snapshots=sonde.every(3))
    loop.train(8)
    assert loop.session.flush()
    run = loop.rewind(5).train(1) and reopen()
    assert run.tensors.snapshots()["step"].to_pylist() == [0, 3]
    earlier = run.attempt(0).tensors.snapshots()
    assert (earlier["step"].to_pylist(), earlier["attempt"].to_pylist()) == ([0, 3, 6], [0, 0, 0])
    assert run.attempt(0).tensors.snapshot(6)
