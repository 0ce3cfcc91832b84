"""Run folders that mean harm or met with it: names with markup, numbers JSON lacks, links that lead out, damage."""

from __future__ import annotations

import json
import shutil
import sqlite3
import time
import zlib
from pathlib import Path
from typing import Any, Final

import numpy as np

from sonde.reduce.numpy import sketch
from sonde.schema.layout import CATALOG_FILE, MODEL_FILE, RUN_FILE, row_text
from sonde.schema.records import Event, ScalarsRecord, Site, StatsRecord, sign_document, to_json
from sonde.write.folder import create_run
from sonde.write.writer import Writer, WriterOptions

NAMES: Final = (
    "<script>window.hacked=1</script>",
    "<img src=x onerror=window.hacked=1>",
    '"><svg onload=window.hacked=1>',
    "{{constructor.constructor('window.hacked=1')()}}",
    "javascript:window.hacked=1",
    "quote'\"`${window.hacked=1}",
    "right\u202eto left\u202c",
    "zero\u200bwidth\ufeff",
    "bell\x07 escape\x1b[31m newline\n tab\t",
    "nul\x00byte",
    "../../../etc/passwd",
    "%2e%2e%2f%00",
    "a/b//c",
    "*[a-z]?{x}",
    "名前 مرحبا 🔬",
    "lone \ud800 surrogate",
    "x" * 5000,
    "dots" + "." * 300,
)
"""For modules, scalars, tags and config alike."""
NUMBERS: Final = (float("nan"), float("inf"), float("-inf"), 1e308, -1e308, 5e-324, 0.0, -0.0)
_OPTIONS: Final = WriterOptions(flush_interval_s=0.02, heartbeat_s=0.2, seal_steps=16, system_interval_s=60.0)


def hostile_run(dir: Path, *, num_steps: int = 40) -> Path:
    """A run that reads well, and whose every text and number is awkward."""
    config: dict[str, Any] = dict(zip(NAMES, (*NUMBERS, *NAMES), strict=False))
    config["nested"] = {"a": {"b": [1, {"c": float("nan")}]}, NAMES[0]: NAMES[1]}
    run = create_run(dir, project=NAMES[0], name=NAMES[1], config=config, tags=NAMES, notes="\n".join(NAMES))
    writer = Writer(run, _OPTIONS)
    for step in range(num_steps):
        _record(writer, step)
    writer.event(Event(type=NAMES[0], message=NAMES[1], step=3, time=time.time(), details={NAMES[2]: float("inf")}))
    writer.note(overhead={"fraction": float("nan"), "stride": {NAMES[0]: 3.0}}, coverage={"unreadable": list(NAMES)})
    writer.close("crashed", reason=NAMES[1])
    modules = [{"name": name, "type": NAMES[0], "kind": NAMES[1], "order": n} for n, name in enumerate(NAMES)]
    document = {"modules": modules, "parameters": [], "loss": NAMES[0]}
    (run / MODEL_FILE).write_text(sign_document(to_json(document)), encoding="utf-8")
    return run


def _record(writer: Writer, step: int) -> None:
    rng = np.random.default_rng(step)
    rows, hists, ids = [], [], []
    for kind in ("param", "grad", "update", "act"):
        for n, name in enumerate(NAMES):
            tensor = rng.normal(size=16) * 10.0 ** (n - 8)
            tensor[0] = NUMBERS[(step + n) % len(NUMBERS)]
            if n == 3:
                tensor[:] = np.nan
            if n == 4:
                tensor[:] = 0.0
            made = sketch(tensor, histogram=True)
            rows.append(made.rows)
            hists.append(made.hist)
            ids.append(writer.site_id(Site(kind=kind, name=name, shape=(16,), dtype="float32", owner=name)))
    index = np.arange(len(ids), dtype=np.int32)
    record = StatsRecord(
        step, time.time(), np.array(ids, np.int32), np.array(rows), index, np.array(hists, dtype=np.float32)
    )
    writer.put(record, record.rows.nbytes, step=step)
    names = np.array([writer.scalar_id(name) for name in ("loss", *NAMES)], np.int32)
    values = np.array([NUMBERS[(step + n) % len(NUMBERS)] for n in range(len(names))])
    writer.put(ScalarsRecord(names, np.full(len(names), step), np.full(len(names), time.time()), values), 64, step=step)
    writer.set_step(step)


def empty_run(dir: Path) -> Path:
    """A run that ended before its first step."""
    run = create_run(dir, project="hostile", name="empty")
    Writer(run, _OPTIONS).close("finished")
    return run


def broken_runs(dir: Path, secret: Path) -> dict[str, Path]:
    """Folders that look like runs and are not to be trusted, by what is wrong with them. `secret` lies outside."""
    whole = create_run(dir, project="broken", name="whole")
    writer = Writer(whole, _OPTIONS)
    for step in range(20):
        _record(writer, step)
    writer.close("finished")
    made = {}
    for name, spoil in _BREAK.items():
        made[name] = whole.with_name(name.replace(" ", "-"))
        shutil.copytree(whole, made[name])
        spoil(made[name], secret)
    return made


def _linked_manifest(run: Path, secret: Path) -> None:
    (run / RUN_FILE).unlink()
    (run / RUN_FILE).symlink_to(secret)


def _linked_catalog(run: Path, secret: Path) -> None:
    (run / CATALOG_FILE).unlink()
    (run / CATALOG_FILE).symlink_to(secret)


def _linked_stats(run: Path, secret: Path) -> None:
    for file in (run / "stats").rglob("*.parquet"):
        file.unlink()
        file.symlink_to(secret)


def _linked_model(run: Path, secret: Path) -> None:
    (run / MODEL_FILE).unlink(missing_ok=True)
    (run / MODEL_FILE).symlink_to(secret)


def _linked_tensors(run: Path, secret: Path) -> None:
    (run / "tensors").symlink_to(secret.parent, target_is_directory=True)


def _deep_manifest(run: Path, _: Path) -> None:
    (run / RUN_FILE).write_text('{"format": 1, "id": "x", "config": ' + '{"a": ' * 100_000, encoding="utf-8")


def _deep_config(run: Path, _: Path) -> None:
    document = json.loads((run / RUN_FILE).read_text(encoding="utf-8"))
    document.pop("crc32", None)
    text = json.dumps(document | {"config": "HERE"})
    (run / RUN_FILE).write_text(text.replace('"HERE"', '{"a": ' * 800 + "1" + "}" * 800), encoding="utf-8")


def _huge_manifest(run: Path, _: Path) -> None:
    with (run / RUN_FILE).open("r+b") as file:
        file.truncate(100 << 20)


def _nan_manifest(run: Path, _: Path) -> None:
    document = json.loads((run / RUN_FILE).read_text(encoding="utf-8"))
    document.pop("crc32", None)
    document |= {"created_time": float("nan"), "config": {"lr": float("inf")}, "ended_time": float("-inf")}
    (run / RUN_FILE).write_text(json.dumps(document), encoding="utf-8")


def _bad_catalog(run: Path, _: Path) -> None:
    (run / CATALOG_FILE).write_bytes(b"SQLite format 3\x00" + b"\xff" * 5000)


def _trick_catalog(run: Path, secret: Path) -> None:
    """Segments whose paths lead out, with right checksums."""
    connection = sqlite3.connect(run / CATALOG_FILE)
    for row in connection.execute("select * from segments").fetchall():
        moved = [*row[:4], f"../../../../{secret.name}", *row[5:-1]]
        crc = zlib.crc32(row_text(*moved))
        connection.execute("update segments set file = ?, crc = ? where id = ?", (moved[4], crc, row[0]))
    connection.commit()
    connection.close()


def _newer(run: Path, _: Path) -> None:
    (run / RUN_FILE).write_text('{"format": 999, "id": "x"}', encoding="utf-8")


def _binary_manifest(run: Path, _: Path) -> None:
    (run / RUN_FILE).write_bytes(bytes(range(256)) * 10)


_BREAK: Final = {
    "linked manifest": _linked_manifest,
    "linked catalog": _linked_catalog,
    "linked stats": _linked_stats,
    "linked model": _linked_model,
    "linked tensors": _linked_tensors,
    "deep manifest": _deep_manifest,
    "deep config": _deep_config,
    "huge manifest": _huge_manifest,
    "numbers JSON lacks": _nan_manifest,
    "bad catalog": _bad_catalog,
    "trick catalog": _trick_catalog,
    "newer format": _newer,
    "binary manifest": _binary_manifest,
}
