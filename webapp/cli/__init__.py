"""The `offbeat` command: launch, follow, steer and download runs from a terminal, through the JSON API.

Light on purpose: it imports neither Django nor anything that trains. Exit codes: 0 done; 1 refused, or the run failed; 2 wrong
usage; 3 the server can't be reached or does not know the token; 130 interrupted (the run goes on).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

from webapp.cli import commands, importing
from webapp.cli.client import Failure


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code."""
    options = _parser().parse_args(_with_sort(sys.argv[1:] if arguments is None else arguments))
    try:
        return options.command(options)
    except Failure as failure:
        print(f"offbeat: {failure}", file=sys.stderr)
        return failure.code
    except KeyboardInterrupt:
        print("offbeat: interrupted; runs on the server go on.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _with_sort(arguments: list[str]) -> list[str]:
    """`--sort -reward` as `--sort=-reward`: argparse takes a word that begins with a minus for an option."""
    joined: list[str] = []
    for word in arguments:
        if joined and joined[-1] == "--sort":
            joined[-1] = f"--sort={word}"
        else:
            joined.append(word)
    return joined


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="offbeat", description="Launch, watch and download runs of an Offbeat studio."
    )
    top = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(to: Any, name: str, command: Callable[[argparse.Namespace], int], help_: str) -> argparse.ArgumentParser:
        made = to.add_parser(name, help=help_, description=help_)
        made.set_defaults(command=command)
        return made

    into = add(top, "login", commands.login, "remember a studio's address and an API token")
    into.add_argument("--url", help="such as http://127.0.0.1:8000")
    into.add_argument("--token", help="made on the account page; asked for when left out")
    start = add(top, "launch", commands.launch, "make a run from a YAML or JSON spec, and queue it")
    start.add_argument("spec", help="a file, or - for standard input")
    start.add_argument("--follow", action="store_true", help="show its progress until it ends")
    start.add_argument("--draft", action="store_true", help="only make it")

    bring = add(top, "import", importing.import_, "bring finished runs of wandb, TensorBoard, trackio or a Trainer")
    bring.add_argument(
        "path", help="trainer_state.json, run-*.wandb, event files, a trackio database, or a folder with them"
    )
    bring.add_argument("--name", help="another name for the run, if there is one")
    bring.add_argument("--tag", action="append", default=[], help="may be repeated")

    runs = top.add_parser("runs", help="list, watch and steer runs").add_subparsers(required=True, metavar="COMMAND")
    listing = add(runs, "list", commands.runs_list, "list runs")
    listing.add_argument("--state", action="append", help="live, or a state; may be repeated")
    listing.add_argument("--search", help="words in name, tags, model or notes")
    listing.add_argument("--tag")
    listing.add_argument("--archived", action="store_true")
    listing.add_argument("--sort", default="-created", help="such as -reward, name, step")
    listing.add_argument("--limit", type=int, default=50)
    listing.add_argument("--json", action="store_true")

    def of_run(name: str, command: Callable[[argparse.Namespace], int], help_: str) -> argparse.ArgumentParser:
        made = add(runs, name, command, help_)
        made.add_argument("run", help="id, the beginning of one, or a name")
        return made

    of_run("show", commands.runs_show, "show one run").add_argument("--json", action="store_true")
    of_run("follow", commands.runs_follow, "show steps and reward until it ends")
    stop = of_run("stop", commands.runs_stop, "stop a run")
    stop.add_argument("--save", action="store_true", help="save a checkpoint first")
    stop.add_argument("--wait", action="store_true", help="until it has stopped")
    resume = of_run("resume", commands.runs_resume, "go on with a run that ended")
    resume.add_argument("--checkpoint", type=int, help="id of a checkpoint; the newest when left out")
    resume.add_argument("--follow", action="store_true")
    fork = of_run("fork", commands.runs_fork, "make a new run that begins with the weights of a checkpoint")
    fork.add_argument("--checkpoint", type=int, help="id of a checkpoint; the newest when left out")
    fork.add_argument("--spec", help="a YAML or JSON file with changed settings; the same settings when left out")
    fork.add_argument("--launch", action="store_true", help="queue it at once; otherwise it is a draft")
    fork.add_argument("--follow", action="store_true", help="queue it, and show its progress until it ends")
    logs = of_run("logs", commands.runs_logs, "print a log of the newest attempt, the trainer's unless told otherwise")
    logs.add_argument("--file", help="such as server-0.log")
    logs.add_argument("--attempt", type=int)
    logs.add_argument("--all", action="store_true", help="from its beginning, not only its end")
    logs.add_argument("--follow", action="store_true")
    metrics = of_run("metrics", commands.runs_metrics, "list metrics, or export every point of some")
    metrics.add_argument("--metric", action="append", default=[], help="may be repeated")
    metrics.add_argument("--output", help="a .csv, .jsonl or .parquet file; without --metric it gets all metrics")
    metrics.add_argument("--json", action="store_true")
    get = of_run("download", commands.runs_download, "download the newest checkpoint or adapter")
    which = get.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="another one")
    which.add_argument("--best", action="store_true", help="the one with the best evaluation")
    get.add_argument("--output", help="folder to make")
    get.add_argument("--all", action="store_true", help="optimizer state and other files for resuming too")
    return parser
