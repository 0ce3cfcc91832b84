"""The speed at which each store writes whole tensors, relative to a plain write() of the same bytes in the same run.

    python benchmarks/stores.py                  # prints the tables, and writes them to benchmarks/results/stores.*
    python benchmarks/stores.py --rounds 9 --width 512

The tensors come from training a small transformer: weights, gradients, both moments of Adam and activations, in float32
and, for the weights, in bfloat16 too, a few steps apart. Every arm writes the same snapshots in turn, round by round,
so that other load on the machine affects all of them. The table compares each arm's best round, and the CPU time of its
median round (of this process; the Icechunk arm works in another one, which is not counted).

`write()` syncs its file and the folder; our stores sync every file and folder before they acknowledge a snapshot. The
arm that works as ParamLake is described (one zarr-python array per tensor, extended by one step at a time, blosc)
syncs nothing, and is compared with a `write()` that syncs nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from sonde.schema.snapshots.tensors import HostTensor, Snapshot
from sonde.write.tensors.store import open_store

Tensors = dict[str, HostTensor]
Arm = Callable[[int, Tensors], int]
"""Writes a snapshot; returns the number of bytes stored."""

RESULTS = Path(__file__).parent / "results"


# ---------------------------------------------------------------------------------------------------------- the tensors


class Transformer(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(4096, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 4096)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layers(self.embed(tokens)))
        return out


def trained(width: int, depth: int, num: int, apart: int) -> list[Tensors]:
    """Snapshots of a training run, after a warm-up."""
    torch.manual_seed(0)
    model = Transformer(width, depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    acts: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.register_forward_hook(lambda _m, _i, out, name=name: acts.__setitem__(name, out.detach()))
    found = []
    for step in range(10 + num * apart):
        start = torch.randint(0, 4096, (2, 1))
        tokens = (start + torch.arange(33) * 7) % 4096
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step >= 10 and (step - 10) % apart == 0:
            found.append(copied(model, optimizer, acts))
    return found


def copied(model: nn.Module, optimizer: torch.optim.Optimizer, acts: Mapping[str, torch.Tensor]) -> Tensors:
    tensors: Tensors = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        tensors[f"param/{name}"] = HostTensor.of(value.numpy().copy())
        bits = value.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).copy()
        tensors[f"custom/bf16.{name}"] = HostTensor(bits, "bfloat16", tuple(value.shape))
        if parameter.grad is not None:
            tensors[f"grad/{name}"] = HostTensor.of(parameter.grad.numpy().copy())
        for moment in ("exp_avg", "exp_avg_sq"):
            tensors[f"optim/{name}.{moment}"] = HostTensor.of(optimizer.state[parameter][moment].numpy().copy())
    tensors |= {f"act/{name}": HostTensor.of(value.numpy().copy()) for name, value in acts.items()}
    return tensors


# ------------------------------------------------------------------------------------------------------------- the arms


def raw_write(folder: Path, *, is_synced: bool) -> Arm:
    def write(step: int, tensors: Tensors) -> int:
        fd = os.open(folder / str(step), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        for tensor in tensors.values():
            os.write(fd, memoryview(tensor.flat()).cast("B"))  # type: ignore[arg-type]
        if is_synced:
            os.fsync(fd)
        os.close(fd)
        if is_synced:
            names = os.open(folder, os.O_RDONLY)
            os.fsync(names)
            os.close(names)
        return (folder / str(step)).stat().st_size

    return write


def our_store(kind: str, folder: Path, options: dict[str, Any]) -> Arm:
    store = open_store(kind, folder, options)
    return lambda step, tensors: store.write(Snapshot(step, 0.0, "", tensors)).stored_bytes


def committed(folder: Path) -> Arm:
    """The Icechunk store, timed until the commit is in the repository, not only in the spool."""
    store: Any = open_store("icechunk", folder)

    def write(step: int, tensors: Tensors) -> int:
        receipt = store.write(Snapshot(step, 0.0, "", tensors))
        assert store.drain(600)
        return int(receipt.stored_bytes)

    return write


def like_paramlake(folder: Path) -> Arm:
    """One array per tensor, with the steps as first axis; each step extends every array by one and fills it."""
    import zarr

    root: Any = zarr.open_group(folder, mode="a")
    arrays: dict[str, Any] = {}

    def write(step: int, tensors: Tensors) -> int:
        before = size_of(folder)
        for name, tensor in tensors.items():
            bits = tensor.flat().reshape(tensor.shape)
            if name not in arrays:
                arrays[name] = root.create_array(
                    name.replace("/", "_"),
                    shape=(0, *tensor.shape),
                    chunks=(1, *(max(length, 1) for length in tensor.shape)),
                    dtype=bits.dtype,
                    compressors=zarr.codecs.BloscCodec(),
                )
            array = arrays[name]
            array.resize((array.shape[0] + 1, *tensor.shape))
            array[-1] = bits
        return size_of(folder) - before

    return write


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# ------------------------------------------------------------------------------------------------------- the measuring


def measure(arms: dict[str, Arm], snapshots: list[Tensors]) -> dict[str, dict[str, float]]:
    """Run every arm in turn, round by round; the first round warms up and is not counted."""
    took: dict[str, list[float]] = {name: [] for name in arms}
    cpu: dict[str, list[float]] = {name: [] for name in arms}
    stored: dict[str, int] = dict.fromkeys(arms, 0)
    nbytes = sum(tensor.nbytes for tensor in snapshots[0].values())
    for step, tensors in enumerate(snapshots):
        for name, arm in arms.items():
            began, began_cpu = time.perf_counter(), time.process_time()
            size = arm(step, tensors)
            if step:
                took[name].append(time.perf_counter() - began)
                cpu[name].append(time.process_time() - began_cpu)
                stored[name] += size
    return {
        name: {
            "MB_per_s": nbytes / min(times) / 1e6,
            "cpu_s_per_GB": statistics.median(cpu[name]) / nbytes * 1e9,
            "ratio": nbytes * len(times) / stored[name],
        }
        for name, times in took.items()
    }


def stores(work: Path, snapshots: list[Tensors]) -> dict[str, Any]:
    def folder(name: str) -> Path:
        path = work / name
        path.mkdir()
        return path

    arms = {
        "write()": raw_write(folder("raw"), is_synced=True),
        "write(), not synced": raw_write(folder("unsynced"), is_synced=False),
        "memory": our_store("memory", folder("memory"), {}),
        "zarr, none": our_store("zarr", folder("none"), {"compression": "none"}),
        "zarr, lz4": our_store("zarr", folder("lz4"), {"compression": "lz4"}),
        "zarr, auto": our_store("zarr", folder("auto"), {}),
        "icechunk, to the commit": committed(folder("icechunk")),
        "as ParamLake": like_paramlake(folder("paramlake")),
    }
    found = measure(arms, snapshots)
    for name, row in found.items():
        raw = found["write(), not synced" if name == "as ParamLake" else "write()"]
        row["of_raw"] = row["MB_per_s"] / raw["MB_per_s"]
        row["loss"] = raw["MB_per_s"] / row["MB_per_s"] - 1  # time beyond that of write(), in multiples of it
        row["cpu_loss"] = row["cpu_s_per_GB"] - raw["cpu_s_per_GB"]
    return found


def kinds(work: Path, snapshots: list[Tensors]) -> dict[str, Any]:
    """Each kind separately, as "auto" treats it."""
    found = {}
    for kind in ("param", "custom/bf16", "grad", "optim", "act"):
        part = [{name: t for name, t in tensors.items() if name.startswith(kind)} for tensors in snapshots]
        if kind == "custom/bf16":  # weights in bfloat16 are parameters like any other
            part = [{name.replace("custom/bf16.", "param/"): t for name, t in tensors.items()} for tensors in part]
        place = Path(tempfile.mkdtemp(dir=work))
        (place / "raw").mkdir()
        (place / "zarr").mkdir()
        arms = {
            "write()": raw_write(place / "raw", is_synced=True),
            "auto": our_store("zarr", place / "zarr", {}),
        }
        rows = measure(arms, part)
        label = "param, bfloat16" if kind == "custom/bf16" else kind
        found[label] = {**rows["auto"], "of_raw": rows["auto"]["MB_per_s"] / rows["write()"]["MB_per_s"]}
        shutil.rmtree(place)
    return found


def tables(found: dict[str, Any]) -> str:
    what = (
        f"`python benchmarks/stores.py`: {found['mb']:.0f} MB in {found['num_tensors']} tensors per snapshot, "
        f"{found['rounds']} snapshots {found['apart']} steps apart, {os.cpu_count()} cores, best of the rounds. "
        "`of write()` compares with a plain write() of the same bytes in the same run, with the same syncing."
    )
    lines = [
        "# Stores",
        "",
        what,
        "",
        "| store | MB/s | of write() | time beyond write() | CPU s/GB | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in found["stores"].items():
        speed = f"{row['MB_per_s']:.0f} | {row['of_raw']:.2f} | {row['loss']:.1f}× | {row['cpu_s_per_GB']:.2f}"
        lines.append(f"| {name} | {speed} | {row['ratio']:.2f} |")
    lines += ["", "| kind, auto | MB/s | of write() | ratio |", "|---|---|---|---|"]
    for name, row in found["kinds"].items():
        lines.append(f"| {name} | {row['MB_per_s']:.0f} | {row['of_raw']:.2f} | {row['ratio']:.2f} |")
    times = f"{found['times_less']:.1f} times less time and {found['cpu_times_less']:.1f} times less CPU time"
    lines += ["", f"Beyond write(), compression takes {times} than ParamLake's approach.", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--apart", type=int, default=2, help="steps between two snapshots")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--dir", type=Path, help="a folder on the disk to measure (default: the temporary folder)")
    parser.add_argument("--no-results", action="store_true", help="print the tables without writing them")
    asked = parser.parse_args()
    snapshots = trained(asked.width, asked.depth, asked.rounds, asked.apart)
    work = Path(tempfile.mkdtemp(dir=asked.dir))
    try:
        found: dict[str, Any] = {
            "mb": sum(tensor.nbytes for tensor in snapshots[0].values()) / 1e6,
            "num_tensors": len(snapshots[0]),
            "rounds": asked.rounds,
            "apart": asked.apart,
            "stores": stores(work, snapshots),
            "kinds": kinds(work, snapshots),
        }
    finally:
        shutil.rmtree(work, ignore_errors=True)
    found["times_less"] = found["stores"]["as ParamLake"]["loss"] / found["stores"]["zarr, auto"]["loss"]
    losses = found["stores"]["as ParamLake"]["cpu_loss"], found["stores"]["zarr, auto"]["cpu_loss"]
    found["cpu_times_less"] = losses[0] / losses[1]
    print(tables(found))
    if not asked.no_results:
        (RESULTS / "stores.json").write_text(json.dumps(found, indent=2) + "\n")
        (RESULTS / "stores.md").write_text(tables(found))


if __name__ == "__main__":
    main()
