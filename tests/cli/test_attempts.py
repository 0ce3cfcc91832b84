"""Attempts on the command line: shown, named and compared."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import sonde
from sonde.cli.main import app
from sonde.schema.records import ScalarsRecord
from sonde.write.folder import create_run
from sonde.write.writer import Writer, WriterOptions


@pytest.fixture
def rewound(tmp_path):
    """Ten losses, back to step 6, two others."""
    path = create_run(tmp_path / "runs", project="p", name="n")
    writer = Writer(path, WriterOptions(system_interval_s=0))
    loss = np.array([writer.scalar_id("loss")], np.int32)
    for step, value in [*((step, 1.0) for step in range(10)), (6, 2.0), (7, 2.0)]:
        if (step, value) == (6, 2.0):
            writer.begin_attempt(6, after=10)
        writer.put(ScalarsRecord(loss, np.array([step]), np.zeros(1), np.array([value])), 50, step=step)
        writer.set_step(step + 1)
    writer.close("finished", deadline_s=20)
    return tmp_path / "runs"


def run(*arguments):
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result.output


def test_show_mentions_them(rewound):
    assert "2; the last started at step 6 (rewind)" in run("show", "p/n", "--dir", rewound)
    facts = json.loads(run("show", "p/n", "--dir", rewound, "--json"))
    assert [row["first_step"] for row in facts["attempts"]] == [0, 6]


def test_a_run_can_be_named_with_its_attempt(rewound):
    assert sonde.open("p/n", dir=rewound).last_step == 7
    assert sonde.open("p/n@attempt=0", dir=rewound).last_step == 9
    facts = json.loads(run("show", "p/n@attempt=0", "--dir", rewound, "--json"))
    assert facts["last_step"] == 9


def test_two_attempts_are_compared(rewound):
    facts = json.loads(run("compare", "p/n@attempt=0", "p/n@attempt=1", "--dir", rewound, "--json"))
    assert facts["first_divergence"]["step"] == 6
    found = sonde.compare(*(sonde.open("p/n", dir=rewound).attempt(k) for k in (0, 1)))
    assert (found.a, found.b) == ("p/n@attempt=0", "p/n@attempt=1")
