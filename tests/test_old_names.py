"""Old names of settings, stats and scalars still work, and runs that hold them are read under the new ones.

`read/data/old-names-run.tar.xz` has a run that was written before stats and scalars were renamed, and what the same
version read of it, under the old names (`expected.json`). A small residual network trained for 40 steps with clipped
gradients, which explode from step 25 on, as the first of two ranks; two logged scalars have names that look like
old stats (`mine/at/norm_raw`, `mine/carry`). `make.py` in the archive is the program that wrote it.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sonde
from sonde import config
from sonde.config import Settings
from sonde.read.series.sql import VIEWS
from sonde.read.series.stats import find_stat_names
from sonde.run import Run
from sonde.schema import old_names
from sonde.schema.joined import JOINED
from sonde.schema.names import current_series, inspected_series, is_inspection
from sonde.schema.records import ScalarsRecord
from sonde.schema.stats import STATS, Sketch
from sonde.schema.window import Window
from sonde.session.observers.mirror import Mirror
from sonde.write.writer import Writer, WriterOptions

ARCHIVE = Path(__file__).parent / "read" / "data" / "old-names-run.tar.xz"


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(ARCHIVE) as opened:
        opened.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def then(unpacked: Path) -> dict[str, Any]:
    """What the version that wrote the run read of it."""
    found: dict[str, Any] = json.loads((unpacked / "expected.json").read_text())
    return found


@pytest.fixture
def run(unpacked: Path) -> Run:
    return sonde.open(unpacked / "run")


@pytest.fixture(autouse=True)
def nothing_noticed_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_noticed", set())


@pytest.fixture(autouse=True)
def seconds_to_spend() -> None:
    """No variable is set here."""


def same(column: tuple[Any, Any], expected: list[list[float]]) -> bool:
    return bool(np.array_equal(column[0], expected[0]) and np.array_equal(column[1], expected[1], equal_nan=True))


# ------------------------------------------------------------------------------------------------------------ the table


def test_every_old_name_is_gone_and_its_new_name_exists() -> None:
    fields = Settings.model_fields
    for old, new in old_names.SETTINGS.items():
        assert old not in fields
        assert new in fields
    for old, instead in old_names.REMOVED_SETTINGS.items():
        assert old not in {*fields, *old_names.SETTINGS}
        assert instead in fields
    for setting, values in old_names.SETTING_VALUES.items():
        for new in values.values():
            assert getattr(Settings.load(**{setting: new}), setting) == new
    for old, new in old_names.STATS.items():
        assert old not in {*STATS, *JOINED, *VIEWS["stats"].columns}
        assert new in STATS


def test_new_names_of_scalars_are_what_is_recorded_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("WORLD_SIZE", "2")  # the weights have a fingerprint where ranks could differ
    block = torch.nn.TransformerEncoderLayer(8, 2, 8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), block)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with sonde.init(project="p", dir=str(tmp_path / "runs"), verbose=False) as session:
        session.watch(model, optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(16, 4, 8)).square().mean().backward()
            optimizer.step()
    found = sonde.open(session.path).scalar_names
    kinds = {(parts[0], parts[-1]) for parts in (name.split("/") for name in found)}
    for (kind, old), new in old_names.INSPECTED_STATS.items():
        assert (kind, new) in kinds
        assert (kind, old) not in kinds
    for scalar, new in old_names.SCALARS.items():
        assert new in found
        assert scalar not in found


def test_no_name_is_old_and_new_at_once() -> None:
    for table in (old_names.SETTINGS, old_names.STATS, old_names.SCALARS):
        assert not table.keys() & set(table.values())
        assert len(set(table.values())) == len(table)


# ------------------------------------------------------------------------------------------------------------- old runs


@pytest.mark.parametrize(("old", "new"), old_names.STATS.items())
def test_stats_of_an_old_run_are_the_same_under_both_names(run: Run, then: Any, old: str, new: str) -> None:
    expected = {name: column for name, column in then["series"].items() if name.endswith(f"/{old}")}
    assert len(expected) == 8
    for asked in (old, new):
        found = run.lines(f"grad/*/{asked}")
        assert set(found) == {current_series(name) for name in expected}
        assert all(same(found[current_series(name)], column) for name, column in expected.items())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *((f"{kind}/*/{old}", f"{kind}/*/{new}") for (kind, old), new in old_names.INSPECTED_STATS.items()),
        *old_names.SCALARS.items(),
    ],
)
def test_scalars_of_an_old_run_are_the_same_under_both_names(run: Run, then: Any, old: str, new: str) -> None:
    expected = {
        name: column
        for name, column in then["scalars"].items()
        if name == old or ("*" in old and name.split("/")[::2] == old.split("/")[::2])
    }
    assert expected
    for asked in (old, new):
        found = run.scalar_lines(asked)
        assert set(found) == {old_names.current_scalar(name) for name in expected}
        assert all(same(found[old_names.current_scalar(name)], column) for name, column in expected.items())


def test_one_scalar_may_be_asked_for_by_its_old_name(run: Run, then: Any) -> None:
    for name in ("unit/1/carry", "unit/0/rank_of", "model/model/fingerprint"):
        (exact,) = run.scalar_lines(name, exact=True).values()
        (found,) = run.scalar_lines(name).values()
        assert same(exact, then["scalars"][name])
        assert same(found, then["scalars"][name])


def test_scalars_of_the_user_keep_their_names(run: Run, then: Any) -> None:
    found = run.scalar_lines("mine/*")
    assert set(found) == {"mine/at/norm_raw", "mine/carry"}
    assert all(same(column, then["scalars"][name]) for name, column in found.items())
    assert set(run.scalar_lines("*carry")) == {"mine/carry", "unit/1/skip_gain"}


def test_two_series_never_get_the_same_name(run: Run) -> None:
    assert len(set(run.scalar_names)) == len(run.scalar_names)


def test_a_glob_still_finds_what_it_found(run: Run) -> None:
    assert {name.split("/")[2] for name in run.lines("grad/0.weight/below_fp16*")} == {
        "fp16_underflow_fraction",
        "below_fp16_normal",
    }


def test_rules_find_in_an_old_run_what_they_found(run: Run, then: Any) -> None:
    window = run.window(["grad/*/norm_preclip"])
    assert [finding.rule for finding in run.findings()] == then["findings"]
    assert run.health()["score"].to_pylist()[-1] == pytest.approx(then["health"])
    for old in ("grad/0.weight/norm_raw", "unit/1/carry", "model/model/fingerprint"):
        assert len(window.get(old)[0])
        assert window.get(old) == window.get(current_series(old))
    assert len(window.names("unit/*/skip_gain")) == 1
    assert inspected_series("model/weights/fingerprint") in window.series


def test_recorded_findings_name_series_of_today(run: Run, then: Any) -> None:
    found = {row["rule"]: json.loads(row["evidence"]) for row in run.live_findings().to_pylist()}
    assert {rule: [one["series"] for one in evidence] for rule, evidence in found.items()} == {
        rule: [current_series(name) for name in names] for rule, names in then["evidence"].items()
    }
    assert found["exploding_gradients"][0]["series"] == "grad/3.weight/norm_preclip"
    (row,) = run.sql("select details from anomalies where anomaly_type = 'exploding_gradients'").to_pylist()
    assert "grad/3.weight/norm_preclip" in row["details"]


def test_sql_knows_both_names_of_a_column(run: Run, then: Any) -> None:
    query = "select step, {0} from stats where kind = 'grad' and site = '0.weight' and {0} is not null order by step"
    for old, new in old_names.STATS.items():
        answers = [run.sql(query.format(name)) for name in (old, new)]
        assert [answer.column_names[1] for answer in answers] == [old, new]
        assert answers[0][old].to_pylist() == answers[1][new].to_pylist() == then["series"][f"grad/0.weight/{old}"][1]
    assert not old_names.STATS.keys() & set(run.sql("select * from stats limit 1").column_names)
    names = run.sql("select distinct name from scalars where name like 'unit/1/%'")["name"].to_pylist()
    assert sorted(names) == ["unit/1/saturated", "unit/1/skip_gain"]


def test_heat_maps_and_lines_take_both_names(run: Run) -> None:
    sites = [number for number, site in run.catalog.sites.items() if site.kind == "grad"]
    for old, new in old_names.STATS.items():
        heats = [run.heat(stat, sites) for stat in (old, new)]
        (file,) = heats[0].files(0, 39)
        assert np.array_equal(*(heat.cells(file).places for heat in heats))
        lines = [run.site_lines(stat, sites, range(40), max_rows=10**6)[0] for stat in (old, new)]
        assert all(np.array_equal(lines[0][site], lines[1][site], equal_nan=True) for site in sites)


def test_the_dashboard_takes_both_names(unpacked: Path) -> None:
    from sonde.show.web.query import Query

    known = ("norm", "norm_preclip")
    assert Query("stat=norm_raw").stat(known) == Query("stat=norm_preclip").stat(known) == "norm_preclip"


def test_a_heatmap_is_drawn_under_both_names(run: Run) -> None:
    from sonde.show.pooled import pool

    pictures = [pool(run, f"grad/*/{stat}", width=20) for stat in ("norm_raw", "norm_preclip")]
    assert np.isfinite(pictures[0].cells).any()
    assert np.array_equal(pictures[0].cells, pictures[1].cells)


def test_lines_are_drawn_and_exported_under_both_names(run: Run, then: Any) -> None:
    from sonde.show.export.source import sources
    from sonde.show.plot.series import read_series

    for name in ("grad/0.weight/norm_raw", "unit/1/carry"):
        (line,) = read_series(run, [name], None)
        assert line.name == current_series(name)
        assert same((line.steps, line.values), (then["series"] | then["scalars"])[name])
    (source,) = sources(run, ["stats"], series=["grad/0.weight/norm_raw"])
    (table,) = source.pieces()
    assert set(table["stat"].to_pylist()) == {"norm_preclip"}
    assert table["value"].to_pylist() == then["series"]["grad/0.weight/norm_raw"][1]


def test_an_old_run_is_compared_with_itself(run: Run) -> None:
    compared = [sonde.compare(run, run, stats=f"grad/*/{stat}") for stat in ("norm_raw", "norm_preclip")]
    assert compared[0].divergence.equals(compared[1].divergence)
    assert compared[0].divergence.num_rows == 8 + len(compared[0].metrics)


def test_a_resumed_old_run_continues_its_series(unpacked: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(unpacked / "run", tmp_path / "run")
    before = sonde.open(folder).scalar_lines("unit/1/skip_gain")["unit/1/skip_gain"]
    writer = Writer(folder, WriterOptions(flush_interval_s=0.01, system_interval_s=0), resume=True)
    ids, step = np.array([writer.scalar_id("unit/1/skip_gain")], np.int32), writer.next_step
    writer.put(ScalarsRecord(ids, np.array([step]), np.zeros(1), np.array([0.25])), 50, step=step)
    writer.close("finished", deadline_s=20)
    run = sonde.open(folder)
    steps, values = run.scalar_lines("unit/1/carry")["unit/1/skip_gain"]
    assert run.scalar_names.count("unit/1/skip_gain") == 1
    assert steps.tolist() == [*before[0].tolist(), step]
    assert values.tolist() == [*before[1].tolist(), 0.25]


# --------------------------------------------------------------------------------------------------- names in new code


def test_a_sketch_and_a_stat_answer_to_their_old_names() -> None:
    rows = Sketch().rows.copy()
    rows[: len(rows)] = 4.0
    sketch = Sketch(rows)
    for old, new in old_names.STATS.items():
        assert find_stat_names(old) == [new]
        np.testing.assert_equal(getattr(sketch, old), getattr(sketch, new))


def test_a_mirror_takes_old_names() -> None:
    from sonde.schema.names import Series
    from sonde.schema.records import Site
    from sonde.session.observers.values import MirrorValues

    assert Mirror(to="wandb", stats=["grad/*/norm_raw"]).stats == ["grad/*/norm_raw"]
    values = MirrorValues([Series("grad", "*", "norm_raw")], "unit/*/carry")
    values.add_site(0, Site(kind="grad", name="w"))
    values.add_scalar(0, "unit/1/skip_gain")
    assert values._series == {"norm_preclip": {0: "grad/w/norm_preclip"}}
    assert values._scalars == {0: "unit/1/skip_gain"}


def test_a_window_of_the_user_keeps_what_looks_old() -> None:
    column = np.arange(2), np.ones(2)
    assert Window(scalars={"mine/at/norm_raw": column}).get("mine/at/norm_raw") is column


def test_the_fingerprint_is_still_listed_apart_from_what_was_logged() -> None:
    assert is_inspection("model/weights/fingerprint")
    assert not is_inspection("model/weights/norm")


# ------------------------------------------------------------------------------------------------------------- settings


def test_old_settings_in_a_file_work_and_are_noticed_once(capsys: pytest.CaptureFixture[str]) -> None:
    Path("sonde.yaml").write_text("finite: false\nsystem: false\ndiagnose: false\nmode: 'on'\n")
    for _ in range(2):
        settings = Settings.load()
        assert (settings.check_finite, settings.system_metrics, settings.live_rules) == (False, False, False)
        assert settings.mode == "enabled"
        assert settings.origin("check_finite") == settings.origin("finite") == f"file {Path('sonde.yaml').absolute()}"
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 4
    for line, (old, new) in zip(lines, [*old_names.SETTINGS.items(), ("mode=on", "mode=enabled")], strict=True):
        where = f"(in {Path('sonde.yaml').absolute()})"
        assert line == f"sonde: the setting {old} {where} is now called {new}. The old name still works."


def test_old_variables_work_and_are_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"FINITE": "0", "SYSTEM": "no", "DIAGNOSE": "false", "MODE": "on"}.items():
        monkeypatch.setenv(f"SONDE_{name}", value)
    settings = Settings.load()
    assert (settings.check_finite, settings.system_metrics, settings.live_rules) == (False, False, False)
    assert settings.mode == "enabled"
    assert settings.origin("check_finite") == "env SONDE_FINITE"
    assert settings.origin("live_rules") == "env SONDE_DIAGNOSE"
    err = capsys.readouterr().err
    assert "SONDE_FINITE is now called SONDE_CHECK_FINITE" in err
    assert "SONDE_MODE=on is now called SONDE_MODE=enabled" in err


def test_old_keywords_work_and_are_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings.load(finite=False, mode="on").changed(diagnose=False)
    assert (settings.check_finite, settings.live_rules, settings.mode) == (False, False, "enabled")
    assert settings.origin("check_finite") == "keyword"
    assert capsys.readouterr().err.splitlines() == [
        "sonde: the setting finite is now called check_finite. The old name still works.",
        "sonde: the setting mode=on is now called mode=enabled. The old name still works.",
        "sonde: the setting diagnose is now called live_rules. The old name still works.",
    ]


def test_a_removed_setting_is_accepted_everywhere_and_says_what_to_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("sonde.yaml").write_text("free_steps: 10\n")
    monkeypatch.setenv("SONDE_FREE_STEPS", "20")
    settings = Settings.load(free_steps="any value")
    assert settings.model_dump() == Settings().model_dump()
    assert {setting.origin for setting in settings.explain()} == {"default"}
    where = Path("sonde.yaml").absolute()
    assert capsys.readouterr().err.splitlines() == [
        f"sonde: the setting free_steps (in {where}) no longer has an effect. Use budget_seconds instead.",
        "sonde: the setting SONDE_FREE_STEPS no longer has an effect. Use SONDE_BUDGET_SECONDS instead.",
    ]


def test_init_takes_old_keywords(tmp_path: Path) -> None:
    with sonde.init(project="p", dir=str(tmp_path / "runs"), verbose=False, system=False, diagnose=False) as session:
        sonde.log({"loss": 1.0})
    assert isinstance(session, sonde.Session)
    assert not session.settings.system_metrics
    assert not session.settings.live_rules
    assert sonde.open(session.path).system().num_rows == 0


def test_the_nearer_place_wins_whatever_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("sonde.yaml").write_text("check_finite: false\nlive_rules: false\n")
    monkeypatch.setenv("SONDE_FINITE", "1")
    assert Settings.load().check_finite
    assert Settings.load(diagnose=True).live_rules


def test_the_new_name_wins_in_one_place() -> None:
    Path("sonde.yaml").write_text("check_finite: true\nfinite: false\n")
    assert Settings.load().check_finite


def test_an_empty_old_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SONDE_FINITE", "")
    assert Settings.load().origin("check_finite") == "default"


def test_a_wrong_value_under_an_old_name_is_refused_with_its_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SONDE_SYSTEM", "perhaps")
    with pytest.raises(sonde.errors.SettingsError, match="SONDE_SYSTEM is 'perhaps'"):
        Settings.load()


def test_other_ranks_and_a_closed_stderr_say_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert not Settings.load(finite=False).check_finite
    monkeypatch.setenv("RANK", "0")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr", None)
    assert not Settings.load(finite=False).check_finite
