"""`sonde compare`: config, metrics, and the first step at which each series goes its own way."""

from __future__ import annotations

from typing import Any

import pytest


def losses(change_at: int | None = None) -> list[float]:
    values = [3.0 / (step + 1) for step in range(20)]
    return values if change_at is None else [*values[:change_at], *(value + 1 for value in values[change_at:])]


def test_same_runs_are_the_same(sonde: Any, make_run: Any) -> None:
    make_run(name="a", losses=losses())
    make_run(name="b", losses=losses())
    found = sonde("compare", "a", "b", "--json", "--exit-code").json
    assert found["first_divergence"] is None
    assert found["config"] == []
    assert "common series are the same" in sonde("compare", "a", "b").stdout


def test_first_divergence_is_found_per_series(sonde: Any, make_run: Any) -> None:
    make_run(name="a", losses=losses(), config={"lr": 0.1, "model": {"width": 8}})
    make_run(name="b", losses=losses(7), config={"lr": 0.2, "model": {"width": 8}})
    found = sonde("compare", "a", "b", "--json").json
    assert found["first_divergence"]["step"] == 7
    (loss,) = [row for row in found["divergence"] if row["series"].endswith("loss")]
    assert loss["step"] == 7
    assert (loss["a"], loss["b"]) == pytest.approx((3 / 8, 3 / 8 + 1))
    assert [row["key"] for row in found["config"]] == ["lr"]
    (metric,) = [row for row in found["metrics"] if row["name"] == "loss"]
    assert metric["difference"] == pytest.approx(1.0)
    shown = sonde("compare", "a", "b").stdout
    assert "the first at step 7" in shown
    assert "lr" in shown


def test_exit_code_is_one_for_a_difference_only_when_asked(sonde: Any, make_run: Any) -> None:
    make_run(name="a", losses=losses())
    make_run(name="b", losses=losses(3))
    sonde("compare", "a", "b", code=0)
    sonde("compare", "a", "b", "--exit-code", code=1)


def test_runs_with_nothing_in_common(sonde: Any, make_run: Any) -> None:
    make_run(name="a", steps=0, sites=())
    make_run(name="b", steps=0, sites=())
    assert "no series in common" in sonde("compare", "a", "b").stdout


def test_missing_run_is_one_line(sonde: Any, make_run: Any) -> None:
    make_run(name="a")
    assert sonde("compare", "a", "zzz", code=1).stderr.count("\n") == 1


def test_divergence_names_step_place_and_both_numbers(sonde: Any, make_run: Any) -> None:
    make_run(name="a", losses=losses())
    make_run(name="b", losses=losses(7))
    text = sonde("compare", "a", "b", "--divergence").stdout
    assert 'a and b differ first at step 7, in the scalar "loss".' in text
    assert "0.375 in a, 1.375 in b, 7.3e-01 apart; rounding in float32 explains 1e-05." in text
    assert "everything agreed in the 7 steps before" in text
    found = sonde("compare", "a", "b", "--divergence", "--json").json
    assert set(found) == {"a", "b", "first_divergence", "num_steps", "tolerance"}
    assert (found["first_divergence"]["step"], found["first_divergence"]["series"]) == (7, "loss")


def test_divergence_of_the_same_runs_is_none(sonde: Any, make_run: Any) -> None:
    make_run(name="a", losses=losses())
    make_run(name="b", losses=losses())
    assert "No difference beyond rounding in 20 common steps." in sonde("compare", "a", "b", "--divergence").stdout
    assert sonde("compare", "a", "b", "--divergence", "--json", "--exit-code").json["first_divergence"] is None


def test_divergence_has_an_exit_code_and_a_tolerance(sonde: Any, make_run: Any) -> None:
    make_run(name="a", losses=losses())
    make_run(name="b", losses=losses(3), config={"lr": 0.1})
    sonde("compare", "a", "b", "--divergence", "--exit-code", code=1)
    sonde("compare", "a", "b", "--divergence", "--exit-code", "--tolerance", "2", code=0)
    sonde("compare", "a", "b", "--divergence", code=0)


def test_runs_without_common_series_have_no_divergence(sonde: Any, make_run: Any) -> None:
    make_run(name="a", steps=0, sites=())
    make_run(name="b", steps=0, sites=())
    assert "no series in common" in sonde("compare", "a", "b", "--divergence").stdout
