"""What is given as data becomes a data set, or is refused before a run begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sonde.errors import UsageError
from sonde.tune.train.data import as_dataset

pytestmark = pytest.mark.slow  # datasets takes a second to import

TEXTS = [{"text": "one"}, {"text": "two"}]


def test_lists_files_and_saved_data_sets_are_the_same():
    import datasets

    made = datasets.Dataset.from_list(TEXTS)
    made.save_to_disk("one")
    datasets.DatasetDict(train=made, test=made.select([0])).save_to_disk("several")
    Path("a.txt").write_text("one\ntwo\n")
    several = datasets.load_from_disk("several")
    for given in (["one", "two"], TEXTS, made, several, "one", "several", "a.txt"):
        assert as_dataset(given).to_list() == TEXTS
    with pytest.raises(UsageError, match='no split "train", only test'):
        as_dataset(datasets.DatasetDict(test=made))
    with pytest.raises(UsageError, match="the data set is empty"):
        as_dataset(made.select([]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "the data set is empty"),
        ([1], "row 1: expected a string or a mapping, got int"),
        ([{"body": "a"}], "these rows have body. Rename the column"),
        ([{"text": "a"}, {"txt": "b"}], "row 2: text is missing"),
        ([{"text": "a"}, {"text": None}], "row 2: text is missing"),
        ([{"text": 3}], "text contains int64, not strings"),
        ([{"prompt": "a", "completion": None}, {"prompt": "a", "completion": "b"}], "row 1: completion is missing"),
    ],
)
def test_rows_that_cannot_be_trained_on(given: Any, message: str):
    with pytest.raises(UsageError, match=message):
        as_dataset(given)


def test_a_row_that_was_left_out_may_be_empty():
    import datasets

    made = datasets.Dataset.from_list([{"text": "a"}, {"text": None}])
    assert len(as_dataset(made.select([0]))) == 1
