"""The cost of recording on a GPU, on published models with default settings, from the first step.

    PYTHONPATH=src:vendor python benchmarks/gpu/real.py --out results/            # all models, about 25 minutes
    PYTHONPATH=src:vendor python benchmarks/gpu/real.py --models resnet50 --steps 600 --lanes none

Every lane is a separate process; times are those of the device's clock, and a control runs before and after the lane
with sonde. Writes gpu-real.json and gpu-real.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from lanes import arguments, benchmark
from real_models import GPU_MODELS

if __name__ == "__main__":
    benchmark(GPU_MODELS, arguments(__doc__, GPU_MODELS), "cuda", "gpu-real")
