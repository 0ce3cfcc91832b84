"""A real notebook in a real kernel: messages are no red boxes, and results show themselves."""

from __future__ import annotations

from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

pytestmark = pytest.mark.slow

TRAIN = """
import torch, sonde
from sonde.display import warn
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=3.0)
with sonde.init(project="gpt", name="baseline") as session:
    session.watch(model, optimizer)
    for _ in range(60):
        x = torch.randn(32, 4)
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        session.log({"loss": loss})
session.step()
warn("sonde: careful")
session
"""
RESULTS = {
    "run": 'run = sonde.open("latest"); run',
    "findings": "run.findings()",
    "finding": "run.findings()[0]",
    "stats": 'run.stats("grad/*/norm")',
    "scalars": 'run.scalars("loss")',
    "sql": 'run.sql("select step, site, norm from stats limit 9")',
    "runs": "sonde.runs()",
    "comparison": "sonde.compare(run, run)",
    "plot": 'run.stats("grad/*/norm").plot()',
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The outputs of each cell, by name."""
    folder = tmp_path_factory.mktemp("notebook")
    cells = {"train": TRAIN, **RESULTS}
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in cells.values()])
    nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(folder)}}).execute()
    (folder / "executed.ipynb").write_text(nbformat.writes(notebook))
    return {name: cell.outputs for name, cell in zip(cells, notebook.cells, strict=True)}


def streams(outputs: list[Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for output in outputs:
        if output.output_type == "stream":
            found[output.name] = found.get(output.name, "") + output.text
    return found


def shown(outputs: list[Any]) -> dict[str, str]:
    (result,) = [output for output in outputs if output.output_type == "execute_result"]
    return dict(result.data)


def test_messages_are_no_red_boxes(outputs: dict[str, list[Any]]) -> None:
    printed = streams(outputs["train"])
    assert set(printed) == {"stdout"}
    for words in ("recording to", "critical since step", "Finished: 60 steps", "warning: step()", "careful"):
        assert f"sonde: {words}" in printed["stdout"]
    assert [name for name, cell in outputs.items() if "stderr" in streams(cell)] == []


def test_session_says_where_its_run_is(outputs: dict[str, list[Any]]) -> None:
    assert "sonde.open(" in shown(outputs["train"])["text/html"]


@pytest.mark.parametrize("name", [name for name in RESULTS if name != "plot"])
def test_results_show_themselves(outputs: dict[str, list[Any]], name: str) -> None:
    data = shown(outputs[name])
    assert data["text/html"].startswith('<div class="sonde-card">')
    assert 0 < len(data["text/plain"]) < 5000


def test_finding_shows_its_chart_and_its_remedy(outputs: dict[str, list[Any]]) -> None:
    html = shown(outputs["finding"])["text/html"]
    for part in ("<svg", "<polyline", "<b>Fix:</b>", "<code>", "Why"):
        assert part in html


def test_plot_of_a_table_is_a_picture(outputs: dict[str, list[Any]]) -> None:
    assert "image/png" in shown(outputs["plot"])
