"""The files of a checkpoint, and sending them: in ranges, or all together as a stored zip, in constant memory.

Names come from the folder's own listing and never from a request: what a request names is looked up in it.
"""

from __future__ import annotations

import asyncio
import hashlib
import mimetypes
import os
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, Protocol

from django.core.cache import cache
from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse
from django.utils import timezone
from django.utils.cache import get_conditional_response
from django.utils.http import content_disposition_header, http_date, parse_http_date_safe
from zipstream import ZIP_STORED, ZipStream

from webapp.checkpoints.models import Checkpoint
from webapp.runs.models import Run

Part = Literal["model", "resume"]
CHUNK = 512 * 1024
"""Bytes read at a time, and so about what one download holds in memory."""

DIGEST_KEPT_S = 24 * 3600

_RESUME = re.compile(
    r"(^|/)(optimizer|scheduler|scaler|rng_state|random_states|trainer_state|training_args|rollout_state|__\d+_\d+)[^/]*$"
    r"|\.distcp$|(^|/)(optimizer|pytorch_model_fsdp|resume)[^/]*/"
)
_RANGE = re.compile(r"bytes=(\d*)-(\d*)$", re.ASCII)


@dataclass(frozen=True)
class File:
    """A file of a checkpoint. `name` is relative, with forward slashes; `part` says whether it is only for resuming."""

    name: str
    path: Path
    size: int
    part: Part


class Stored(Protocol):
    """A checkpoint, or merged weights."""

    @property
    def folder(self) -> Path: ...


def listing(checkpoint: Stored) -> list[File]:
    """Files of its folder, by name; empty when the folder is gone. Links that lead out of it are left out."""
    folder = checkpoint.folder
    if not folder.is_dir():
        return []
    root = folder.resolve()
    files = []
    for path in sorted(folder.rglob("*")):
        real = path.resolve()
        if real.is_file() and real.is_relative_to(root):
            name = path.relative_to(folder).as_posix()
            files.append(File(name, real, real.stat().st_size, "resume" if _RESUME.search(name) else "model"))
    return files


def find(checkpoint: Stored, name: str) -> File | None:
    """The file of this name, or None."""
    return next((file for file in listing(checkpoint) if file.name == name), None)


def sha256(file: File) -> str:
    """Hex digest of the file's content; reads all of it, once for as long as it does not change."""
    with open(file.path, "rb") as content:
        stat = os.fstat(content.fileno())
        key = f"sha256:{stat.st_dev:x}-{stat.st_ino:x}-{stat.st_mtime_ns:x}-{stat.st_size:x}"
        if (known := cache.get(key)) is None:
            known = hashlib.file_digest(content, "sha256").hexdigest()
            cache.set(key, known, DIGEST_KEPT_S)
    return known


def mark_deleted(run: Run) -> int:
    """Note which checkpoints' folders are gone (the trainer keeps at most `save_total_limit`). Returns how many.

    Does nothing where the run's folder can't be seen: on another host all of them would look deleted.
    """
    if not run.folder.is_dir():
        return 0
    gone = [item.pk for item in run.checkpoints.filter(deleted_at=None) if not item.folder.is_dir()]
    return Checkpoint.objects.filter(pk__in=gone, deleted_at=None).update(deleted_at=timezone.now())


def send_file(request: HttpRequest, file: File) -> HttpResponseBase:
    """The file as an attachment: GET or HEAD, whole or one range (RFC 9110, section 14), with ETag and If-Range."""
    try:
        content = open(file.path, "rb")  # noqa: SIM115  closed by _pieces, or below
    except FileNotFoundError:
        return _plain(404, "The file has just been deleted.")
    stat = os.fstat(content.fileno())
    etag = f'"{stat.st_ino:x}-{stat.st_mtime_ns:x}-{stat.st_size:x}"'
    base = {
        "ETag": etag, "Last-Modified": http_date(stat.st_mtime), "Accept-Ranges": "bytes",
        "Content-Disposition": content_disposition_header(True, file.name.replace("/", "_")) or "attachment",
        "X-Content-Type-Options": "nosniff", "Cache-Control": "private, no-cache", "Content-Encoding": "identity",
    }  # fmt: skip
    if (early := get_conditional_response(request, etag, int(stat.st_mtime))) is not None:
        content.close()
        early.headers["ETag"] = etag
        return early
    start, end, status = 0, stat.st_size, 200
    wanted = request.headers.get("Range") if _range_applies(request, etag, stat.st_mtime) else None
    if wanted is not None and (found := _parse_range(wanted, stat.st_size)) is not None:
        start, end = found
        status = 206
        if start >= end:
            content.close()
            return _plain(
                416, f"The file has {stat.st_size} bytes.", {**base, "Content-Range": f"bytes */{stat.st_size}"}
            )
        base["Content-Range"] = f"bytes {start}-{end - 1}/{stat.st_size}"
    if request.method == "HEAD":
        content.close()
        response: HttpResponseBase = HttpResponse(status=status, headers=base)
    else:
        response = StreamingHttpResponse(_pieces(content, start, end), status=status, headers=base)
    response.headers["Content-Type"] = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    response.headers["Content-Length"] = str(end - start)
    return response


def send_zip(
    request: HttpRequest, files: Iterable[File], name: str, texts: Mapping[str, str] | None = None
) -> HttpResponseBase:
    """Files as a stored (not deflated) zip with a length known beforehand; weights do not compress.

    `texts` come with them, by name, and stand for files that have the same one.
    """
    texts = texts or {}
    archive = ZipStream(compress_type=ZIP_STORED, sized=True)
    for file in files:
        if file.name not in texts:
            archive.add_path(file.path, f"{name}/{file.name}")
    for text_name, text in texts.items():
        archive.add(text.encode(), f"{name}/{text_name}")
    headers = {
        "Content-Length": str(len(archive)), "X-Content-Type-Options": "nosniff", "Content-Encoding": "identity",
        "Content-Disposition": content_disposition_header(True, f"{name}.zip") or "attachment",
        "Cache-Control": "private, no-cache",
    }  # fmt: skip
    if request.method == "HEAD":
        return HttpResponse(content_type="application/zip", headers=headers)
    return StreamingHttpResponse(_zip_pieces(archive), content_type="application/zip", headers=headers)


def _plain(status: int, text: str, headers: dict[str, str] | None = None) -> HttpResponse:
    response = HttpResponse(text, status=status, content_type="text/plain; charset=utf-8")
    for key, value in (headers or {}).items():
        if key != "Content-Disposition":
            response.headers[key] = value
    return response


def _range_applies(request: HttpRequest, etag: str, modified: float) -> bool:
    """If-Range: the range counts only while the file is the one that the first part came from."""
    condition = request.headers.get("If-Range")
    if condition is None:
        return True
    if condition.startswith(('"', "W/")):
        return condition == etag
    date = parse_http_date_safe(condition)
    return date is not None and date == int(modified)


def _parse_range(header: str, size: int) -> tuple[int, int] | None:
    """(start, end) of a single range, empty when it can't be satisfied; None for what is to be ignored."""
    match = _RANGE.match(header.strip())
    if match is None:
        return None  # several ranges, or another unit: the whole file is a correct answer
    first, last = match.groups()
    if first:
        if last and int(last) < int(first):
            return None
        return int(first), min(int(last) + 1, size) if last else size
    if not last:
        return None
    return max(size - int(last), 0), size


async def _pieces(content: BinaryIO, start: int, end: int) -> AsyncIterator[bytes]:
    with content:
        await asyncio.to_thread(content.seek, start)
        left = end - start
        while left > 0:
            piece = await asyncio.to_thread(content.read, min(CHUNK, left))
            if not piece:
                raise OSError(f"{content.name} became shorter while it was sent")
            left -= len(piece)
            yield piece


async def _zip_pieces(archive: ZipStream) -> AsyncIterator[bytes]:
    """zipstream reads in small pieces; several of them go out together."""
    pieces = iter(archive)
    while batch := await asyncio.to_thread(_next_batch, pieces):
        yield batch


def _next_batch(pieces: Iterable[bytes]) -> bytes:
    batch = bytearray()
    for piece in pieces:
        batch += piece
        if len(batch) >= CHUNK:
            break
    return bytes(batch)
