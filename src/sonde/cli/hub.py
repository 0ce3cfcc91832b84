"""`sonde hub push RUN REPO` and `sonde hub pull REPO`: share runs, reports and checkpoints on the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sonde.cli.options import Dir, Json, open_run, runs_dir
from sonde.cli.output import print_json
from sonde.errors import UnknownNameError, UsageError


def hub(
    action: Annotated[str, typer.Argument(metavar="push|pull", help="push uploads, pull downloads.")],
    what: Annotated[
        str, typer.Argument(metavar="WHAT", help="For push: a run, a report or a checkpoint. For pull: REPO.")
    ],
    repo: Annotated[str | None, typer.Argument(metavar="REPO", help="user/name; created if it does not exist.")] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Create the repository as public (default: private).")
    ] = False,
    into: Annotated[
        Path | None,
        typer.Option("--into", metavar="DIR", help="For pull: download a checkpoint from a model repository to DIR."),
    ] = None,
    as_json: Json = False,
    dir: Dir = None,
) -> None:
    """Share runs on the Hugging Face Hub. Log in first with `hf auth login`, or set HF_TOKEN.

    \b
    Examples:
      sonde hub push latest me/runs
      sonde hub push report.html me/runs
      sonde hub push runs/latest/checkpoints/step-000000500 me/model
      sonde hub pull me/runs
      sonde hub pull me/model --into checkpoint
    """
    if action == "push":
        answer = _push(what, repo, public, dir, into)
    elif action == "pull":
        answer = _pull(what, repo, dir, into)
    else:
        raise UnknownNameError("action", action, ("push", "pull"))
    if as_json:
        print_json(answer)
        return
    for line in answer.get("runs") or answer.values():
        print(line)


def _push(what: str, repo: str | None, public: bool, dir: Path | None, into: Path | None) -> dict[str, Any]:
    if into is not None:
        raise UsageError(f"--into works only with pull:  sonde hub pull {repo or 'user/name'} --into {into}")
    if repo is None:
        raise UsageError(f"push needs a repository:  sonde hub push {what} user/name")
    from sonde.adapters.huggingface_hub import push

    is_path = Path(what).is_file() or (Path(what).is_dir() and any(Path(what).glob("*.safetensors")))
    given = what if is_path else open_run(what, dir)
    return {"commit": push(given, repo, private=not public)}


def _pull(repo: str, extra: str | None, dir: Path | None, into: Path | None) -> dict[str, Any]:
    if extra is not None:
        raise UsageError(f"pull takes only a repository:  sonde hub pull {repo}")
    from sonde.adapters.huggingface_hub import pull, pull_checkpoint

    if into is not None:
        return {"checkpoint": str(pull_checkpoint(repo, into=into))}
    return {"runs": [str(path) for path in pull(repo, dir=runs_dir(dir))]}
