"""The map of the code is true: every file it names exists, every room is on it, and the walks are really walked."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "sonde"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
# `diagnose/rules/NAME.py` is a placeholder for a file to be written.
NAMED = re.compile(r"(?<![\w.])(?:[\w.-]+/)*[\w-]+\.(?:py|c|ts|svelte|md|toml|txt)\b|`((?:[\w.-]+/)+)`")


def named(text: str) -> list[str]:
    """Every file and folder that a text names."""
    return [match[0].strip("`") for match in NAMED.finditer(text)]


def exists(name: str) -> bool:
    placed = Path(name).parent if "NAME" in name else Path(name)
    return any((top / placed).exists() for top in (PACKAGE, ROOT))


def section(heading: str) -> str:
    """What follows a heading, up to the next one of its level."""
    level = heading.partition(" ")[0]
    found = re.search(rf"^{re.escape(heading)}\n(.*?)(?=^#{{2,{len(level)}}} |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, heading
    return found[1]


def test_every_file_that_the_map_names_exists() -> None:
    names = named(PAGE)
    assert len(names) > 100
    assert [name for name in names if not exists(name)] == []


def test_every_room_is_on_the_map() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", section("## The rooms"), re.MULTILINE)
    rooms = {
        f"{path.name}/" if path.is_dir() else path.name
        for path in PACKAGE.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert sorted(rows) == sorted(rooms)


def test_every_folder_of_a_room_that_names_its_folders_is_named() -> None:
    named_folders = {name for name in named(section("## The rooms")) if name.endswith("/")}
    for room in ("write", "read", "diagnose", "session", "show"):
        folders = {f"{room}/{path.parent.name}/" for path in (PACKAGE / room).glob("*/__init__.py")}
        assert folders <= named_folders, room


MANY_OF_A_KIND = ("diagnose/rules", "diagnose/examples", "cli")
MOST_ENTRIES = 21


def crowded(files: list[str]) -> dict[str, int]:
    """The folders with too many entries for a reader to choose from, and how many they have."""
    entries: dict[str, set[str]] = {}
    for file in files:
        *folders, name = Path(file).parts
        if name not in ("__init__.py", "__main__.py", "py.typed"):
            for depth, entry in enumerate((*folders, name)):
                entries.setdefault("/".join(folders[:depth]), set()).add(entry)
    return {name: len(inside) for name, inside in entries.items() if len(inside) > MOST_ENTRIES}


def test_no_folder_has_more_entries_than_a_reader_can_look_through() -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(command, cwd=PACKAGE, capture_output=True, text=True, check=True).stdout.split()
    assert sorted(crowded([file for file in files if (PACKAGE / file).exists()])) == sorted(MANY_OF_A_KIND)


def test_a_crowded_folder_is_found() -> None:
    files = [f"room/part_{number}.py" for number in range(MOST_ENTRIES)]
    assert crowded([*files, "room/__init__.py", "other/code.py"]) == {}
    assert crowded([*files, "room/folder/code.py"]) == {"room": MOST_ENTRIES + 1}


def test_the_layers_are_those_that_import_linter_holds() -> None:
    (drawn,) = re.findall(r"```text\n(.*?)```", section("## The layers"), re.DOTALL)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (held,) = [contract["layers"] for contract in contracts if contract["id"] == "layers"]
    assert [re.findall(r"\w+", row) for row in drawn.splitlines()] == [re.findall(r"\w+", row) for row in held]


@pytest.mark.parametrize(
    ("planted", "missing"),
    [
        ("see `write/nothing.py`", "write/nothing.py"),
        ("```text\nwrite/nothing.py\n```", "write/nothing.py"),
        ("in `no_room/`", "no_room/"),
        ("`web/src/lib/nothing.ts`", "web/src/lib/nothing.ts"),
        ("copy it to `no_room/NAME.py`", "no_room/NAME.py"),
    ],
)
def test_a_file_that_is_not_there_is_found(planted: str, missing: str) -> None:
    assert [name for name in named(planted) if not exists(name)] == [missing]


# Trains, logs, keeps whole tensors, meets a NaN, and looks at all of it; prints each file of ours that ran.
WALK = """
import sys, threading
from pathlib import Path
import sonde, torch

home, ran = str(Path(sonde.__file__).parent), set()

def note(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(home) and code.co_name != "<module>":
        ran.add(code.co_filename[len(home) + 1:])

threading.setprofile(note)
sys.setprofile(note)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters())
with sonde.watch(model, optimizer, snapshots=True):
    for step in range(8):
        loss = model(torch.randn(4, 8)).square().mean() * (1e6 if step == 5 else 1.0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sonde.log({"loss": loss})
run = sonde.open("latest")
run.scalars("loss")
run.tensors.get("param/0.weight")

from starlette.testclient import TestClient
from sonde.show.web.access import Access
from sonde.show.web.answering import Answers
from sonde.show.web.app import make_app
from sonde.show.web.runs import RunTable

origin = {"Origin": "http://127.0.0.1:7007"}
access, answers = Access(port=7007), Answers(RunTable([Path("runs")]))
page = TestClient(make_app(answers, access, ("127.0.0.1",)), base_url=origin["Origin"])
assert page.post("/api/login", json={"token": access.token}, headers=origin).status_code == 204
(row,) = page.get("/api/runs").json()["runs"]
assert page.get(f"/api/runs/{row['id']}/heat?kind=grad&stat=norm").status_code == 200
answers.close()

from sonde.cli.main import main
try:
    main(["diagnose", "latest"])
except SystemExit:
    pass
sys.setprofile(None)
print("ran:", *sorted(ran))
"""


@pytest.mark.slow
def test_every_python_file_of_a_walk_runs_on_it(tmp_path: Path) -> None:
    steps = re.findall(r"^\d+\. `([\w/]+\.py)`:", section("## Four walks"), re.MULTILINE)
    assert len(steps) > 80
    done = subprocess.run([sys.executable, "-c", WALK], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    ran = set(done.stdout.rpartition("ran:")[2].split())
    assert [step for step in steps if step not in ran] == []


def test_the_steps_of_a_walk_are_numbered_in_order() -> None:
    for walk in re.split(r"^### ", section("## Four walks"), flags=re.MULTILINE)[1:]:
        numbers = [int(number) for number in re.findall(r"^(\d+)\. ", walk, re.MULTILINE)]
        assert numbers == list(range(1, len(numbers) + 1)), walk.splitlines()[0]
