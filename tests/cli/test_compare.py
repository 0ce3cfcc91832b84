"""`sonde compare`: config, metrics, and the first step at which each series goes its own way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from sonde.schema.snapshots.tensors import HostTensor, Snapshot
from sonde.write.tensors.store import open_store


def losses(change_at: int | None = None) -> list[float]:
    values = [3.0 / (step + 1) for step in range(20)]
    return values if change_at is None else [*values[:change_at], *(value + 1 for value in values[change_at:])]


def test_same_runs_are_the_same(sonde: Any, make_run: Any) -> None:
    make_run(name="a", losses=losses())
    make_run(name="b", losses=losses())
    found = sonde("compare", "a", "b", "--json", "--exit-code").json
    assert found["first_divergence"] is None
    assert found["config"] == []
    assert "common series agree" in sonde("compare", "a", "b").stdout


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
    assert "Exit code" not in sonde("compare", "a", "b", code=0).stderr
    answer = sonde("compare", "a", "b", "--exit-code", code=1)
    assert answer.stderr == "Exit code 1: 1 series differs, the first at step 3.\n"


def test_exit_code_says_what_decided_it(sonde: Any, make_run: Any) -> None:
    make_run(name="a", losses=losses(), config={"lr": 0.1})
    make_run(name="b", losses=losses(), config={"lr": 0.2, "depth": 3}, scalars={"acc": 1.0, "f1": 1.0})
    said = sonde("compare", "a", "b", "--exit-code", "--json", code=1).stderr
    assert said == "Exit code 1: 2 config values differ; 2 series only in b.\n"
    said = sonde("compare", "a", "b", "--exit-code", "--divergence", code=0).stderr
    assert said.startswith("Exit code 0: no difference within a relative ")


def test_exit_code_of_weights_says_what_decided_it(sonde: Any) -> None:
    ones = np.ones(3, np.float32)
    save_file({"x": ones, "y": ones}, "a.safetensors")
    save_file({"x": ones * 2, "z": ones}, "b.safetensors")
    said = sonde("compare", "a.safetensors", "b.safetensors", "--exit-code", code=1).stderr
    assert "Exit code 1: 1 changed, 1 only in a, 1 only in b." in said
    said = sonde("compare", "a.safetensors", "a.safetensors", "--exit-code").stderr
    assert "Exit code 0: no difference in any tensor." in said


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
    assert 'a and b first differ at step 7, in the scalar "loss".' in text
    assert "0.375 in a, 1.375 in b, 7.3e-01 apart; rounding in float32 explains up to 1e-05." in text
    assert "everything agreed in the 7 steps before" in text
    found = sonde("compare", "a", "b", "--divergence", "--json").json
    assert set(found) == {"a", "b", "first_divergence", "num_steps", "tolerance"}
    assert (found["first_divergence"]["step"], found["first_divergence"]["series"]) == (7, "loss")


def test_equal_runs_do_not_diverge(sonde: Any, make_run: Any) -> None:
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


# ------------------------------------------------------------------------------------------------------------ weights


def save(path: str, **arrays: np.ndarray) -> str:
    save_file(arrays, path)
    return path


def test_weights_that_are_the_same(sonde: Any) -> None:
    a = save("a.safetensors", **{"fc.weight": np.ones((2, 2), np.float32)})
    b = save("b.safetensors", **{"fc.weight": np.ones((2, 2), np.float32)})
    assert "The tensor is identical" in sonde("compare", a, b, "--exit-code").stdout
    assert sonde("compare", a, b, "--json").json["same"] is True


def test_weights_that_differ(sonde: Any) -> None:
    w = np.arange(4, dtype=np.float32)
    a = save("a.safetensors", **{"fc.weight": w, "fc.bias": w, "old": w, "head.weight": w})
    b = save("b.safetensors", **{"fc.weight": w * 2, "fc.bias": w, "new": w, "head.weight": w * 1.01})
    answer = sonde("compare", a, b, "--exit-code", code=1)
    assert answer.stdout.index("fc.weight") < answer.stdout.index("head.weight")
    assert "Of 5 tensors: 2 changed, 1 only in a, 1 only in b, 1 identical." in answer.stdout
    found = sonde("compare", a, b, "--json").json
    assert found["total"]["num_changed"] == 2
    by_name = {row["name"]: row for row in found["tensors"]}
    assert by_name["fc.weight"]["relative"] == pytest.approx(1.0)
    assert by_name["old"]["status"] == "only_a"
    assert found["layers"][0]["layer"] == "fc"


def test_a_tolerance_is_kept_to_and_what_was_not_compared_is_not_called_different(sonde: Any) -> None:
    w = np.arange(1, 5, dtype=np.float32)
    a = save("a.safetensors", w=w, v=w)
    b = save("b.safetensors", w=w * np.float32(1.01), v=w.astype(np.float16))
    sonde("compare", a, b, "--exit-code", "--tolerance", "0.001", code=1)
    answer = sonde("compare", a, b, "--exit-code", "--tolerance", "0.02")
    assert "Of 2 tensors, 0 are identical and 2 agree within a relative tolerance of 0.02" in answer.stdout
    assert "--divergence compares two runs" in sonde("compare", a, b, "--divergence", code=2).stderr
    sonde("compare", a, "missing.safetensors", "--exit-code", code=2)


def test_nonfinite_values_come_first_and_are_within_no_tolerance(sonde: Any) -> None:
    a = save("a.safetensors", w=np.ones(3, np.float32), v=np.ones(3, np.float32))
    b = save("b.safetensors", w=np.array([1, 1, np.nan], np.float32), v=np.full(3, 9, np.float32))
    answer = sonde("compare", a, b, "--exit-code", "--tolerance", "100", code=1)
    assert "changed, non-finite" in answer.stdout
    shown = sonde("compare", a, b).stdout
    assert shown.rindex("\nw ") < shown.rindex("\nv ")
    assert "Excluded as non-finite: 0 elements of a, 1 of b." in shown


def test_only_the_most_changed_are_shown(sonde: Any) -> None:
    a = save("a.safetensors", **{f"l{i}.weight": np.ones(2, np.float32) for i in range(9)})
    b = save("b.safetensors", **{f"l{i}.weight": np.full(2, 1.0 + i, np.float32) for i in range(9)})
    answer = sonde("compare", a, b, "--top", "3")
    assert "l8.weight" in answer.stdout
    assert "l1.weight" not in answer.stdout
    assert "5 more tensors; show all with --top 8" in answer.stdout


def test_file_that_is_not_there_is_one_line(sonde: Any) -> None:
    answer = sonde("compare", "a.safetensors", "b.safetensors", code=1)
    assert answer.stderr == "Error: No such file: a.safetensors\n"


def test_pickle_that_is_not_weights_is_one_line(sonde: Any) -> None:
    Path("a.pt").write_bytes(b"not a zip")
    assert "safetensors.torch.save_file" in sonde("compare", "a.pt", "a.pt", code=2).stderr


def test_snapshot_of_a_run_and_a_file(sonde: Any, make_run: Any) -> None:
    run = make_run(name="a")
    w = np.ones((2, 2), np.float32)
    store = open_store("zarr", run)
    store.write(Snapshot(5, 1.0, "test", {"param/fc.weight": HostTensor.of(w), "grad/fc.weight": HostTensor.of(w * 2)}))
    store.close()
    b = save("b.safetensors", **{"fc.weight": w})
    for name in (f"{run}@5", "a@latest", "a"):
        assert sonde("compare", name, b, "--json", "--exit-code").json["same"]
    assert not sonde("compare", "a@5", b, "--kind", "grad", "--json").json["same"]
    assert "no snapshot of step 7. The closest is 5." in sonde("compare", "a@7", b, code=2).stderr
    assert 'invalid step "lats" of a: name a snapshot as RUN@STEP' in sonde("compare", "a@lats", b, code=2).stderr
    assert "a = the snapshot of step 5 of gpt/a\n" in sonde("compare", "a@5", b).stdout
