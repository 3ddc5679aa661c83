"""What each command does. Each takes the parsed options and returns the exit code."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from datetime import UTC, datetime
from functools import partial
from getpass import getpass
from pathlib import Path, PurePosixPath
from typing import Any

import httpx

from webapp.cli.client import Api, Failure, config_path, find_run
from webapp.cli.transfer import FOLLOW_S, body, download, follow_run, patiently


def login(options: argparse.Namespace) -> int:
    url = options.url or input("Address of the studio [http://127.0.0.1:8000]: ").strip() or "http://127.0.0.1:8000"
    token = options.token or getpass("API token (made on the account page): ").strip()
    api = Api(url, token)
    user = api.call("GET", "/me")["username"]
    path = config_path()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.fchmod(descriptor, 0o600)  # also when the file was there before
    with os.fdopen(descriptor, "w") as file:
        json.dump({"url": api.url, "token": token}, file)
    print(f"Logged in to {api.url} as {user}; kept in {path}.")
    return 0


def launch(options: argparse.Namespace) -> int:
    api = Api.configured()
    text = _read(options.spec)
    run = api.call("POST", "/runs", json={"yaml": text, "launch": not options.draft})
    print(f"{run['name']}  {run['id']}  {run['state']}\n{run['url']}")
    return follow_run(api, run["id"]) if options.follow else 0


def runs_list(options: argparse.Namespace) -> int:
    query: dict[str, Any] = {"sort": options.sort, "per_page": options.limit, "archived": str(options.archived).lower()}
    query |= {key: value for key in ("state", "search", "tag") if (value := getattr(options, key))}
    page = Api.configured().call("GET", "/runs", params=query)
    if options.json:
        return _print_json(page["items"])
    rows = [("id", "name", "state", "step", "reward", "tok/s", "staleness", "age")]
    for run in page["items"]:
        summary = run["summary"]
        steps = f"{summary['step']}/{summary.get('max_steps') or '?'}" if "step" in summary else "-"
        rows.append((
            run["id"][:8], run["name"][:40], run["state"], steps, _number(summary.get("reward"), ".3f"),
            _number(summary.get("tok_s"), ".0f"), _number(summary.get("staleness"), ".1f"), _age(run["created_at"]),
        ))  # fmt: skip
    _print_table(rows)
    if page["total"] > len(page["items"]):
        print(f"{len(page['items'])} of {page['total']} runs; --limit shows more.")
    return 0


def runs_show(options: argparse.Namespace) -> int:
    api = Api.configured()
    run = find_run(api, options.run)
    if options.json:
        return _print_json(run)
    summary = run["summary"]
    print(f"{run['name']}  {run['id']}\n{run['url']}")
    print(f"state      {run['state']}: {run['reason']}" if run["reason"] else f"state      {run['state']}")
    print(f"diagnosis  {run['diagnosis']['sentence']}")
    if run["diagnosis"]["knob"]:
        print(f"           turn {run['diagnosis']['knob']}")
    if "step" in summary:
        print(
            f"step       {summary['step']} of {summary.get('max_steps')}, reward {_number(summary.get('reward'), '.4f')}"
        )
    for attempt in run["attempts"]:
        print(f"attempt {attempt['number']}  {attempt['state']} on {' and '.join(attempt['hosts']) or 'no host yet'}")
    for checkpoint in api.call("GET", f"/runs/{run['id']}/checkpoints"):
        size = _size(checkpoint["size_bytes"])
        print(f"checkpoint {checkpoint['id']}  step {checkpoint['step']}, {checkpoint['kind']}, {size}, "
              f"reward {_number(checkpoint['reward'], '.4f')}{_evaluated(checkpoint)}")  # fmt: skip
    return 0


def runs_stop(options: argparse.Namespace) -> int:
    api = Api.configured()
    run = find_run(api, options.run)
    api.call("POST", f"/runs/{run['id']}/stop", json={"save": options.save})
    print("Asked to save a checkpoint and stop." if options.save else "Asked to stop.")
    return follow_run(api, run["id"], wanted="stopped") if options.wait else 0


def runs_resume(options: argparse.Namespace) -> int:
    api = Api.configured()
    run = find_run(api, options.run)
    body = {} if options.checkpoint is None else {"checkpoint": options.checkpoint}
    print(api.call("POST", f"/runs/{run['id']}/resume", json=body)["reason"])
    return follow_run(api, run["id"]) if options.follow else 0


def runs_fork(options: argparse.Namespace) -> int:
    api = Api.configured()
    parent = find_run(api, options.run)
    body: dict[str, Any] = {"checkpoint": options.checkpoint, "launch": options.launch or options.follow}
    if options.spec:
        body["yaml"] = _read(options.spec)
    run = api.call("POST", f"/runs/{parent['id']}/fork", json=body)
    print(f"{run['name']}  {run['id']}  {run['state']}, from step {run['forked_step']}\n{run['url']}")
    return follow_run(api, run["id"]) if options.follow else 0


def runs_follow(options: argparse.Namespace) -> int:
    api = Api.configured()
    return follow_run(api, find_run(api, options.run)["id"])


def runs_logs(options: argparse.Namespace) -> int:
    api = Api.configured()
    run = find_run(api, options.run)
    logs = api.call("GET", f"/runs/{run['id']}/logs")
    if not logs:
        raise Failure("The run has no logs yet.")
    wanted = [log for log in logs if options.attempt in (None, log["attempt"])]
    names = sorted({log["name"] for log in wanted})
    chosen = (
        next((log for log in wanted if log["name"] == options.file), None) if options.file else next(iter(wanted), None)
    )
    if chosen is None:
        raise Failure(f"There is no such log; there are {', '.join(names) or 'none of this attempt'}.")
    path = f"/runs/{run['id']}/logs/{chosen['attempt']}/{chosen['name']}"
    piece = api.call("GET", path, params={} if not options.all else {"after": 0})
    while True:
        sys.stdout.write(piece["text"])
        sys.stdout.flush()
        ended = piece["end"] == piece["size"] or not piece["text"]
        if ended and not options.follow:
            sys.stdout.write(piece["partial"])
            return 0
        if ended:
            time.sleep(FOLLOW_S)
        piece = patiently(partial(api.call, "GET", path, params={"after": piece["end"]}))


def runs_metrics(options: argparse.Namespace) -> int:
    api = Api.configured()
    run = find_run(api, options.run)
    if not options.metric and options.output is None:
        metrics = api.call("GET", f"/runs/{run['id']}/metrics")
        if options.json:
            return _print_json(metrics)
        rows = [("stage", "metric", "last", "unit", "step", "points")]
        for metric in metrics:
            last = metric["last_kind"] if metric["last_value"] is None else f"{metric['last_value']:.4g}"
            rows.append((metric["stage"], metric["name"], last, metric["unit"], metric["last_step"], metric["points"]))
        _print_table(rows)
        return 0
    format_ = Path(options.output).suffix.lstrip(".") if options.output else "csv"
    if format_ not in ("csv", "jsonl", "parquet"):
        raise Failure(f"The file ends in {format_!r}; csv, jsonl and parquet can be written.", 2)
    query = [("format", format_), *(("metric", metric) for metric in options.metric)]
    url = f"{api.url}/api/runs/{run['id']}/metrics/export?{httpx.QueryParams(query)}"
    if options.output is None:
        for chunk in body(api, url):
            sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
        return 0
    target = Path(options.output)
    with open(target, "wb") as file:
        for chunk in body(api, url):
            file.write(chunk)
    print(f"Wrote {_size(target.stat().st_size)} to {target}.")
    return 0


def runs_download(options: argparse.Namespace) -> int:
    api = Api.configured()
    run = find_run(api, options.run)
    checkpoints = api.call("GET", f"/runs/{run['id']}/checkpoints")
    if options.step is not None:
        steps = ", ".join(str(item["step"]) for item in checkpoints) or "none"
        checkpoints = [item for item in checkpoints if item["step"] == options.step]
        if not checkpoints:
            raise Failure(f"There is no checkpoint of step {options.step}; there are {steps}.")
    if options.best:
        checkpoints = [item for item in checkpoints if item["best"]]
        if not checkpoints:
            raise Failure("No checkpoint is marked as the best; checkpoints.keep_best_by says by what one would be.")
    if not checkpoints:
        raise Failure("The run has no checkpoint yet.")
    checkpoint = checkpoints[0]
    files = [file for file in checkpoint["files"] if options.all or file["part"] == "model"]
    if not files:
        raise Failure(f"The files of step {checkpoint['step']} are gone.")
    folder = Path(options.output or f"{run['id'][:8]}-step-{checkpoint['step']}")
    for file in files:
        name = PurePosixPath(file["name"])
        if name.is_absolute() or ".." in name.parts:
            raise Failure(f"The server names a file {file['name']!r}, which would lie outside {folder}.")
        download(api, file["url"], folder.joinpath(*name.parts), file["size"])
    print(f"Downloaded step {checkpoint['step']} ({checkpoint['kind']}, {len(files)} files) to {folder}.")
    return 0


def _read(name: str) -> str:
    """A file's text, or standard input for "-". Raises Failure."""
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(f"{name} can't be read: {error}.", 2) from error


def _evaluated(checkpoint: dict[str, Any]) -> str:
    """What was measured at a checkpoint's step, and whether it is the best, as the end of a line."""
    found = [f"{name} {value:.4f}" for name, value in checkpoint["evaluation"].items()]
    return "".join(f", {text}" for text in [*found, *(["best"] if checkpoint["best"] else [])])


def _print_json(value: Any) -> int:
    print(json.dumps(value, indent=2, ensure_ascii=False))
    return 0


def _print_table(rows: list[tuple[Any, ...]]) -> None:
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in texts) for column in range(len(texts[0]))]
    for row in texts:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _number(value: float | None, format_: str) -> str:
    return "-" if value is None else format(value, format_)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _age(created_at: str) -> str:
    seconds = (datetime.now(UTC) - datetime.fromisoformat(created_at)).total_seconds()
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
