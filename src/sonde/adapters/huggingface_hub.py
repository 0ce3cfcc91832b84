"""Hugging Face Hub: push a run, a report or a checkpoint to a repository, and download runs from one.

    from sonde.adapters.huggingface_hub import pull, push
    push(sonde.open("latest"), "me/runs")            # a dataset repository, private by default
    for path in pull("me/runs", dir="runs"): ...
    pull_checkpoint("me/model", into="checkpoint")    # from a model repository

A repository of runs holds each under `<project>/<folder>`, as a folder of runs does. A downloaded run is checked
against its hashes before it is added: a damaged or foreign run is rejected, not shown.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal

from sonde.errors import CorruptError, MissingPackageError, RunError, SondeError, UsageError
from sonde.run import Run
from sonde.schema.layout import LOCK_FILE, RUN_FILE

try:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )
except ImportError as error:
    raise MissingPackageError("huggingface_hub", "transformers", "Pushing to a hub") from error

RepoType = Literal["dataset", "model"]
LEFT_OUT: Final = (LOCK_FILE, "*.tmp", "*/.tmp-*", ".*")
PICKLED: Final = ("*.pt", "*.pth", "*.bin", "*.pkl", "*.ckpt")
"""Files that run code when they are loaded: neither pushed nor pulled."""
_CARD: Final = """---
tags: [sonde]
---

# Training runs

Recorded with sonde: statistics of every layer at every step. To view them:

```console
$ sonde hub pull {repo}
$ sonde ui
```
"""

__all__ = ["pull", "pull_checkpoint", "push"]


def push(
    what: Run | str | os.PathLike[str],
    repo: str,
    *,
    private: bool = True,
    token: str | None = None,
    endpoint: str | None = None,
) -> str:
    """Upload a run or a report (one file) to a dataset repository, or a folder with a checkpoint to a model repository.

    The repository is created if it does not exist. Returns the URL of the commit.
    """
    api = HfApi(endpoint=endpoint, token=token)
    with _told(repo, "could not be pushed"):
        if isinstance(what, Run):
            return _push_run(api, what, repo, private)
        path = Path(what)
        if path.is_file():
            return _push_file(api, path, repo, private)
        if (path / RUN_FILE).is_file():
            return _push_run(api, Run(path), repo, private)
        if path.is_dir():
            return _push_checkpoint(api, path, repo, private)
    raise UsageError(f"{path} is not a run, a report or a checkpoint: nothing to push.")


def pull(
    repo: str,
    *,
    dir: str | os.PathLike[str] = "runs",
    token: str | None = None,
    endpoint: str | None = None,
) -> list[Path]:
    """Download every run of a dataset repository into a folder of runs; existing runs are left unchanged."""
    target = Path(dir)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target, prefix=".pull-") as scratch:
        folder = _download(repo, Path(scratch), token, endpoint)
        found = [(run, target / run.relative_to(folder)) for run in _runs_in(folder)]
        if not found:
            raise RunError(f"{repo} contains no run. Push one first:  sonde hub push latest {repo}")
        for run, _ in found:
            _check(run, repo)
        for run, place in found:
            if not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                run.replace(place)
    return [place for _, place in found]


def pull_checkpoint(
    repo: str, *, into: str | os.PathLike[str], token: str | None = None, endpoint: str | None = None
) -> Path:
    """Download the files of a model repository into a folder, without pickled ones, which run code when they are
    read."""
    folder = Path(into)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} already exists and is not empty. Choose a new folder.")
    with _told(repo, "could not be downloaded", kind="model"):
        snapshot_download(repo, local_dir=folder, ignore_patterns=list(PICKLED), token=token, endpoint=endpoint)
    if not any(folder.glob("*.safetensors")):
        raise RunError(f"{repo} contains no weights (*.safetensors). Its files are in {folder}.")
    return folder


def _push_run(api: Any, run: Run, repo: str, private: bool) -> str:
    if run.status == "running":
        raise UsageError(f"{run.path.name} is still being written. Push it when it has ended.")
    id = _make(api, repo, "dataset", private)
    _put_card(api, id)
    place = f"{run.path.parent.name}/{run.path.name}"
    return str(
        api.upload_folder(
            repo_id=id,
            repo_type="dataset",
            folder_path=run.path,
            path_in_repo=place,
            ignore_patterns=list(LEFT_OUT),
            commit_message=f"{run.project}/{run.name}: {run.status} after {run.last_step + 1} steps",
        ).commit_url
    )


def _push_file(api: Any, path: Path, repo: str, private: bool) -> str:
    id = _make(api, repo, "dataset", private)
    message = f"Report {path.name}"
    return str(
        api.upload_file(
            path_or_fileobj=path,
            path_in_repo=f"reports/{path.name}",
            repo_id=id,
            repo_type="dataset",
            commit_message=message,
        ).commit_url
    )


def _push_checkpoint(api: Any, path: Path, repo: str, private: bool) -> str:
    if not any(path.glob("*.safetensors")):
        raise UsageError(f"{path} contains no weights (*.safetensors) and is not a run. Nothing to push.")
    id = _make(api, repo, "model", private)
    return str(
        api.upload_folder(
            repo_id=id,
            repo_type="model",
            folder_path=path,
            ignore_patterns=[*PICKLED, ".*"],
            commit_message=f"Checkpoint {path.name}",
        ).commit_url
    )


def _make(api: Any, repo: str, type: RepoType, private: bool) -> str:
    return str(api.create_repo(repo, repo_type=type, private=private, exist_ok=True).repo_id)


def _put_card(api: Any, repo: str) -> None:
    if not api.file_exists(repo, "README.md", repo_type="dataset"):
        api.upload_file(
            path_or_fileobj=_CARD.format(repo=repo).encode(),
            path_in_repo="README.md",
            repo_id=repo,
            repo_type="dataset",
            commit_message="Add a README",
        )


def _download(repo: str, scratch: Path, token: str | None, endpoint: str | None) -> Path:
    with _told(repo, "could not be downloaded", kind="dataset"):
        folder = scratch / "repository"
        return Path(snapshot_download(repo, repo_type="dataset", local_dir=folder, token=token, endpoint=endpoint))


@contextmanager
def _told(repo: str, what: str, *, kind: RepoType | None = None) -> Iterator[None]:
    """Convert errors of the client into one line with a remedy."""
    try:
        yield
    except HFValidationError as error:
        raise UsageError(f'"{repo}" is not a repository name. Use user/name.') from error
    except RepositoryNotFoundError as error:
        raise RunError(
            f"no {kind or 'such'} repository {repo}, or you have no access to it. Log in with `hf auth login`."
        ) from error
    except HfHubHTTPError as error:
        login = " Log in with `hf auth login`." if getattr(error.response, "status_code", 0) in (401, 403) else ""
        raise RunError(f"{repo} {what}: {_why(error)}{login}") from error
    except SondeError:
        raise
    except Exception as error:
        if not _is_of_the_network(error):
            raise
        raise RunError(
            f"{repo} {what}: cannot reach the hub. Check HF_ENDPOINT, and that HF_HUB_OFFLINE is unset."
        ) from error


def _is_of_the_network(error: Exception) -> bool:
    """Whether it is a network error. The client has changed its HTTP library, and its errors with it."""
    library = type(error).__module__.partition(".")[0]
    return isinstance(error, ConnectionError | LocalEntryNotFoundError) or library.startswith(("httpx", "requests"))


def _runs_in(folder: Path) -> Iterator[Path]:
    for file in sorted(folder.glob(f"*/*/{RUN_FILE}")):
        run = file.parent
        if not any(part.startswith(".") for part in PurePosixPath(run.relative_to(folder)).parts):
            yield run


def _check(run: Path, repo: str) -> None:
    """Check that a run consists of plain files, all as they were written."""
    if any(path.is_symlink() for path in run.rglob("*")):
        raise CorruptError(f"{run.name} in {repo} contains a symbolic link and is refused.")
    damage = Run(run).verify()
    if damage:
        raise CorruptError(f"{run.name} in {repo} is damaged: {damage[0]}")


def _why(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") + "."
