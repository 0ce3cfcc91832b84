"""What a run shows depends on the rows of its attempts: damage to them is an error, never a mixture of histories."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

import sonde
from sonde.errors import CorruptError


@pytest.fixture
def rewound(record) -> Path:
    """Sixteen steps, back to step 8, four more."""
    recording = record().steps(16).flush()
    recording.writer.begin_attempt(8, after=16)
    recording.num_steps = 8
    recording.steps(4).finish()
    return recording.path


def test_two_histories_are_kept_apart(rewound):
    run = sonde.open(rewound)
    assert run.stats("grad/0.weight/norm")["step"].to_pylist() == list(range(12))
    assert run.attempt(0).stats("grad/0.weight/norm")["step"].to_pylist() == list(range(16))
    assert run.verify() == []


@pytest.mark.parametrize(
    "damage",
    [
        "delete from attempts where id = 0",
        "delete from attempts where id = 1",
        "delete from attempts",
        "drop table attempts",
        "update attempts set first_step = 9 where id = 1",
        "update attempts set stats_sequence = 3 where id = 1",
        "update attempts set visible_step = 3 where id = 0",
    ],
)
def test_a_missing_or_changed_attempt_is_an_error(rewound, damage):
    connection = sqlite3.connect(rewound / "catalog.sqlite")
    connection.execute(damage)
    connection.commit()
    connection.close()
    run = sonde.open(rewound)
    with pytest.raises(CorruptError, match="an attempt is missing"):
        run.stats("grad/0.weight/norm")
    with pytest.raises(CorruptError):
        run.scalars()
    assert any("attempt" in problem for problem in run.verify())
