"""The files of the page at `/`, as a browser gets them."""

from __future__ import annotations

import re

from pdrt.gateway.page import FOLDER, page_routes
from tests.gateway.conftest import KEY, Deploy

LINKS = re.compile(
    r"""(?:src|href|from)\s*=?\s*["'](?:\./)?(?:web/)?([\w.]+\.(?:js|css|svg))["']"""
)


async def test_the_page_is_served_without_a_key_and_says_what_it_may_do(deploy: Deploy) -> None:
    async with deploy(api={"api_key": (KEY,)}) as deployment:
        for path in [route.path for route in page_routes()]:
            response = await deployment.http.get(path, headers={"authorization": ""})
            assert response.status_code == 200, path
            assert "script-src 'self'" in response.headers["content-security-policy"]
            again = {"authorization": "", "if-none-match": response.headers["etag"]}
            assert (await deployment.http.get(path, headers=again)).status_code == 304
        refused = await deployment.http.get("/status", headers={"authorization": ""})
        assert refused.status_code == 401


async def test_only_its_own_files_are_served(deploy: Deploy) -> None:
    async with deploy() as deployment:
        for path in ("/web/", "/web/page.py", "/web/..%2fpage.py", "/web/../page.py"):
            assert (await deployment.http.get(path)).status_code == 404


def test_every_file_that_a_file_names_is_there_and_every_file_is_named() -> None:
    files = {path.name for path in FOLDER.iterdir()}
    named = {name for path in FOLDER.iterdir() for name in LINKS.findall(path.read_text())}
    assert named == files - {"index.html"}
