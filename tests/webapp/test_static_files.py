"""Static files under ASGI: piece by piece, with the same headers as under WSGI."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from django.test import AsyncClient, Client

from webapp.static_files import PIECE

CONTENT = bytes(range(256)) * (3 * PIECE // 256) + b"the end"


@pytest.fixture
def large(settings: Any, tmp_path: Path) -> str:
    settings.STATIC_ROOT = str(tmp_path / "static")
    (tmp_path / "static").mkdir()
    (tmp_path / "static" / "large.bin").write_bytes(CONTENT)
    return "/static/large.bin"


@pytest.mark.asyncio
async def test_a_file_comes_in_pieces_without_being_read_whole(large: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        response = await AsyncClient().get(large)
        assert response.status_code == 200
        assert response.is_async
        pieces = [piece async for piece in response.streaming_content]  # type: ignore[attr-defined]
    assert b"".join(pieces) == CONTENT
    assert max(map(len, pieces)) <= PIECE
    assert response.headers["Content-Length"] == str(len(CONTENT))


@pytest.mark.asyncio
async def test_a_part_and_a_look_at_the_headers_work_as_under_wsgi(large: str) -> None:
    part = await AsyncClient().get(large, headers={"Range": "bytes=10-19"})
    body = b"".join([piece async for piece in part.streaming_content])  # type: ignore[attr-defined]
    assert (part.status_code, body) == (206, CONTENT[10:20])
    look = await AsyncClient().head(large)
    assert look.headers["Content-Length"] == str(len(CONTENT))
    plain = Client().get(large)
    assert b"".join(plain.streaming_content) == CONTENT  # type: ignore[attr-defined]
    assert {name: value for name, value in plain.headers.items()} == {
        name: value for name, value in look.headers.items()
    }  # fmt: skip
