"""What a client may say: whole numbers within limits, words from a list, ids of a fixed form."""

from __future__ import annotations

from typing import Any

import pytest

BAD = [
    "lines?i=../etc/passwd&stat=rms",
    "lines?i=0&stat=__import__('os')",
    "lines?i=0&stat=rms&points=1e9",
    "lines?i=0&stat=rms&points=99999999",
    "lines?i=0&stat=rms&from=-1",
    "lines?i=0&stat=rms&from=10&to=5",
    "lines?i=٣&stat=rms",
    "lines?i=0x10&stat=rms",
    "lines?i=&stat=rms",
    "lines?i=0,0,,1&stat=rms",
    "lines?i=99999&stat=rms",
    "lines?i=0&stat=rms&path=/etc/passwd",
    "lines?i=0&i=1&stat=rms",
    f"lines?i={','.join(map(str, range(65)))}&stat=rms",
    "scalars?i=-1",
    "heat?kind=grad&stat=rms&w=0",
    "heat?kind=grad&stat=rms&w=100000",
    "heat?kind=grad'--&stat=rms",
    "heat?kind=grad&stat=*",
    "heat?kind=grad&stat=rms&rows=1;2",
    "hist?i=0&w=1e3",
    "cell?i=0&step=9999999999999999999",
    "snapshots/1/2/3",
    "snapshots/-1",
    "sql?q=select",
    "sites?x=1",
]


@pytest.mark.parametrize("question", BAD)
def test_anything_else_is_refused(page: Any, api: str, question: str) -> None:
    response = page.client.get(f"{api}/{question}")
    assert response.status_code in (400, 404), response.text
    assert set(response.json()) == {"error"}


@pytest.mark.parametrize("id", ["..", "%2e%2e", "0123456789ABCDEF", "0" * 15, "0" * 17, "latest", "0123456789abcde%0a"])
def test_a_run_is_named_by_its_id_alone(page: Any, id: str) -> None:
    assert page.client.get(f"/api/runs/{id}/sites").status_code == 404


def test_compare_takes_two_to_eight_ids(page: Any, api: str) -> None:
    id = api.rpartition("/")[2]
    for ids in ("", id, ",".join([id] * 9), f"{id},../x"):
        assert page.client.get(f"/api/compare?ids={ids}").status_code == 400


def test_a_body_that_is_not_json_is_refused(page: Any, api: str) -> None:
    for body in (b"{", b"[" * 10_000, b"\xff\xfe"):
        response = page.client.post(
            f"{api}/findings/0/state", content=body, headers={"Origin": "http://127.0.0.1:7007"}
        )
        assert response.status_code == 400
