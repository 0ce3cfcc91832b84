"""Every answer against what the run itself says, and against the types the front-end is written with."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from big_run import Plan, big_run
from sonde.run import Run
from sonde.show.coverage import overhead_share
from sonde.show.web.runs import RunTable
from sonde.show.web.wire import pack, read_binary, report_key, to_json
from sonde.write.runfile import RunFile

API_TS = Path(__file__).parents[3] / "web" / "src" / "lib" / "api.ts"


def _fields(interface: str) -> set[str]:
    """Field names of an interface in api.ts, with those it extends."""
    text = re.sub(r"/\*\*.*?\*/", "", API_TS.read_text(encoding="utf-8"), flags=re.DOTALL)
    match = re.search(rf"export interface {interface}(?: extends (\w+))? {{\n(.*?)\n}}", text, re.DOTALL)
    assert match, interface
    own = set(re.findall(r"^  (\w+)\??:", match[2], re.MULTILINE))
    return own | (_fields(match[1]) if match[1] else set())


def _matches(interface: str, answer: dict[str, Any], *, decoded: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    assert _fields(interface) - decoded == set(answer) - {"buffers"}, interface


def test_runs_list(page: Any) -> None:
    page.get("/api/runs")
    page.answers.briefs.tasks.wait(10.0)
    answer = page.get("/api/runs")
    _matches("Runs", answer)
    (row,) = answer["runs"]
    _matches("RunRow", row)
    _matches("Brief", row["brief"])
    assert row["brief"]["loss"]["name"] == "loss"
    assert len(row["brief"]["loss"]["steps"]) <= 64
    assert (row["brief"]["health"], row["brief"]["findings"]["warning"]) == (87.5, 1)
    assert row["config"]["optim.lr"] == "0.0003"


def test_detail(page: Any, api: str) -> None:
    answer = page.get(api)
    _matches("RunDetail", answer)
    assert answer["last_step"] == 2999
    assert answer["warnings"] == []
    names = {scalar["i"]: scalar["name"] for scalar in page.get(f"{api}/sites")["scalars"]}
    assert {key: names[i] for key, i in answer["headline"].items()} == {
        "loss": "loss",
        "val_loss": "val_loss",
        "lr": "optim/lr",
    }


def test_a_crash_is_shown_with_the_last_recorded_step(open_page: Any, tmp_path: Path) -> None:
    """The heartbeat is a few seconds behind what was recorded."""
    run = big_run(tmp_path, Plan(num_tensors=1, num_steps=20, status="running"))
    file = RunFile.load(run)
    file.write(heartbeat={"time": 1.0, "step": 4, "acknowledged": {}, "dropped": {}, "degraded": ""})
    page = open_page(tmp_path)
    page.get("/api/runs")
    page.answers.briefs.tasks.wait(10.0)
    (row,) = page.get("/api/runs")["runs"]
    for answer in (row, page.get(f"/api/runs/{row['id']}")):
        assert answer["status"] == "crashed"
        assert answer["reason"].endswith("after step 19")


@pytest.mark.parametrize(
    ("overhead", "share"),
    [
        ({"fraction": 0.0, "uncertainty": None}, None),
        ({"fraction": 0.0, "uncertainty": 0.01}, 0.0),
        ({"fraction": 0.02, "uncertainty": None}, 0.02),
        ({"fraction": None, "unknown": "every step was recorded"}, None),
        ({}, None),
        ("odd", None),
    ],
)
def test_an_overhead_that_was_not_measured_is_not_zero(overhead: Any, share: float | None) -> None:
    assert overhead_share(overhead) == share


def test_sites_are_in_order_of_depth_and_the_tree_holds_each_once(page: Any, api: str, known_run: Path) -> None:
    answer = page.get(f"{api}/sites")
    columns = answer["columns"]
    assert _fields("Sites") - {"sites", "byIndex"} == set(answer) - {"columns", "dtypes", "types"}
    assert _fields("Site") == set(columns)
    assert len(columns["i"]) == Run(known_run).sites().num_rows == 32
    grads = [
        name for kind, name in zip(columns["kind"], columns["name"], strict=True) if answer["kinds"][kind] == "grad"
    ]
    assert grads[:2] == ["layers.0.ln_1.weight", "layers.0.attn.q.weight"]
    _matches("Module", answer["modules"][0])
    assert sorted(i for module in answer["modules"] for i in module["sites"]) == sorted(columns["i"])
    for module in answer["modules"][1:]:
        assert module["parent"] < module["n"]
    _matches("Stat", answer["stats"]["grad"][0])
    _matches("Scalar", answer["scalars"][0])


def test_lines_are_the_recorded_values_while_they_are_few(page: Any, api: str, known_run: Path) -> None:
    header, buffers = page.get(f"{api}/lines?i=9,3&stat=rms&from=2000&to=2400")
    _matches("Lines", header, decoded={"steps"})
    assert _fields("LineSeries") - {"values", "nonfinite"} == set(header["series"][0]) - {"num_nonfinite"}
    expected = Run(known_run).stats("grad/layers.1.attn.q.weight/rms", steps=range(2000, 2401))["value"].to_numpy()
    assert header["steps_per_bucket"] == 0
    assert np.array_equal(buffers["values"][:401], expected)
    assert header["series"][0]["name"] == "grad/layers.1.attn.q.weight/rms"


@pytest.mark.parametrize("points", [2, 10, 333])
def test_long_lines_keep_the_lowest_and_highest_of_each_stretch(
    page: Any, api: str, known_run: Path, points: int
) -> None:
    header, buffers = page.get(f"{api}/lines?i=9&stat=rms&points={points}")
    values = Run(known_run).stats("grad/layers.1.attn.q.weight/rms")["value"].to_numpy()
    width = header["steps_per_bucket"]
    drawn = buffers["values"].reshape(-1, 2)
    for n in range(len(drawn)):
        own = values[n * width : (n + 1) * width]
        assert sorted(drawn[n].tolist()) == [own.min(), own.max()]
    assert buffers["values"].max() == values.max()


def test_a_line_marks_where_a_part_of_the_tensor_is_not_finite(page: Any, api: str) -> None:
    """Tensor 5 has one NaN at step 1777; the norm of the rest is a number like any other."""
    header, buffers = page.get(f"{api}/lines?i=5&stat=norm&points=4000")
    assert header["series"][0]["num_nonfinite"] == 1
    assert buffers["nonfinite"].tolist() == [1777.0]
    assert np.isfinite(buffers["values"]).all()
    assert page.get(f"{api}/lines?i=5&stat=nonfinite_fraction&points=4000")[1]["nonfinite"].tolist() == []


def test_scalars_and_their_odd_values(page: Any, api: str, known_run: Path) -> None:
    header, buffers = page.get(f"{api}/scalars?i=0,1")
    assert [series["name"] for series in header["series"]] == ["loss", "val_loss"]
    assert buffers["values"][0] == Run(known_run).scalars("loss")["value"][0].as_py() or header["steps_per_bucket"] > 0


def test_cell_is_exact(page: Any, api: str, known_run: Path) -> None:
    answer = page.get(f"{api}/cell?i=9&step=2345")
    _matches("Cell", answer)
    table = Run(known_run).stats("grad/layers.1.attn.q.weight/rms", steps=2345)
    assert answer["stats"]["rms"] == table["value"][0].as_py()
    assert answer["recorded_step"] == 2345
    assert page.get(f"{api}/cell?i=5&step=1777")["stats"]["nan"] == 1


def test_histograms_sum_to_what_was_recorded(page: Any, api: str) -> None:
    header, buffers = page.get(f"{api}/hist?i=3&w=20")
    _matches("Hist", header, decoded={"counts", "totals", "zeros", "nonfinite"})
    counts = buffers["counts"].reshape(header["num_columns"], header["num_bins"])
    assert abs(counts.sum() - 12 * 64 * 64) < 100  # every 256th of 3,000 steps, 64 × 64 elements
    assert buffers["totals"].sum() == 3000 * 64 * 64


def test_findings_link_to_what_shows_them(page: Any, api: str) -> None:
    answer = page.get(f"{api}/findings")
    _matches("Findings", answer)
    nan = next(finding for finding in answer["findings"] if finding["rule"] == "nan_inf")
    _matches("Finding", nan)
    _matches("Evidence", nan["evidence"][0])
    assert nan["step"] == 1777
    assert nan["links"][0] is not None
    assert nan["state"] == "open"


def test_health_falls_where_the_nan_is(page: Any, api: str) -> None:
    header, buffers = page.get(f"{api}/health")
    assert {"last", "layers"} <= set(header)
    assert buffers["values"].min() < buffers["values"][0]
    assert header["layers"] == sorted(header["layers"], key=lambda layer: layer["score"])


def test_very_long_runs_are_shown_as_training_judged_them(page: Any, api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sonde.show.web.caches import diagnoses

    monkeypatch.setattr(diagnoses, "MAX_ROWS", 0)
    monkeypatch.setattr(diagnoses, "MAX_MERGED_ROWS", 1000)
    answer = page.get(f"{api}/findings")
    assert answer["source"] == "recorded"
    assert [finding["rule"] for finding in answer["findings"]] == ["loss_plateau"]
    header, buffers = page.get(f"{api}/health")
    assert len(buffers["steps"]) == 750  # four steps make one
    assert header["last"] is not None


def test_system_and_events(page: Any, api: str) -> None:
    header, buffers = page.get(f"{api}/system")
    names = [series["name"] for series in header["series"]]
    assert names == ["throughput (steps/s)", "cpu_percent", "rss_mb"]
    speed = buffers["values"][: len(buffers["steps"])]
    assert np.allclose(speed[np.isfinite(speed)], 10.0, rtol=0.01)
    (event,) = page.get(f"{api}/events")["events"]
    _matches("RunEvent", event)


def test_flow_is_the_gradient_along_depth(page: Any, api: str, known_run: Path) -> None:
    header, buffers = page.get(f"{api}/flow?w=10")
    _matches("Flow", header, decoded={"rms", "pressure", "peak", "act_rms", "act_odd"})
    shape = len(header["layers"]), header["num_columns"]
    rms = buffers["rms"].reshape(shape)
    values = Run(known_run).stats("grad/layers.0.ln_1.weight/rms")["value"].to_numpy()[: header["steps_per_column"]]
    assert rms[0, 0] == pytest.approx(np.sqrt(np.square(values).mean()), rel=2e-3)
    assert np.isinf(buffers["peak"].reshape(shape)[5]).sum() == 1
    assert header["attention"][0]["path"] == "layers.0.attn"
    assert np.isfinite(buffers["act_rms"]).all()
    assert not buffers["act_odd"].any()


def test_compare(page: Any, api: str) -> None:
    id = api.rpartition("/")[2]
    answer = page.get(f"/api/compare?ids={id},{id}")
    _matches("Compare", answer)
    _matches("CompareRow", answer["metrics"][0])
    _matches("Divergence", answer["divergences"][0])
    assert answer["config"] == []
    assert answer["divergences"][0]["first"] is None


def test_answers_are_compressed_and_never_stored(page: Any, api: str) -> None:
    response = page.client.get(f"{api}/sites")
    assert response.headers["content-encoding"] == "gzip"
    assert response.headers["cache-control"] == "no-store"
    plain = page.client.get(f"{api}/sites", headers={"Accept-Encoding": "identity"})
    assert plain.json() == response.json()


def test_an_answer_that_has_not_changed_is_not_worked_out_again(page: Any, api: str) -> None:
    page.get(f"{api}/lines?i=1&stat=rms")
    before = len(page.answers.cache)
    page.get(f"{api}/lines?i=1&stat=rms")
    assert len(page.answers.cache) == before == 1


def test_a_report_holds_the_same_answers(page: Any, api: str) -> None:
    paths = [f"{api}/sites", f"{api}/heat?w=50&kind=grad&stat=rms"]
    packed = pack({path: page.answers.get(path).body for path in paths})
    header, _ = read_binary(packed)
    start = len(packed) - sum(length for _, _, length in header["answers"])
    for (key, offset, length), path in zip(header["answers"], paths, strict=True):
        assert key == report_key(path)
        assert packed[start + offset : start + offset + length] == page.answers.get(path).body


def test_json_has_no_bare_nan_at_any_depth() -> None:
    deep: Any = float("inf")
    for _ in range(30):
        deep = {"a": [deep, np.float64("nan"), {"b": -np.inf}]}
    text = to_json(deep).decode()
    assert "Infinity" in text
    json.loads(text, parse_constant=lambda constant: pytest.fail(constant))


def test_ids_are_the_same_after_a_restart(known_run: Path) -> None:
    first, second = (RunTable([known_run.parent.parent]).entries() for _ in range(2))
    assert list(first) == list(second)
    assert list(RunTable([known_run]).entries()) == list(first)
