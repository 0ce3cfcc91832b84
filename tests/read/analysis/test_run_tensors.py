"""`run.tensors`: tables from snapshots that were really kept, against the functions they are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from sonde.errors import RunNotFoundError, UsageError
from sonde.read.tensors.analysis import blocks, run_tensors
from sonde.read.tensors.analysis.evolution import evolution
from sonde.read.tensors.analysis.representations import linear_cka, unbiased_cka
from sonde.run import Run

STEPS = (0, 5, 10, 15)
Keep = Callable[[Mapping[int, Mapping[str, np.ndarray]]], Run]


def tensors(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    batch = np.random.default_rng(step % 10).normal(size=(16, 3)).astype(np.float32)
    return {
        "param/0.weight": (rng.normal(size=(12, 30)) + step).astype(ml_dtypes.bfloat16),
        "param/0.bias": rng.normal(size=12).astype(np.float32),
        "param/conv.weight": rng.normal(size=(4, 3, 2, 2)),
        "param/count": np.array(step),
        "grad/0.weight": rng.normal(size=(12, 30)).astype(np.float32),
        "grad/1.weight": rng.normal(size=(12, 30)).astype(np.float32),
        "grad/0.bias": rng.normal(size=12).astype(np.float32),
        "act/0": rng.normal(size=(16, 5)).astype(np.float32),
        "probe/0": rng.normal(size=(16, 5)).astype(np.float32),
        "batch/input.0": batch,
    }


@pytest.fixture(scope="module")
def run(keep_snapshots: Keep) -> Run:
    return keep_snapshots({step: tensors(step) for step in STEPS})


def series(name: str) -> list[np.ndarray]:
    return [tensors(step)[name] for step in STEPS]


def rows_of(table: Any, **keys: Any) -> list[dict[str, Any]]:
    return [row for row in table.to_pylist() if all(row[key] == value for key, value in keys.items())]


@pytest.mark.parametrize("block", [64, 8 << 20])
def test_evolution_is_that_of_whole_tensors_whatever_the_blocks(
    block: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_tensors, "BLOCK", block)
    table = run.tensors.evolution("param/*")
    assert table.column_names[:4] == ["step", "kind", "site", "norm"]
    for site in ("0.weight", "conv.weight", "count"):
        expected = evolution(series(f"param/{site}"))
        found = rows_of(table, site=site)
        assert [row["step"] for row in found] == list(STEPS)
        for column, values in expected.items():
            for row, value in zip(found, values, strict=True):
                assert row[column] is None if np.isnan(value) else row[column] == pytest.approx(value), column


def test_steps_and_patterns_choose(run: Run) -> None:
    table = run.tensors.evolution(["grad/0.*", "param/count"], steps=slice(5, 11))
    assert set(table["site"].to_pylist()) == {"0.weight", "0.bias", "count"}
    assert set(table["step"].to_pylist()) == {5, 10}


def test_unknown_pattern_is_answered(run: Run) -> None:
    with pytest.raises(UsageError, match=r'no tensor matches "param/9\.weight"\. Did you mean "param/0\.weight"'):
        run.tensors.evolution("param/9.weight")
    with pytest.raises(UsageError, match="no snapshot at the requested steps"):
        run.tensors.evolution("param/*", steps=range(1, 3))


def test_distribution(run: Run) -> None:
    table = run.tensors.distribution("param/0.weight")
    last = table.to_pylist()[-1]
    values = tensors(15)["param/0.weight"].astype(float).ravel()
    assert last["quantiles"][4] == pytest.approx(np.median(values))
    assert sum(last["counts"]) == last["num_sampled"] == last["num_elements"] == 360
    assert last["wasserstein_first"] == pytest.approx(15.0, rel=0.1)
    assert last["kl_first"] > 1.0


def test_distribution_says_when_it_sampled(run: Run) -> None:
    (*_, last) = run.tensors.distribution("param/0.weight", max_sample=50).to_pylist()
    assert 30 <= last["num_sampled"] <= 50
    assert last["num_elements"] == 360


def test_spectra_are_of_matrices_only(run: Run) -> None:
    table = run.tensors.spectra("param/*", steps=5, k=3)
    assert set(table["site"].to_pylist()) == {"0.weight", "conv.weight"}
    (row,) = rows_of(table, site="0.weight")
    exact = np.linalg.svd(tensors(5)["param/0.weight"].astype(float), compute_uv=False)
    assert row["singular_values"] == pytest.approx(exact[:3])
    assert row["stable_rank"] == pytest.approx((exact**2).sum() / exact[0] ** 2)
    assert (row["rows"], row["columns"], row["method"]) == (12, 30, "exact")


def test_similarity_over_steps(run: Run) -> None:
    table = run.tensors.similarity("grad/0.weight")
    assert table.num_rows == 6
    (row,) = rows_of(table, step_a=5, step_b=15)
    a, b = (tensors(step)["grad/0.weight"].ravel().astype(float) for step in (5, 15))
    assert row["cosine"] == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_similarity_of_layers(run: Run) -> None:
    table = run.tensors.layer_similarity("grad/*")
    (same_shape,) = rows_of(table, site_a="0.weight", site_b="1.weight")
    expected = [
        (a.ravel() @ b.ravel()) / np.linalg.norm(a) / np.linalg.norm(b)
        for a, b in zip(series("grad/0.weight"), series("grad/1.weight"), strict=True)
    ]
    assert same_shape["cosine"] == pytest.approx(np.mean(expected), rel=1e-5)
    (other_shape,) = rows_of(table, site_a="0.weight", site_b="0.bias")
    assert other_shape["cosine"] is None
    assert -1 <= other_shape["same_turns"] <= 1


def test_cka_over_steps_of_a_probe(run: Run) -> None:
    table = run.tensors.cka("probe/*", unbiased=False)
    (row,) = rows_of(table, step_a=0, step_b=10)
    a, b = (tensors(step)["probe/0"].astype(float) for step in (0, 10))
    assert row["cka"] == pytest.approx(linear_cka(a, b))
    assert row["same_batch"] is True
    (row,) = rows_of(run.tensors.cka("probe/*"), step_a=0, step_b=10)
    assert row["cka"] == pytest.approx(unbiased_cka(a, b))


def test_cka_of_different_batches_is_refused(run: Run) -> None:
    with pytest.raises(UsageError, match=r"different batches at steps 0 and 5.*probe=batch"):
        run.tensors.cka("act/*")
    assert rows_of(run.tensors.cka("act/*", check=False), step_a=0, step_b=5)[0]["same_batch"] is False
    assert run.tensors.cka("act/*", steps=range(0, 11, 10))["same_batch"].to_pylist() == [True]


def test_cka_between_runs(run: Run, keep_snapshots: Keep) -> None:
    other = keep_snapshots({step: {**tensors(step), "probe/0": tensors(step)["probe/0"] * 2} for step in (5, 10, 99)})
    table = run.tensors.cka("probe/*", other=other)
    assert table["step_a"].to_pylist() == table["step_b"].to_pylist() == [5, 10]
    assert table["cka"].to_pylist() == pytest.approx([1.0, 1.0])
    assert table["same_batch"].to_pylist() == [None, None]
    with pytest.raises(RunNotFoundError, match="nowhere"):
        run.tensors.cka("probe/*", other="nowhere")
    with pytest.raises(UsageError, match="no snapshot of a tensor that matches"):
        run.tensors.cka("probe/*", other=keep_snapshots({99: tensors(5)}))


def test_lora(keep_snapshots: Keep) -> None:
    rng = np.random.default_rng(0)
    base, a, b = rng.normal(size=(20, 30)), rng.normal(size=(4, 30)), rng.normal(size=(20, 4))
    names = ("base_layer.weight", "lora_A.default.weight", "lora_B.default.weight")
    kept = {f"param/q.{name}": value for name, value in zip(names, (base, a, b), strict=True)}
    run = keep_snapshots({0: {**kept, f"param/q.{names[2]}": np.zeros_like(b)}, 10: kept})
    first, last = run.tensors.lora(scale=2.0).to_pylist()
    assert (first["norm"], first["relative"]) == (0.0, 0.0)
    assert last["norm"] == pytest.approx(np.linalg.norm(2.0 * b @ a))
    assert last["relative"] == pytest.approx(np.linalg.norm(2.0 * b @ a) / np.linalg.norm(base))
    assert (last["module"], last["adapter"], last["rank"]) == ("q", "default", 4)
    assert 1 < last["effective_rank"] <= 4


def test_run_without_adapters_says_so(run: Run) -> None:
    with pytest.raises(UsageError, match="lora_A"):
        run.tensors.lora()


def test_blocks_cover_every_row_once() -> None:
    tracked = blocks.Tracked("param/x", (0,), ((10, 4),), "float32")
    assert tracked.blocks(48) == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert blocks.Tracked("param/x", (0, 1), ((10, 4), (9, 4)), "float32").blocks(48) == [None]
    assert blocks.Tracked("param/x", (0,), ((),), "float32").blocks() == [None]


@pytest.mark.slow
@pytest.mark.parametrize("is_named", [True, False])
def test_cluster_gives_the_same_answers(is_named: bool, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from distributed import Client, LocalCluster

    alone = {
        "evolution": run.tensors.evolution("param/*"),
        "spectra": run.tensors.spectra("param/*"),
        "distribution": run.tensors.distribution("param/0.weight"),
        "similarity": run.tensors.similarity("grad/*"),
        "cka": run.tensors.cka("grad/*.weight", check=False),
    }
    cluster = LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None)
    with cluster, Client(cluster) as client:
        given = {"cluster": client} if is_named else {}
        calls: list[Any] = []
        monkeypatch.setattr(client, "map", lambda *a, _map=client.map, **k: calls.append(a) or _map(*a, **k))
        assert run.tensors.evolution("param/*", **given).equals(alone["evolution"])
        assert run.tensors.spectra("param/*", **given).equals(alone["spectra"])
        assert run.tensors.distribution("param/0.weight", **given).equals(alone["distribution"])
        assert run.tensors.similarity("grad/*", **given).equals(alone["similarity"])
        assert run.tensors.cka("grad/*.weight", check=False, **given).equals(alone["cka"])
        assert alone["cka"].num_rows > 1
        assert len(calls) == 5


@pytest.mark.slow
def test_workers_in_other_processes_open_the_run_by_its_path(run: Run, tmp_path: Path) -> None:
    from distributed import Client, LocalCluster

    alone = run.tensors.evolution("param/*")
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, dashboard_address=None, local_directory=str(tmp_path / "dask")
        ) as cluster,
        Client(cluster) as client,
    ):
        assert run.tensors.evolution("param/*", cluster=client).equals(alone)
        large = run.tensors.get("param/0.weight").chunk({"step": 1})
        assert float(large.astype("float32").sum().compute()) == pytest.approx(
            sum(float(value.astype("float32").sum()) for value in series("param/0.weight")), rel=1e-3
        )


def test_cluster_must_be_a_client(run: Run) -> None:
    with pytest.raises(UsageError, match=r"must be a dask\.distributed\.Client, not str"):
        run.tensors.evolution("param/*", cluster="tcp://somewhere")


@pytest.mark.slow
def test_adapters_of_peft_are_found_and_measured(tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    import sonde

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(10, 12)
            self.fc = torch.nn.Linear(12, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.embed(x))

    torch.manual_seed(0)
    model = get_peft_model(Net(), LoraConfig(r=3, lora_alpha=6, target_modules=["fc", "embed"]))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    with sonde.init(project="p", dir=tmp_path) as session:
        sonde.watch(model, optimizer, snapshots=1)
        for _ in range(3):
            # A snapshot has the weights that a step begins with, which are those its gradients are of.
            adapted = {name: getattr(model.base_model.model, name) for name in ("fc", "embed")}
            expected = {name: layer.get_delta_weight("default").detach() for name, layer in adapted.items()}
            model(torch.arange(10)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        path = session.path
    table = Run(path).tensors.lora()  # the scale, alpha / r, is the one that the model said
    assert set(table["module"].to_pylist()) == {"fc", "embed"}
    for module, delta in expected.items():
        last = rows_of(table, module=module)[-1]
        assert last["norm"] == pytest.approx(float(delta.norm()), rel=1e-5)
        assert last["rank"] == 3
        assert last["relative"] is not None
