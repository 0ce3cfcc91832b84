"""The window that is kept during training is the one that is read from disk afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import sonde
from sonde.diagnose.rolling import Rolling
from sonde.schema.joined import JOINED
from sonde.schema.names import matches, matches_stat, split_pattern
from sonde.schema.records import ScalarsRecord, Site, StatsRecord, SystemSample
from sonde.schema.sketch import SUMSQ, N, empty_rows
from sonde.schema.stats import STATS
from sonde.write.items import NewScalar, NewSite
from sonde.write.writer import Writer, WriterOptions

PATTERNS = (
    *("grad/*/norm", "param/*/rms", "update/*/ratio", "update/*/second_moment_lag", "update/*/grad_cosine"),
    *(
        "update/*/moment_cosine",
        "act/*/zero_fraction",
        "grad/*/fp16_underflow_fraction",
        "grad/*/clip_factor",
        "optim/*/rms",
    ),
)


class Copying:
    """An observer that fills columns, in batches of a few records."""

    def __init__(self) -> None:
        self.rolling = Rolling(PATTERNS)
        self.waiting: list[Any] = []

    def begin(self, sites: Any, scalars: Any, content: Any) -> None: ...

    def on_item(self, item: Any) -> None:
        if isinstance(item, NewSite):
            self.rolling.sites[item.id] = item.site
        elif isinstance(item, NewScalar):
            self.rolling.scalar_names[item.id] = item.name
        elif isinstance(item, StatsRecord | ScalarsRecord | SystemSample):
            self.waiting.append(item)

    def poll(self, now: float) -> list[Any]:
        self.rolling.add(self.waiting)
        self.waiting = []
        return []

    def finish(self, status: str) -> list[Any]:
        return self.poll(0.0)


def train(session: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    session.watch(model, optimizer, optim=True)
    for step in range(130):
        loss = nn.functional.mse_loss(model(torch.randn(8, 6)), torch.zeros(8, 2))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        session.log({"loss": loss, **({"val_loss": float(step)} if step % 10 == 0 else {})})


def test_live_columns_equal_the_window_of_the_finished_run(monkeypatch: Any) -> None:
    observer = Copying()
    monkeypatch.setattr("sonde.session.session.RulesProcess", lambda *_, **__: observer)
    with sonde.init(project="rolling", dir="runs", verbose=False, system_metrics=False) as session:
        train(session)
    live, read = observer.rolling.window({}), sonde.open(Path(session.path)).window(PATTERNS)
    assert set(live.series) == set(read.series)
    assert {name.stat for name in live.series} >= {pattern.rpartition("/")[2] for pattern in PATTERNS}
    for name, (steps, values) in read.series.items():
        np.testing.assert_array_equal(live.series[name][0], steps, err_msg=str(name))
        np.testing.assert_array_equal(live.series[name][1], values, err_msg=str(name))
    assert set(live.scalars) == set(read.scalars)
    for name, (steps, values) in read.scalars.items():
        np.testing.assert_array_equal(live.scalars[name][0], steps, err_msg=name)
        np.testing.assert_array_equal(live.scalars[name][1], values, err_msg=name)


def test_sites_that_come_and_go_keep_their_own_steps() -> None:
    rolling = Rolling(["grad/*/norm"])
    rolling.sites.update({id: Site(kind="grad", name=f"expert.{id}") for id in range(100)})
    random = np.random.default_rng(0)
    expected: dict[str, list[int]] = {}
    records = []
    for step in range(90):
        ids = np.sort(random.choice(100, 4, replace=False)).astype(np.int32)
        rows = empty_rows(4)
        rows[:, N], rows[:, SUMSQ] = 1, (step + 1.0) ** 2
        records.append(StatsRecord.without_hist(step, 0.0, ids, rows))
        for id in ids:
            expected.setdefault(f"expert.{id}", []).append(step)
    rolling.add(records)
    found = {site: (steps.tolist(), values.tolist()) for site, steps, values in rolling.window({}).by_site("grad")}
    assert found == {site: (steps, [step + 1.0 for step in steps]) for site, steps in expected.items()}


def test_a_writer_without_an_observer_is_as_before(tmp_path: Path) -> None:
    from sonde.write.folder import create_run

    run = create_run(tmp_path / "runs", project="p", name="n")
    Writer(run, WriterOptions(system_interval_s=0.0)).close("finished")
    assert sonde.open(run).live_findings().num_rows == 0


def test_the_stats_of_a_site_are_those_of_every_pattern_that_matches() -> None:
    """Against the obvious way, which tries every pattern with every stat at every site."""
    patterns = ["grad/*/norm", "*/layers.*/rms", "update/head/*", "param/*/norm_raw", "*/*/[mr]*", "grad/head/ratio"]
    rolling = Rolling(patterns)
    for kind in ("grad", "param", "update", "act"):
        for name in ("layers.0.weight", "head", "*", "layers.[0]"):
            expected = [
                stat
                for pattern in map(split_pattern, patterns)
                if matches(pattern.kind, kind) and matches(pattern.site, name)
                for stat in (*STATS, *(j.name for j in JOINED.values() if j.kind == kind))
                if matches_stat(pattern.stat, stat)
            ]
            assert rolling._stats_of(kind, name) == tuple(dict.fromkeys(expected))
