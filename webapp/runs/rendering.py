"""Prompts as a model will read them: its own chat template, and how many tokens that is. Runs as a program of its own.

A template is code that came with a model, and tokenizers take memory, so both stay out of the web process: `render` starts
`python -m webapp.runs.rendering`, which has jinja2's sandbox and the tokenizers library, but neither torch nor transformers.
The environment of the template is transformers' (apply_chat_template); a test compares the two.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

SECONDS = 15.0
"""A template that takes longer is given up."""
Message = dict[str, Any]


class NotRendered(Exception):
    """One sentence that says why a prompt can't be shown as the model reads it."""


def render(folder: Path, conversations: Sequence[list[Message]]) -> list[dict[str, Any]]:
    """`text` and `tokens` of each conversation. Raises NotRendered."""
    from django.core.cache import cache

    request = json.dumps({"folder": str(folder), "conversations": list(conversations)})
    key = f"rendered:{hashlib.sha256(request.encode()).hexdigest()}"
    if (known := cache.get(key)) is not None:
        return known
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=request,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise NotRendered(f"The chat template of {folder.name} took more than {SECONDS:.0f} s.") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise NotRendered(lines[-1] if lines else f"The chat template of {folder.name} ended with {done.returncode}.")
    rendered = json.loads(done.stdout)
    cache.set(key, rendered, 3600)
    return rendered


def main() -> int:
    """The program: a request on standard input, the answer on standard output, or a sentence and exit code 1."""
    request = json.load(sys.stdin)
    folder = Path(request["folder"])
    try:
        json.dump(_rendered(folder, request["conversations"]), sys.stdout)
    except NotRendered as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _rendered(folder: Path, conversations: list[list[Message]]) -> list[dict[str, Any]]:
    from jinja2 import TemplateError
    from tokenizers import Tokenizer

    settings = _json(folder / "tokenizer_config.json")
    template = _template(folder, settings)
    if template is None:
        raise NotRendered(
            f"{folder.name} has no chat template, so it can't be trained on conversations; choose a chat model."
        )
    try:
        make = _environment().from_string(template).render
        special = {name: _text(value) for name, value in settings.items() if name.endswith("_token") and value}
        texts = [make(messages=one, add_generation_prompt=True, **special) for one in conversations]
    except TemplateError as error:
        raise NotRendered(f"The chat template of {folder.name} refuses these prompts: {error}.") from error
    path = folder / "tokenizer.json"
    if not path.is_file():
        return [{"text": text, "tokens": None} for text in texts]
    tokenizer = Tokenizer.from_file(str(path))
    return [{"text": text, "tokens": len(tokenizer.encode(text, add_special_tokens=False).ids)} for text in texts]


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NotRendered(f"{path.parent.name} has no {path.name}, so its chat template is not known.") from error
    except ValueError as error:
        raise NotRendered(f"{path.name} of {path.parent.name} is not JSON.") from error


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    """A file of its own comes before the setting, which may name several."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = {item.get("name"): item.get("template") for item in found}
        return named.get("default")
    return found


def _text(token: Any) -> str:
    """A special token is text, or an object with its `content`."""
    return str(token["content"] if isinstance(token, dict) else token)


def _environment() -> Any:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    now: Callable[[str], str] = lambda form: datetime.now().strftime(form)  # noqa: E731
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=refuse, strftime_now=now)
    return environment


if __name__ == "__main__":
    raise SystemExit(main())
