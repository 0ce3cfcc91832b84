"""A long run of many tensors, made in moments: sealed files, pyramid and catalog as training would have left them.

    python tests/programs/big_run.py runs --tensors 2000 --steps 100000

The numbers are made up; the files are written by the code that writes them in training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.schema.layout import LOCK_FILE, MODEL_FILE
from sonde.schema.records import Event, Site, SystemSample, sign_document, to_json
from sonde.schema.sketch import HIST_N, INF, MAX, MIN, NAN, NUM_BINS, SUM, SUMABS, SUMSQ, ZERO, Array, N, empty_rows
from sonde.write.durable import write_durably
from sonde.write.folder import create_run
from sonde.write.items import FindingRow
from sonde.write.runfile import RunFile
from sonde.write.stats.catalog import (
    Catalog,
    Row,
    event_row,
    finding_row,
    scalar_row,
    segment_row,
    site_row,
    system_rows,
)
from sonde.write.stats.pyramid import Pyramid
from sonde.write.stats.seal import SegmentKey, seal_table
from sonde.write.stats.table import ScalarsTable, StatsTable

SEAL_STEPS: Final = 1024
_HIST_EVERY: Final = 256
_START: Final = 1_700_000_000.0
_PARTS: Final = (
    ("ln_1", "LayerNorm", "norm", (64,)),
    ("attn.q", "Linear", "linear", (64, 64)),
    ("attn.k", "Linear", "linear", (64, 64)),
    ("attn.v", "Linear", "linear", (64, 64)),
    ("attn.out", "Linear", "linear", (64, 64)),
    ("ln_2", "LayerNorm", "norm", (64,)),
    ("mlp.up", "Linear", "linear", (256, 64)),
    ("mlp.down", "Linear", "linear", (64, 256)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """One value that must be seen at any zoom: `factor` times what it was, or not finite."""

    tensor: int
    step: int
    factor: float = 1.0
    num_nan: int = 0
    num_inf: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to make. `scalars` beyond the usual ones are named `metric/00000`, …"""

    num_tensors: int = 64
    num_steps: int = 3000
    kinds: Sequence[str] = ("grad",)
    planted: Sequence[Planted] = ()
    num_extra_scalars: int = 0
    scalar_every: int = 1
    config: Mapping[str, Any] = field(default_factory=lambda: {"optim": {"lr": 3e-4}, "model": {"depth": 12}})
    seed: int = 0
    status: str = "finished"


def big_run(
    dir: Path,
    plan: Plan | None = None,
    *,
    project: str = "big",
    name: str = "run",
    on_progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Make the run and give its folder."""
    plan = plan or Plan()
    run = create_run(dir, project=project, name=name, config=plan.config, command=["train.py"])
    catalog = Catalog(run)
    sites = tensor_sites(plan)
    names = [*_scalars(plan), *(f"metric/{n:05d}" for n in range(plan.num_extra_scalars))]
    catalog.commit([site_row(i, site) for i, site in enumerate(sites)])
    catalog.commit([scalar_row(i, scalar) for i, scalar in enumerate(names)])
    sealer = _Sealer(run, catalog)
    noise = np.random.default_rng(plan.seed)
    for first in range(0, plan.num_steps, SEAL_STEPS):
        steps = np.arange(first, min(first + SEAL_STEPS, plan.num_steps))
        if len(sites):
            sealer.stats(stats_table(plan, sites, steps, noise))
        sealer.scalars(scalars_table(plan, names, steps, noise))
        if on_progress is not None:
            on_progress(int(steps[-1]) + 1, plan.num_steps)
    _write_model(run, sites)
    catalog.commit(_remarks(plan, sites))
    catalog.close()
    _close(run, plan)
    return run


def tensor_sites(plan: Plan) -> list[Site]:
    """Parameters of a transformer deep enough, in order of the layers, once for each kind."""
    sites = []
    for kind in plan.kinds:
        for number in range(plan.num_tensors):
            layer, part = divmod(number, len(_PARTS))
            path, type, _, shape = _PARTS[part]
            owner = f"layers.{layer}.{path}"
            sites.append(
                Site(
                    kind=kind,
                    name=owner if kind in ("act", "actgrad") else f"{owner}.weight",
                    shape=shape,
                    dtype="float32",
                    owner=owner,
                    module_type=type,
                )
            )
    return sites


def stats_table(plan: Plan, sites: Sequence[Site], steps: NDArray[np.int64], noise: np.random.Generator) -> StatsTable:
    """Sketches of all sites at these steps, in the order of a segment."""
    num_sites, num_steps = len(sites), len(steps)
    depth = np.arange(num_sites) % plan.num_tensors / max(plan.num_tensors, 1)
    level = -3.0 + 1.5 * depth[:, None] - 0.8 * (steps / max(plan.num_steps, 1))[None, :]
    wave = 0.2 * np.sin(steps / 400.0)[None, :]
    rms = 10.0 ** (level + wave + noise.normal(0.0, 0.12, (num_sites, num_steps)))
    # 16 bits of mantissa: the rest would be noise that no compressor shrinks.
    rms = _rounded(rms.reshape(-1))
    size = np.repeat([float(np.prod(site.shape)) for site in sites], num_steps)
    rows = empty_rows(len(rms))
    rows[:, N], rows[:, ZERO], rows[:, SUM] = size, 0.0, _rounded(0.01 * rms * size)
    rows[:, SUMSQ], rows[:, SUMABS] = rms * rms * size, 0.8 * rms * size
    rows[:, MIN], rows[:, MAX] = -3.5 * rms, 3.75 * rms
    _plant(plan, sites, steps, rows)
    hist_row = np.flatnonzero(np.tile(steps % _HIST_EVERY == 0, num_sites)).astype(np.int64)
    rows[hist_row, HIST_N] = size[hist_row]
    return StatsTable(
        np.repeat(np.arange(num_sites, dtype=np.int32), num_steps),
        np.tile(steps, num_sites),
        np.tile(_START + 0.1 * steps, num_sites),
        rows,
        hist_row,
        _hists(rms[hist_row], size[hist_row]),
    )


def _rounded(values: Array) -> Array:
    bits = np.ascontiguousarray(values).view(np.uint64)
    rounded: Array = (bits & np.uint64(~((1 << 36) - 1) & (1 << 64) - 1)).view(np.float64)
    return rounded


def _hists(rms: Array, size: Array) -> NDArray[np.float32]:
    """A bell around the exponent of the root mean square."""
    bins = np.arange(NUM_BINS)[None, :]
    centre = np.log2(np.maximum(rms, 1e-30))[:, None] + 47.0
    bell = np.exp(-0.5 * ((bins - centre) / 1.6) ** 2)
    counts: NDArray[np.float32] = np.round(bell / bell.sum(axis=1, keepdims=True) * size[:, None]).astype(np.float32)
    return counts


def _plant(plan: Plan, sites: Sequence[Site], steps: NDArray[np.int64], rows: Array) -> None:
    for planted in plan.planted:
        if not steps[0] <= planted.step <= steps[-1]:
            continue
        row = rows[planted.tensor * len(steps) + (planted.step - int(steps[0]))]
        row[[SUMSQ]] *= planted.factor**2
        row[[SUMABS, SUM, MIN, MAX]] *= planted.factor
        row[NAN], row[INF] = planted.num_nan, planted.num_inf


def _scalars(plan: Plan) -> list[str]:
    names = ["loss", "val_loss", "optim/lr", "accuracy"]
    num_layers = min(plan.num_tensors // len(_PARTS), 24) if plan.kinds else 0
    for layer in range(num_layers):
        names += [f"attn/layers.{layer}.attn/{stat}" for stat in ("entropy", "entropy_min", "logit_max")]
    return names + (["rnn/layers.0.rnn/reach", "rnn/layers.0.rnn/length"] if num_layers else [])


def scalars_table(
    plan: Plan, names: Sequence[str], steps: NDArray[np.int64], noise: np.random.Generator
) -> ScalarsTable:
    steps = steps[steps % plan.scalar_every == 0]
    value = np.empty((len(names), len(steps)))
    for row, name in enumerate(names):
        value[row] = _curve(name, steps, plan.num_steps) * (1.0 + 0.03 * noise.standard_normal(len(steps)))
    return ScalarsTable(
        np.repeat(np.arange(len(names), dtype=np.int32), len(steps)),
        np.tile(steps, len(names)),
        np.tile(_START + 0.1 * steps, len(names)),
        value.reshape(-1),
    )


def _curve(name: str, steps: NDArray[np.int64], num_steps: int) -> Array:
    done = steps / max(num_steps, 1)
    if name.endswith("lr"):
        return np.asarray(3e-4 * np.minimum(1.0, (steps + 1) / 200) * (1 - 0.9 * done))
    if name == "accuracy" or name.startswith("attn/"):
        return 0.9 * (1.0 - np.exp(-3.0 * done))
    return 0.4 + 3.0 * np.exp(-6.0 * done)


class _Sealer:
    """Seals tables one after another, and grows the pyramid."""

    def __init__(self, run: Path, catalog: Catalog) -> None:
        self.run, self.catalog = run, catalog
        self.segments = catalog.segments()
        self.pyramid = Pyramid(run, 0, self.segments)
        self.sequence = {"stats": 0, "scalars": 0}
        self.number = {"stats": 0, "scalars": 0}

    def stats(self, table: StatsTable) -> None:
        place = self._place("stats", len(np.unique(table.step)))
        made = seal_table(self.run, place, table)
        self.catalog.commit([segment_row(made)])
        self.segments.append(made)
        self.pyramid.grow(self.catalog, made, table)

    def scalars(self, table: ScalarsTable) -> None:
        if not len(table):
            return
        made = seal_table(self.run, self._place("scalars", len(np.unique(table.step))), table)
        self.catalog.commit([segment_row(made)])
        self.segments.append(made)

    def _place(self, stream: Any, num_frames: int) -> SegmentKey:
        first, number = self.sequence[stream], self.number[stream]
        self.sequence[stream] += num_frames
        self.number[stream] += 1
        id = max((segment.id for segment in self.segments), default=0) + 1
        return SegmentKey(
            id=id,
            stream=stream,
            rank=0,
            level=0,
            number=number,
            first_sequence=first,
            last_sequence=first + num_frames - 1,
            attempt=0,
        )


def _write_model(run: Path, sites: Sequence[Site]) -> None:
    owners = list(dict.fromkeys((site.owner, site.module_type) for site in sites))
    kinds = {path: kind for path, _, kind, _ in _PARTS}
    modules = [
        {
            "name": owner,
            "type": type,
            "kind": kinds.get(".".join(owner.split(".")[2:]), "other"),
            "order": order,
            "calls": 1,
            "is_leaf": True,
        }
        for order, (owner, type) in enumerate(owners)
    ]
    document = {"modules": modules, "parameters": [], "optimizers": [{"type": "AdamW", "groups": []}], "loss": "cross"}
    write_durably(run / MODEL_FILE, sign_document(to_json(document)).encode())


def _remarks(plan: Plan, sites: Sequence[Site]) -> list[Row]:
    """An event, readings of the machine, a finding."""
    last = plan.num_steps - 1
    samples = [
        SystemSample(time=_START + 0.1 * step, step=step, values={"cpu_percent": 50.0, "rss_mb": 900.0 + step / 1000})
        for step in np.linspace(0, max(last, 0), 200).astype(int).tolist()
    ]
    rows = [event_row(Event(type="cadence", message="one step in two", step=last // 2, time=_START), 0)]
    rows += [row for sample in samples for row in system_rows(sample, 0)]
    if sites:
        evidence = [{"series": f"{sites[0].kind}/{sites[0].name}/rms", "value": 1.0, "healthy": "", "step": last // 3}]
        found = FindingRow(
            number=1,
            time=_START,
            rule="loss_plateau",
            severity="warning",
            confidence=0.8,
            step=last // 3,
            last_step=last,
            sites=[sites[0].name],
            message="the loss has not moved",
            evidence=evidence,
            remedy="Raise the learning rate.",
        )
        rows.append(finding_row(1, found, 0))
    return rows


def _close(run: Path, plan: Plan) -> None:
    (run / LOCK_FILE).touch()
    file = RunFile.load(run)
    end = _START + 0.1 * plan.num_steps
    num_scalars = -(-plan.num_steps // plan.scalar_every)
    num_stats = plan.num_steps if plan.kinds and plan.num_tensors else 0
    beat = {
        "time": end,
        "step": plan.num_steps - 1,
        "acknowledged": {"stats": num_stats - 1, "scalars": num_scalars - 1},
        "dropped": {},
        "degraded": "",
    }
    facts = {
        "overhead": {"fraction": 0.008, "uncertainty": 0.001, "stride": {"grads": 1}},
        "diagnosis": {"critical": 0, "warning": 1, "info": 0, "health": 87.5},
    }
    file.fix(created_time=_START, git={"commit": "0" * 40, "branch": "main", "dirty": False})
    file.write(status=plan.status, reason="", ended_time=end, heartbeat=beat, facts=facts)


def _main() -> None:
    import argparse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--kinds", default="grad")
    parser.add_argument("--scalars", type=int, default=0, help="this many more")
    parser.add_argument("--name", default="run")
    given = parser.parse_args()
    plan = Plan(
        num_tensors=given.tensors,
        num_steps=given.steps,
        kinds=tuple(given.kinds.split(",")),
        num_extra_scalars=given.scalars,
        # A NaN and a spike in one step of 100,000 are what a picture of the whole must not hide.
        planted=(
            Planted(tensor=given.tensors // 3, step=given.steps // 2, num_nan=1),
            Planted(tensor=given.tensors // 2, step=given.steps * 2 // 3, factor=1e4),
        ),
    )
    began = time.perf_counter()
    run = big_run(given.dir, plan, name=given.name, on_progress=lambda done, of: print(f"\r{done:,} of {of:,}", end=""))
    print(f"\n{run}  {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    _main()
