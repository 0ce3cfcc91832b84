"""Scores of layers and of the run: what costs, what must not, and that no scale moves them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import sonde
from sonde.diagnose.finding import Finding, Severity
from sonde.diagnose.health import RUN, Health, grade, health
from sonde.schema.names import Series
from sonde.schema.window import Window

STEPS = np.arange(40)
LAYERS = ("0", "2", "4")


def window(
    change: Mapping[str, float | np.ndarray] | None = None, *, loss_scale: float = 1.0, loss: float = 1.0
) -> Window:
    """Three healthy layers; `change` replaces series by name."""
    healthy = {
        **{f"grad/{layer}.weight/norm": 0.1 for layer in LAYERS},
        **{f"param/{layer}.weight/norm": 10.0 for layer in LAYERS},
        **{f"update/{layer}.weight/norm": 0.01 for layer in LAYERS},
        **{f"grad/{layer}.weight/nonfinite_fraction": 0.0 for layer in LAYERS},
        "act/1/zero_fraction": 0.5,
        **(change or {}),
    }
    series = {Series(*name.split("/")): (STEPS, np.broadcast_to(value, 40) * 1.0) for name, value in healthy.items()}
    for name, (steps, values) in list(series.items()):
        if name.kind == "grad" and name.stat == "norm":
            series[name] = (steps, values * loss_scale)
    return Window(series, {"loss": (STEPS, np.full(40, loss * loss_scale))})


def finding(severity: str, *, step: int = 10, last_step: int = 39, sites: tuple[str, ...] = ()) -> Finding:
    return Finding(
        rule="planted",
        severity=Severity(severity),
        confidence=1.0,
        step=step,
        last_step=last_step,
        message="",
        sites=sites,
    )


def score(found: Health, site: str, step: int = -1) -> float:
    return float(found.scores[found.sites.index(site), step])


def test_a_healthy_run_has_full_marks_everywhere() -> None:
    found = health(window())
    assert found.sites[0] == RUN
    assert set(found.sites) == {RUN, "0", "1", "2", "4"}
    assert (found.scores == 100.0).all()
    assert found.last == 100.0


def test_the_scale_of_the_loss_moves_no_score() -> None:
    ill = {"grad/0.weight/norm": 1e-5, "unit/1/dead": 0.8}
    assert np.array_equal(health(window(ill)).scores, health(window(ill, loss_scale=1000.0)).scores)
    assert score(health(window(ill)), "0") < 80


@pytest.mark.parametrize(
    ("site", "change"),
    [
        ("0", {"grad/0.weight/norm": 1e-6}),
        ("4", {"grad/4.weight/norm": 1e4}),
        ("0", {"grad/0.weight/norm": 0.0}),
        ("2", {"update/2.weight/norm": 30.0}),
        ("1", {"unit/1/dead": 0.9}),
        ("1", {"unit/1/saturated": 0.9}),
        ("1", {"act/1/zero_fraction": 0.99}),
        ("2", {"grad/2.weight/nonfinite_fraction": 0.001}),
    ],
)
def test_each_way_of_being_ill_costs_its_own_layer_and_the_run(site: str, change: dict[str, float]) -> None:
    found = health(window(change))
    assert score(found, site) < 70
    assert 30 <= score(found, RUN) < 95
    assert all(score(found, other) == 100 for other in found.sites if other not in (RUN, site))


@pytest.mark.parametrize(
    "change",
    [
        {"update/2.weight/norm": 1e-9},  # a learning rate that has decayed
        {"grad/0.weight/norm": 0.004},  # a factor of 25 below the median
        {"unit/1/dead": 0.3},
        {"grad/2.bias/norm": 1e-9, "param/2.bias/norm": 0.01},  # a bias before a norm layer: rounding noise
        {  # an adapter that begins at zero
            "param/0.weight/norm": np.minimum(np.arange(40) / 20, 1.0),
            "update/0.weight/norm": np.where(np.arange(40) < 20, 0.05, 1e-3),
        },
    ],
)
def test_what_is_not_an_illness_costs_nothing(change: dict[str, float]) -> None:
    assert (health(window(change)).scores == 100.0).all()


def test_a_finding_costs_at_its_steps_and_its_layers_only() -> None:
    found = health(window(), [finding("critical", step=10, last_step=19, sites=("2.weight",))])
    run, named, other = (found.scores[found.sites.index(site)] for site in (RUN, "2", "0"))
    assert run[[9, 10, 19, 20]].tolist() == pytest.approx([100, 15, 15, 100])
    assert named[[9, 10, 19, 20]].tolist() == pytest.approx([100, 30, 30, 100])
    assert (other == 100).all()


def test_a_remark_is_free_and_a_warning_is_not() -> None:
    assert health(window(), [finding("info")]).last == 100
    assert health(window(), [finding("warning")]).last == pytest.approx(68)


ILL = {"grad/0.weight/norm": 1e-6, "unit/1/dead": 0.9, "update/2.weight/norm": 30.0, "act/1/zero_fraction": 0.99}


@pytest.mark.parametrize("severity", ["info", "warning", "critical"])
@pytest.mark.parametrize("change", [{}, ILL, {"update/2.weight/norm": 30.0}])
@pytest.mark.parametrize("confidence", [0.0, 0.4, 1.0])
def test_the_score_of_a_run_never_contradicts_its_findings(
    severity: str, change: dict[str, float], confidence: float
) -> None:
    found = health(window(change), [replace(finding(severity), confidence=confidence)])
    assert [str(grade(one)) for one in found.scores[0, 10:]] == [severity] * 30
    assert {str(grade(one)) for one in found.scores[0, :10]} == {"info"}


def test_a_finding_after_the_last_recorded_step_counts_at_that_step() -> None:
    crash = finding("critical", step=57, last_step=57)
    assert health(window(), [crash]).last < 50


def test_a_nonfinite_loss_leaves_no_health() -> None:
    assert health(window(loss=np.nan)).last == 0


def test_nothing_measured_means_no_score() -> None:
    found = health(Window())
    assert np.isnan(found.last)
    assert found.scores.shape == (1, 0)


def train(scale: float) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with sonde.init(project="health", dir="runs", verbose=False) as session:
        session.watch(model, optimizer)
        for _ in range(60):
            x = torch.randn(32, 8)
            loss = scale * (model(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log({"loss": loss})
    return Path(session.path)


def test_a_real_run_has_a_table_of_scores_that_the_scale_of_its_loss_does_not_change() -> None:
    plain, scaled = (sonde.open(train(scale)).health() for scale in (1.0, 1000.0))
    assert plain.schema.names == ["step", "site", "score"]
    assert {"", "0", "2", "4"} <= set(plain["site"].to_pylist())
    assert plain.select(["step", "site"]).equals(scaled.select(["step", "site"]))
    np.testing.assert_allclose(plain["score"].to_numpy(), scaled["score"].to_numpy(), atol=0.5)
    assert plain["score"].to_numpy().min() > 90
