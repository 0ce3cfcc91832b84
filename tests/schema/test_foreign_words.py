"""Errors of foreign libraries in one line: what happened stays, where in their source it was goes."""

from __future__ import annotations

import pytest

from sonde.errors import RunError
from sonde.schema.words import in_words

REFUSED = """  x error getting object metadata from object store dispatch failure
  |
  | context:
  |    0: icechunk::repository::open
  |            with ref_key="branch.main/ref.json"
  |              at icechunk/src/repository.rs:260
  |
  |-> error getting object metadata from object store dispatch failure
  |-> dispatch failure
  |-> io error
  `-> Connection refused (os error 111)
"""


def test_the_innermost_cause_is_named_and_the_source_is_not() -> None:
    found = in_words(ValueError(REFUSED))
    assert found == (
        "ValueError: error getting object metadata from object store dispatch failure: io error: "
        "Connection refused (os error 111)"
    )


def test_a_long_one_keeps_both_its_ends() -> None:
    found = in_words(ValueError("begin\n" + "\n".join(f"cause {n:03d}" for n in range(200)) + "\nend"))
    assert found.startswith("ValueError: begin: cause 000")
    assert found.endswith("cause 199: end")
    assert len(found) < 310


@pytest.mark.parametrize("text", ["no snapshot of step 7. Available: [1].", "context: yes"])
def test_our_own_are_said_as_they_are(text: str) -> None:
    assert in_words(RunError(text)) == text
