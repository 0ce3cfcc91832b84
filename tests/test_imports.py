"""What importing costs: `import sonde` brings in nothing, viewing never torch, training never a query engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import sonde

ROOT = Path(__file__).parents[1]

# The fixed names of the public surface, as the design lists them.
DOCUMENTED = {
    "init", "watch", "log", "step", "batch", "finish", "tap", "rewind", "snapshot", "record",
    "open", "runs", "compare", "ui",
    "Session", "Run", "Settings", "Snapshots", "Mirror", "every", "first",
}  # fmt: skip
MODULES = {"adapters", "compat", "errors", "flow", "jax", "show", "testing", "tune"}
FOREIGN = ("torch", "numpy", "pyarrow", "duckdb", "pydantic", "psutil", "rich", "typer", "pandas", "yaml", "sqlite3")
VIEWERS = ("duckdb", "rich", "typer", "pandas", "matplotlib", "starlette", "uvicorn", "textual")

BLOCK_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "jax", "tensorflow"):
            raise ImportError(f"{name} must not be imported here")

sys.meta_path.insert(0, NoTorch())
"""


def python(code: str, *arguments: str) -> str:
    """What a fresh Python prints."""
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONWARNINGS": "default"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def loaded_by(code: str) -> set[str]:
    """The modules a piece of code brings in beyond those of an empty Python."""
    show = "\nimport sys; print(*sorted(set(sys.modules) - before))"
    return set(python(f"import sys; before = set(sys.modules)\n{code}{show}").split())


def top(modules: set[str]) -> set[str]:
    return {module.split(".")[0] for module in modules}


def test_import_sonde_brings_in_nothing_foreign() -> None:
    modules = loaded_by("import sonde")
    assert not top(modules) & set(FOREIGN)
    assert {module for module in modules if module.startswith("sonde")} == {"sonde"}
    # Its cost in modules rather than in seconds: a wall clock would measure the machine.
    assert len(modules) <= 30, sorted(modules)


def test_public_names_are_the_documented_ones() -> None:
    assert set(sonde.__all__) == DOCUMENTED
    assert set(dir(sonde)) == DOCUMENTED | MODULES | {"__version__"}
    assert sonde.__all__ == sorted(sonde.__all__)


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_every_public_name_is_there(name: str) -> None:
    assert callable(getattr(sonde, name))


def test_unknown_name_is_an_attribute_error_that_helps() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'wacth'\. Did you mean .watch"):
        _ = sonde.wacth  # type: ignore[attr-defined]


CHECK_RECORD = """
import inspect, pickle, pydoc

assert inspect.isfunction(record), record
target, *keywords = inspect.signature(record).parameters
assert target == "target" and {"project", "name", "dir", "snapshots"} <= set(keywords)
assert "Record a training function" in pydoc.render_doc(record)
assert pickle.loads(pickle.dumps(record)) is record

@record
def train(x): return x + 1
assert inspect.isfunction(train) and train.__name__ == "train"

import sonde.write.writer
import sonde
assert sonde.record is record and sonde.write.writer.Writer.__name__ == "Writer"
print("ok")
"""


@pytest.mark.parametrize(
    "code",
    [
        "import sonde; record = sonde.record",
        "from sonde import record",
        "import sonde.write.writer, sonde; record = sonde.record",
        "from sonde.write.writer import Writer; from sonde import record",
        "import sonde.session, sonde; record = sonde.record",
    ],
)
def test_record_is_a_plain_function_whatever_was_imported_before(code: str) -> None:
    assert python(f"{code}\n{CHECK_RECORD}").strip() == "ok"


def test_no_public_function_shares_its_name_with_a_room() -> None:
    """Importing `sonde.x.y` sets the attribute `x` of `sonde`: a room of that name would replace the function."""
    rooms = {path.stem for path in (ROOT / "src" / "sonde").iterdir()}
    assert not rooms & set(sonde.__all__)


LOOK = """
import sonde
run = sonde.open(sys.argv[1])
assert run.status == "finished" and run.last_step == 2
assert run.scalars("loss").num_rows == 3
assert run.stats("grad/*/norm").num_rows == 3
assert run.sql("select count(*) as n from scalars").to_pylist() == [{"n": 3}]
assert len(sonde.runs(sys.argv[2])) == 1
sonde.compare(run, run)
run._repr_html_()
from sonde.cli.main import main
for arguments in (["list"], ["show", sys.argv[1]], ["compare", sys.argv[1], sys.argv[1]], ["info"],
                  ["query", sys.argv[1], "select 1"], ["export", sys.argv[1], "-w", "stats", "-o", "out.parquet"]):
    try:
        main([*arguments, "--json", "--dir", sys.argv[2]])
    except SystemExit as exit:
        assert exit.code == 0, arguments
assert "torch" not in sys.modules
print("ok")
"""

WRITE = """
import sys, time
import numpy as np
from pathlib import Path
from sonde.write.folder import create_run
from sonde.write.writer import Writer, WriterOptions
from sonde.schema.records import ScalarsRecord, Site, StatsRecord
from sonde.schema.sketch import N, SUMSQ, empty_rows

run = create_run(Path(sys.argv[1]), project="p", name="n", config={}, tags=(), notes="")
writer = Writer(run, WriterOptions())
site = np.array([writer.site_id(Site(kind="grad", name="0.weight", shape=(4,), dtype="float32"))], np.int32)
name = np.array([writer.scalar_id("loss")], np.int32)
for step in range(3):
    rows = empty_rows(1)
    rows[0, N], rows[0, SUMSQ] = 4, 4.0
    writer.put(StatsRecord.without_hist(step, time.time(), site, rows), 100, step=step)
    writer.put(ScalarsRecord(name, np.array([step]), np.array([time.time()]), np.array([1.0])), 100, step=step)
writer.close("finished")
print(run)
"""


def test_viewing_works_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    run = python(WRITE, str(tmp_path / "runs")).strip()
    assert python(BLOCK_TORCH + LOOK, run, str(tmp_path / "runs")).strip().endswith("ok")


def test_the_block_bites() -> None:
    result = subprocess.run([sys.executable, "-c", BLOCK_TORCH + "import torch"], capture_output=True, check=False)
    assert b"must not be imported here" in result.stderr


TRAIN = """
import sonde, torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters())
after_torch = set(sys.modules)
with sonde.init(project="p", dir=sys.argv[1]):
    sonde.watch(model, optimizer)
    for step in range(3):
        loss = model(torch.randn(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sonde.log({"loss": loss})
print(*sorted(set(sys.modules) - after_torch))
"""


def test_training_imports_no_viewer(tmp_path: Path) -> None:
    loaded = set(python(f"import sys\n{TRAIN}", str(tmp_path / "runs")).split())
    modules = top(loaded)
    assert not modules & set(VIEWERS)
    assert "pyarrow" in modules  # the run was really written
    assert "sonde.probe.in_graph" not in loaded  # registers an operation; only `activations="in-graph"` needs it


def test_help_of_the_command_is_light() -> None:
    code = "from sonde.cli.main import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass"
    modules = set(python(f"import sys\n{code}\nprint('modules:', *sys.modules)").split("modules:")[1].split())
    assert not top(modules) & {"torch", "numpy", "pyarrow", "duckdb", "pydantic", "rich", "pandas", "yaml"}


def test_types_are_shipped() -> None:
    assert (Path(sonde.__file__).parent / "py.typed").exists()
