"""`sonde demo`: each fault is the first finding of its run, and gone from the repaired one."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from sonde.cli.demo import TITLES
from sonde.demo.faults import FAULTS


def test_every_fault_has_a_title_and_is_in_the_help(sonde: Any) -> None:
    assert list(TITLES) == list(FAULTS)
    text = sonde("demo", "--help").stdout
    for name, title in TITLES.items():
        assert re.search(rf"{name} +{title}", text)


def test_unknown_fault_is_answered_with_the_nearest(sonde: Any) -> None:
    assert 'no fault "vanish". Did you mean "vanishing"?' in sonde("demo", "vanish", code=2).stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_root_finding_is_first_and_gone_after_the_repair(name: str, sonde: Any, tmp_path: Path) -> None:
    answer = sonde("demo", name, "--json", "--dir", tmp_path).json
    assert answer["broken"]["findings"][0]["rule"] == FAULTS[name].rule
    assert answer["broken"]["findings"][0]["severity"] != "info"
    assert not [one for one in answer["repaired"]["findings"] if one["severity"] != "info"]
    assert FAULTS[name].rule not in {one["rule"] for one in answer["repaired"]["findings"]}


@pytest.mark.slow
def test_without_a_terminal_the_tour_says_how_to_go_further(sonde: Any, tmp_path: Path) -> None:
    text = sonde("demo", "--dir", tmp_path).stdout
    places = [
        text.index(part) for part in ("1  The fault", "2  The diagnosis", "nan_inf", "3  The remedy", "4  Trained")
    ]
    assert places == sorted(places)
    assert f"- {FAULTS['nan'].wrong}\n+ {FAULTS['nan'].right}" in text
    assert "no problems found" in text[places[-1] :]
    assert f"Both runs side by side:  sonde ui {tmp_path}" in text


@pytest.mark.slow
def test_on_a_terminal_it_asks_and_serves_both_runs_until_interrupted(tmp_path: Path) -> None:
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "sonde.cli.main", "demo", "--dir", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "BROWSER": "true", "NO_COLOR": "1", "COLUMNS": "200"}
    tour = subprocess.Popen(command, env=environment, stdin=child, stdout=child, stderr=child, start_new_session=True)
    os.close(child)
    try:
        os.write(parent, b"3\n")
        out, end = "", time.monotonic() + 200
        while not (url := re.search(r"(http://\S+)/compare\?ids=(\w+),(\w+)#token=(\S+)", out)):
            assert time.monotonic() < end, out
            if select.select([parent], [], [], 1.0)[0]:
                out += os.read(parent, 4096).decode(errors="replace")
        origin, *ids, token = url.groups()
        for id in ids:
            request = urllib.request.Request(f"{origin}/api/runs/{id}", headers={"Authorization": f"Bearer {token}"})
            with urllib.request.urlopen(request, timeout=30) as answer:
                assert b"dead-relu" in answer.read()
        os.killpg(tour.pid, signal.SIGINT)
        assert tour.wait(30) == 0
    finally:
        tour.kill()
        os.close(parent)
