"""`sonde run`: a script that has never heard of sonde is recorded, and runs as it would without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import sys
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(sys.argv[1:], __name__, loss.item())
{ending}
"""


def write_script(ending: str = "") -> Path:
    path = Path("train.py")
    path.write_text(SCRIPT.format(ending=ending))
    return path


@pytest.mark.parametrize("call", [["train.py"], pytest.param(["-m", "train"], marks=pytest.mark.slow)])
def test_unmodified_script_is_recorded(call: list[str], process: Any, sonde: Any) -> None:
    write_script()
    answer = process("run", "--project", "p", "--name", "n", "--tag", "t", *call, "--lr", "3", "--json")
    assert answer.code == 0, answer
    assert answer.stdout.startswith("['--lr', '3', '--json'] __main__ ")
    found = sonde("show", "p/n", "--json").json
    assert (found["status"], found["last_step"], found["tags"]) == ("finished", 4, ["t"])
    assert {row["site"] for row in found["largest_gradients"]} == {"0.weight", "0.bias", "2.weight", "2.bias"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "code", "status"),
    [
        ("sys.exit(7)", 7, "crashed"),
        ("raise RuntimeError('boom')", 1, "crashed"),
        ("raise KeyboardInterrupt", 130, "interrupted"),
    ],
)
def test_exit_code_is_the_scripts(ending: str, code: int, status: str, process: Any, sonde: Any) -> None:
    write_script(ending)
    answer = process("run", "--name", "n", "train.py")
    assert answer.code == code, answer
    assert sonde("show", "n", "--json").json["status"] == status


def test_script_that_is_not_there_is_one_line(process: Any) -> None:
    answer = process("run", "nowhere.py")
    assert answer.code == 2
    assert 'no script "nowhere.py"' in answer.stderr
    assert "Traceback" not in answer.stderr
    assert not Path("runs").exists()
