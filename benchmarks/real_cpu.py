"""The cost of recording on a CPU, with default settings, from the first step.

    python benchmarks/real_cpu.py                          # all models, about fifteen minutes
    python benchmarks/real_cpu.py --models small-cnn --lanes none

Every lane is a separate process with one thread for torch; a control runs before and after the lane with sonde. On a
machine that does other work, `--clock cpu` counts CPU time instead (of all threads of the process, without waiting for
the disk), and the control takes turns with the lane, a hundred steps each.
Writes benchmarks/results/real-cpu.json and real-cpu.md.
"""

from __future__ import annotations

from lanes import arguments, benchmark
from real_models import CPU_MODELS

if __name__ == "__main__":
    benchmark(CPU_MODELS, arguments(__doc__, CPU_MODELS), "cpu", "real-cpu")
