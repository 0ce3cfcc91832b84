"""The URL of a snapshot repository: a folder, or an S3, Google or Azure bucket. Opens nothing, reads no secret.

Credentials, endpoints and regions come from the environment, by the names that each cloud's own tools use; none of them
is ever part of a URL, so none is written to a run.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from sonde.errors import UnknownNameError, UsageError
from sonde.schema.packages import require

Scheme = Literal["file", "s3", "gs", "az"]
SCHEMES: Final[tuple[Scheme, ...]] = ("file", "s3", "gs", "az")
ICECHUNK_FOLDER: Final = "icechunk"
"""The folder in a run that holds a local repository and its lock."""
STREAM_TIMEOUT_S: Final = 20


@dataclass(frozen=True, slots=True)
class Address:
    """One repository.

    >>> Address.parse("s3://bucket/runs")
    Address(scheme='s3', bucket='bucket', prefix='runs')
    """

    scheme: Scheme
    bucket: str
    """The container, for Azure; the folder, for a local one."""
    prefix: str = ""

    @classmethod
    def parse(cls, url: str) -> Address:
        scheme, _, rest = url.partition("://")
        known = {name: name for name in SCHEMES} | {"gcs": "gs", "azure": "az"}
        if scheme not in known:
            raise UnknownNameError("store type", f"{scheme}://", [f"{name}://…" for name in SCHEMES])
        if "@" in rest.partition("/")[0] or "?" in rest:
            raise UsageError("a store URL must not contain credentials or options; set them in the environment.")
        if scheme == "file":
            return cls("file", rest)
        bucket, _, prefix = rest.partition("/")
        if not bucket:
            raise UsageError(f'"{url}" has no bucket. Use {scheme}://bucket/prefix.')
        return cls(known[scheme], bucket, prefix.strip("/"))  # type: ignore[arg-type]

    def for_run(self, run: Path) -> Address:
        """A separate repository for each run: two runs may have snapshots of the same step."""
        return replace(self, prefix="/".join(part for part in (self.prefix, run.parent.name, run.name) if part))

    @property
    def is_local(self) -> bool:
        return self.scheme == "file"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")


def local_address(run: Path) -> Address:
    """The address of a repository in the run folder."""
    return Address("file", str((run / ICECHUNK_FOLDER / "repository").absolute()))


def written_address(address: Address, run: Path) -> str:
    """The address as stored in the run: a repository in the run folder moves with it.

    >>> written_address(local_address(Path("runs/gpt")), Path("runs/gpt"))
    'icechunk'
    """
    return ICECHUNK_FOLDER if address == local_address(run) else str(address)


def read_address(text: str, run: Path) -> Address:
    return local_address(run) if text == ICECHUNK_FOLDER else Address.parse(text)


def icechunk_storage(address: Address) -> Any:
    """The icechunk storage of a repository. Never call this in a process that trains, or that was forked."""
    icechunk = require("icechunk", "tensors", f"The store at {address}")
    if address.scheme == "file":
        icechunk.set_logs_filter("error")  # it warns that two writers must not commit at once; the lock prevents that
        return icechunk.local_filesystem_storage(address.bucket)
    if address.scheme == "s3":
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        return icechunk.s3_storage(
            bucket=address.bucket,
            prefix=address.prefix,
            region=os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"),
            endpoint_url=endpoint,
            allow_http=bool(endpoint and endpoint.startswith("http://")),
            force_path_style=bool(endpoint),
            from_env=True,
            network_stream_timeout_seconds=STREAM_TIMEOUT_S,
        )
    if address.scheme == "gs":
        return icechunk.gcs_storage(bucket=address.bucket, prefix=address.prefix, from_env=True)
    return icechunk.azure_storage(
        account=_azure_account(), container=address.bucket, prefix=address.prefix, from_env=True, config=_azure_config()
    )


def check_environment(address: Address) -> None:
    """Raise now, not at the first upload, if something is missing that every upload needs."""
    if address.scheme == "az":
        _azure_account()


def _azure_account() -> str:
    account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME") or os.environ.get("AZURE_STORAGE_ACCOUNT")
    if not account:
        raise UsageError("a store at az:// needs AZURE_STORAGE_ACCOUNT_NAME and a key or token in the environment.")
    return account


def _azure_config() -> dict[str, str] | None:
    endpoint = os.environ.get("AZURE_STORAGE_ENDPOINT", "")
    if not endpoint:
        return None
    is_plain = endpoint.startswith("http://")
    return {"azure_storage_endpoint": endpoint, **({"azure_allow_http": "true"} if is_plain else {})}
