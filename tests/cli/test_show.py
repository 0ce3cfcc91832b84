"""`sonde show`: one run on one screen, and nothing in its names reaches the terminal."""

from __future__ import annotations

from typing import Any

import pytest


def test_shows_everything_there_is_to_know_first(sonde: Any, make_run: Any) -> None:
    run = make_run(
        config={"lr": 0.1, "model": {"width": 8}},
        tags=["night"],
        notes="with warmup",
        status="crashed",
        reason="ValueError: boom",
        events=["skipped a step"],
        facts={
            "overhead": {"host_fraction": 0.0123, "stride": 4},
            "coverage": {"modules_never_seen": ["head"], "parameters_without_gradient": []},
        },
    )
    shown = sonde("show", run).stdout
    for text in (
        "gpt/baseline", "crashed", "ValueError: boom", "20 in", "night", "with warmup", "lr", "model.width", "loss",
        "█", "2.weight", "0.4743", "skipped a step", "overhead: 1.23 %; recorded every 4 steps",
        "1 module never ran: head", "sonde query",
    ):  # fmt: skip
        assert text in shown


def test_gradients_come_largest_first_and_as_many_as_asked(sonde: Any, make_run: Any) -> None:
    make_run()
    found = sonde("show", "latest", "--json", "--top", 2).json["largest_gradients"]
    assert [row["site"] for row in found] == ["2.weight", "0.bias"]
    assert found[0]["norm"] == pytest.approx((10 * (3 / 20) ** 2) ** 0.5)


def test_scalars_are_summed_up(sonde: Any, make_run: Any) -> None:
    make_run(losses=[3.0, float("inf"), 1.0, 2.0], steps=4)
    (loss,) = sonde("show", "latest", "--json").json["scalars"]
    assert {key: loss[key] for key in ("first", "last", "min", "max", "nonfinite", "count")} == {
        "first": 3.0, "last": 2.0, "min": 1.0, "max": 3.0, "nonfinite": 1, "count": 4,
    }  # fmt: skip


def test_one_step(sonde: Any, make_run: Any) -> None:
    make_run()
    found = sonde("show", "latest", "--at", 5, "--json").json
    assert found["scalars"][0]["last"] == pytest.approx(0.5)
    assert {row["step"] for row in found["largest_gradients"]} == {5}
    assert "scalar at step 5" in sonde("show", "latest", "--at", 5).stdout


@pytest.mark.parametrize("step", [20, 1000, -1])
def test_step_that_is_not_there_is_an_error(step: int, sonde: Any, make_run: Any) -> None:
    make_run()
    assert f"no step {step}: it has steps 0 to 19" in sonde("show", "latest", f"--at={step}", code=2).stderr


@pytest.mark.parametrize("by", ["id", "name", "project/name", "folder", "prefix", "latest", "bare"])
def test_run_is_found_by(by: str, sonde: Any, make_run: Any) -> None:
    run = make_run()
    id = sonde("show", run, "--json").json["id"]
    arguments = {
        "id": ["show", id],
        "name": ["show", "baseline"],
        "project/name": ["show", "gpt/baseline"],
        "folder": ["show", "runs/latest"],
        "prefix": ["show", id[:6]],
        "latest": ["show"],
        "bare": ["runs/latest"],
    }[by]
    assert sonde(*arguments, "--json").json["id"] == id


def test_missing_run_is_one_line_with_the_next_step(sonde: Any, make_run: Any) -> None:
    make_run()
    error = sonde("show", "baselin_", code=1).stderr
    assert error.startswith('Error: no run "baselin_"')
    assert "baseline" in error
    assert error.count("\n") == 1


def test_mistyped_verb_is_answered_with_the_verb(sonde: Any, make_run: Any) -> None:
    make_run()
    assert sonde("lst", code=2).stderr == 'Error: no command "lst". Did you mean "list"? See  sonde --help\n'


def test_folder_that_is_not_a_run_is_an_error(sonde: Any, tmp_path: Any) -> None:
    (tmp_path / "something").mkdir()
    assert "not a run folder" in sonde("show", "something", code=1).stderr


HOSTILE = [
    "\x1b[2J\x1b[31mred",
    "a\nb",
    "[bold]x[/bold]",
    "../../etc",
    "</script>",
    "a\u202eb",
    "\x9bK",
    "ü 😀",
    "x" * 500,
]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_shown_and_not_obeyed(name: str, sonde: Any, make_run: Any) -> None:
    make_run(name=name, project="p", notes=name, tags=[name], config={name: name}, scalars={name: 1.0}, events=[name])
    for arguments in (["list"], ["show"], ["show", "--at", "3"]):
        shown = sonde(*arguments).stdout
        assert not set(shown) & set("\x1b\x9b\u202e\r\x07\x00")
    found = sonde("show", "--json").json
    assert (found["name"], found["notes"], found["tags"]) == (name, name, [name])
    assert name in found["config"]
    assert name in {series["name"] for series in found["scalars"]}


def test_run_with_nothing_in_it(sonde: Any, make_run: Any) -> None:
    make_run(steps=0, sites=())
    assert "gpt/baseline" in sonde("show").stdout
    found = sonde("show", "--json").json
    assert (found["scalars"], found["largest_gradients"]) == ([], [])


def damage(path: Any) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("stream", ["stats", "scalars"])
def test_damage_is_reported_and_the_rest_is_shown(stream: str, sonde: Any, make_run: Any) -> None:
    run = make_run()
    (segment,) = run.glob(f"{stream}/rank-0000/*.parquet")
    damage(segment)
    found = sonde("show", run, "--json").json
    assert any(segment.name in warning and "damaged" in warning for warning in found["warnings"])
    assert bool(found["scalars"]) == (stream == "stats")
    assert bool(found["largest_gradients"]) == (stream == "scalars")
    assert "is damaged" in sonde("show", run).stdout
    assert "gpt/baseline" in sonde("list").stdout


def test_config_of_hostile_depth_is_shown(sonde: Any, make_run: Any) -> None:
    config: dict[str, Any] = {}
    inner = config
    for _ in range(50):
        inner["a"] = {}
        inner = inner["a"]
    inner["leaf"] = 1
    make_run(config=config)
    assert "a.a.a" in sonde("show").stdout
