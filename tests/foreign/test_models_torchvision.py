"""Models of torchvision, trained with and without sonde."""

from __future__ import annotations

import pytest

import specimens_torchvision
from specimen import Specimen, parameters


@pytest.mark.parametrize("specimen", parameters(specimens_torchvision.ALL))
def test_training_is_the_same_and_every_number_is_right(specimen: Specimen) -> None:
    specimen.examine().check()
