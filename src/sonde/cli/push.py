"""`sonde push RUN`: bring snapshots that still wait on this disk to the run's bucket or repository."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from sonde.cli.options import Dir, Json, RunName, open_run
from sonde.cli.output import print_json, remark


def push(
    run: RunName = "latest",
    patience_s: Annotated[
        float, typer.Option("--patience", metavar="SECONDS", help="Give up when nothing got through for so long.")
    ] = 60.0,
    dir: Dir = None,
    json: Json = False,
) -> None:
    """Upload the snapshots of a run that are not yet where they should be.

    A run whose store is a bucket keeps its snapshots on this disk first and uploads them while it trains. What was left
    over, because the network or the machine went away, goes up with this verb. It may be stopped and started again:
    what has arrived is not sent twice. Exits 0 when nothing waits, 1 when something does.

    \b
    Examples:
      sonde push latest
      sonde push gpt/baseline --patience 600
      sonde push latest --json
    """
    from sonde.show.progress import progress
    from sonde.write.tensors.push import push as upload

    found = open_run(run, dir)
    with progress("snapshots", quiet=json) as tell:
        pushed = upload(found.path, patience_s=patience_s, told=tell)
    if json:
        print_json(asdict(pushed))
    else:
        print(f"{pushed.uploaded} uploaded to {pushed.url}, {pushed.waiting} waiting")
        if pushed.waiting:
            remark(f"The last attempt: {pushed.last_error or 'no answer'}. Run it again: sonde push {run}")
    if pushed.waiting:
        raise typer.Exit(1)
