"""Static files by WhiteNoise, piece by piece also under ASGI, where Django would read a file into memory before it sends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import IO, Any

from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, HttpResponseBase, StreamingHttpResponse
from whitenoise.middleware import WhiteNoiseMiddleware

PIECE = 256 * 1024


class StreamedStaticFiles(WhiteNoiseMiddleware):
    """As WhiteNoise's own, with an answer that an event loop can send."""

    @staticmethod
    def serve(static_file: Any, request: HttpRequest) -> HttpResponseBase:
        if not isinstance(request, ASGIRequest):
            return WhiteNoiseMiddleware.serve(static_file, request)
        found = static_file.get_response(request.method, request.META)
        response = StreamingHttpResponse(_pieces(found.file), status=int(found.status))
        del response.headers["Content-Type"]
        for name, value in found.headers:
            response.headers[name] = value
        return response


async def _pieces(file: IO[bytes] | None) -> AsyncIterator[bytes]:
    """The content of an open file, which is closed at the end; nothing for None."""
    if file is None:
        return
    try:
        while piece := await asyncio.to_thread(file.read, PIECE):
            yield piece
    finally:
        file.close()
