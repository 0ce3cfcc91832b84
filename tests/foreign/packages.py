"""torchvision, timm and diffusers, which `make zoo` installs into a separate folder: importable after `use`.

torchvision's wheel from PyPI is built for CUDA. Next to the CPU build of torch its library does not load, and the
import fails on operators that do not exist. Defined first, they are never called by the models here.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

FOLDER = Path(sys.prefix) / "zoo"
_MISSING = ("nms", "qnms")
_library = torch.library.Library("torchvision", "FRAGMENT")


def use(package: str) -> None:
    """Make a package of the zoo importable, or skip the test."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make zoo")
    for name in _MISSING:
        if not hasattr(torch.ops.torchvision, name):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
