"""The installed package: its name on the package index, its version and its extras."""

from __future__ import annotations

import re
from typing import Final

DISTRIBUTION: Final = "sonde-ml"
"""The name to install. The module and the command are called `sonde`."""

OTHER_DISTRIBUTION: Final = "sonde"
"""An unrelated package whose module and command have the same names."""

DOCS_URL: Final = "https://github.com/sonde-ml/sonde/blob/main/docs"
"""Where the documentation is read online."""

EXTRAS: Final = {
    "monitor": "live view in the terminal",
    "plot": "figures for papers",
    "pandas": "tables as pandas data frames",
    "polars": "tables as Polars data frames",
    "tensors": "snapshots of whole tensors",
    "dask": "tensor analyses on a cluster",
    "h5": "export to HDF5",
    "gpu": "GPU metrics",
    "transformers": "Hugging Face trainers and the hub",
    "lightning": "Lightning",
    "keras": "Keras 3",
    "jax": "JAX, Flax and Optax",
    "tune": "fine-tuning, checkpoints and Accelerate",
    "wandb": "mirror to Weights & Biases",
    "tensorboard": "mirror to TensorBoard",
    "mlflow": "mirror to MLflow",
    "trackio": "mirror to trackio",
}
"""What each extra adds; `pyproject.toml` lists its packages."""

_REQUIREMENT: Final = re.compile(r"""([\w.-]+).*\bextra == ['"]([\w-]+)['"]""")


def version() -> str:
    """The version of sonde, from the metadata of its installation."""
    from importlib.metadata import version as version_of

    return version_of(DISTRIBUTION)


def install_command(extra: str) -> str:
    """The command that installs sonde with an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def extra_packages() -> dict[str, list[str]]:
    """The packages that each extra installs, from the metadata of this installation."""
    from importlib.metadata import requires

    packages: dict[str, list[str]] = {extra: [] for extra in EXTRAS}
    for requirement in requires(DISTRIBUTION) or ():
        match = _REQUIREMENT.match(requirement)
        if match and match[2] in packages:
            packages[match[2]].append(match[1])
    return packages
