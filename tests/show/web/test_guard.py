"""The rules of the web, one test each: token, Host, Origin, methods, headers, sizes, static files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sonde.show.web.access import Access, kept_token
from sonde.show.web.assets import load_assets
from sonde.show.web.guard import HEADERS, MAX_BODY_BYTES
from sonde.show.web.query import MAX_QUERY_BYTES

ORIGIN = "http://127.0.0.1:7007"
API = ("/api/runs", "/api/events", "/api/compare", "/api/runs/0123456789abcdef/heat", "/api/nonsense")


@pytest.fixture
def stranger(open_page: Callable[..., Any], tmp_path: Path) -> Any:
    """A browser that did not log in."""
    client = open_page(tmp_path).client
    client.cookies.clear()
    return client


@pytest.mark.parametrize("path", API)
def test_without_the_token_nothing_is_answered(stranger: Any, path: str) -> None:
    response = stranger.get(path)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "unauthorized"


def test_the_token_has_256_bits_and_a_near_one_is_refused(stranger: Any, open_page: Any, tmp_path: Path) -> None:
    page = open_page(tmp_path)
    assert len(page.access.token) == 43  # 32 bytes in base64
    page.client.cookies.clear()
    for wrong in ("", page.access.token[:-1], page.access.token.swapcase(), None, 7, ["x"], "é" * 43):
        response = page.client.post("/api/login", json={"token": wrong}, headers={"Origin": ORIGIN})
        assert response.status_code == 401
        assert "set-cookie" not in response.headers
    assert Access().token != Access().token


def test_comparison_is_constant_time() -> None:
    import hmac
    import inspect

    from sonde.show.web import access

    assert "compare_digest" in inspect.getsource(access._same)
    assert hmac is access.hmac


def test_cookie_is_for_this_site_and_not_for_scripts(open_page: Any, tmp_path: Path) -> None:
    page = open_page(tmp_path)
    given = page.client.post("/api/login", json={"token": page.access.token}, headers={"Origin": ORIGIN})
    cookie = given.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert page.access.token not in cookie
    assert page.access.token not in repr(page.access)


def test_cookie_survives_a_restart_and_differs_between_ports() -> None:
    first = Access("t" * 43, port=1)
    cookie = first.set_cookie().partition(";")[0]
    assert Access("t" * 43, port=1).is_allowed(cookie)
    assert not Access("t" * 43, port=2).is_allowed(cookie)
    assert not Access("u" * 43, port=1).is_allowed(cookie)


def test_odd_cookies_of_other_applications_do_no_harm() -> None:
    access = Access("t" * 43, port=1)
    own = access.set_cookie().partition(";")[0]
    odd = '{"a": [1]}=x; =; ;; a b=c; name="un\\"closed; \x00=\xff; ' + "y" * 20_000 + "=1"
    assert access.is_allowed(f"{odd}; {own}; {odd}")
    assert not access.is_allowed(odd)
    assert not access.is_allowed(own.replace("=", "=x"))


def test_token_file_is_private_and_a_public_one_is_not_trusted(tmp_path: Path) -> None:
    file = tmp_path / "state" / "ui-token"
    token = kept_token(file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert kept_token(file) == token
    file.chmod(0o644)
    assert kept_token(file) != token
    assert file.stat().st_mode & 0o777 == 0o600


def test_token_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    target, file = tmp_path / "target", tmp_path / "ui-token"
    target.write_text("x" * 43)
    target.chmod(0o600)
    file.symlink_to(target)
    assert kept_token(file) != "x" * 43
    assert target.read_text() == "x" * 43


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:7007", "127.0.0.1.evil.example", "127.0.0.1@evil.example", "", "localhost\x00"],
)
def test_other_names_for_this_address_are_refused(page: Any, host: str) -> None:
    response = page.client.get("/api/runs", headers={"Host": host})
    assert response.status_code == 421
    assert page.client.get("/", headers={"Host": host}).status_code == 421


@pytest.mark.parametrize("host", ["127.0.0.1:7007", "localhost:7007", "localhost:9999", "LOCALHOST"])
def test_own_names_are_answered_also_through_a_tunnel(page: Any, host: str) -> None:
    assert page.client.get("/", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "http://127.0.0.1:9999", "null", "file://", "127.0.0.1:7007"]
)
def test_other_origins_can_neither_change_nor_listen(page: Any, api: str, origin: str) -> None:
    assert page.client.delete(api, headers={"Origin": origin}).status_code == 403
    assert page.client.post(f"{api}/restore", headers={"Origin": origin}).status_code == 403
    assert page.client.post("/api/login", json={}, headers={"Origin": origin}).status_code == 403
    assert page.client.get("/api/events", headers={"Origin": origin}).status_code == 403
    assert page.client.get("/api/runs", headers={"Origin": origin}).status_code == 403


def test_a_change_must_say_where_it_comes_from(page: Any, api: str) -> None:
    assert page.client.delete(api).status_code == 403
    assert page.get(api)["status"] == "finished"


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_requests_that_another_site_makes_are_refused(page: Any, site: str) -> None:
    assert page.client.get("/api/runs", headers={"Sec-Fetch-Site": site}).status_code == 403


@pytest.mark.parametrize("method", ["PUT", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "get"])
def test_other_methods_are_refused(page: Any, method: str) -> None:
    response = page.client.request(method, "/api/runs", headers={"Origin": ORIGIN})
    assert response.status_code == (200 if method == "get" else 405)  # the client writes GET in capitals


def test_no_response_lets_another_origin_in(page: Any, api: str) -> None:
    for path in ("/", "/api/runs", api, "/api/nonsense", "/static/nonsense.js"):
        response = page.client.get(path, headers={"Origin": ORIGIN})
        assert not [name for name in response.headers if name.startswith("access-control")]
        for name, value in HEADERS:
            assert response.headers[name.decode()] == value.decode()


def test_policy_allows_nothing_inline_and_no_frames(page: Any) -> None:
    policy = page.client.get("/").headers["content-security-policy"]
    assert policy.startswith("default-src 'self'")
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert "*" not in policy


def test_refusals_carry_the_headers_too(stranger: Any) -> None:
    response = stranger.get("/api/runs", headers={"Host": "evil.example"})
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-store"


def test_large_bodies_and_queries_are_refused(page: Any, api: str) -> None:
    body = b"x" * (MAX_BODY_BYTES + 1)
    assert page.client.post("/api/login", content=body, headers={"Origin": ORIGIN}).status_code == 413
    assert page.client.get(f"{api}/lines?i={'1,' * MAX_QUERY_BYTES}").status_code == 414


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/..%2fserver.py",
        "/static/%2e%2e/server.py",
        "/static//etc/passwd",
        "/etc/passwd.txt",
        "/static/app.js%00",
        "/static/static/app.js",
    ],
)
def test_only_files_of_the_list_are_served(page: Any, path: str) -> None:
    response = page.client.get(path)
    assert response.status_code == 404
    assert "Dashboard" not in response.text


def test_links_in_the_folder_of_files_are_not_served(tmp_path: Path) -> None:
    folder = tmp_path / "static"
    folder.mkdir()
    (tmp_path / "secret.js").write_text("secret")
    (folder / "app.js").symlink_to(tmp_path / "secret.js")
    (folder / "notes.txt").write_text("not a file of a front-end")
    assert set(load_assets(folder)) == {"index.html"}


def test_assets_are_compressed_and_not_sent_twice(open_page: Any, tmp_path: Path) -> None:
    folder = tmp_path / "static"
    folder.mkdir()
    (folder / "app.js").write_text("console.log(1);" * 500)
    client = open_page(tmp_path, assets=load_assets(folder)).client
    first = client.get("/static/app.js")
    assert first.headers["content-encoding"] == "gzip"
    assert first.headers["content-type"].startswith("text/javascript")
    again = client.get("/static/app.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("path", ["/", "/run/0123456789abcdef/layers", "/compare"])
def test_addresses_of_views_are_the_application(open_page: Any, tmp_path: Path, path: str) -> None:
    response = open_page(tmp_path).client.get(path)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")


def test_websockets_are_refused(page: Any) -> None:
    from starlette.websockets import WebSocketDisconnect

    with pytest.raises(WebSocketDisconnect), page.client.websocket_connect("/api/events"):
        pass
