"""What the Hugging Face hub says while somebody waits for a form: whether it has a model or dataset, and a model's config.

It is asked with the HF_TOKEN that the run names among its owner's secrets, so that what is private there can be used; without
one, as this machine is known to the hub.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal

import httpx
from django.core.cache import cache

from trainer_core.spec import RunSpec
from webapp.accounts.models import User
from webapp.secrets.services import Missing, values

SECONDS = 5.0
"""How long a look at the hub may take."""
TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""Names of a secret that the hub's own libraries take for the token, the first one before the second."""
Kind = Literal["model", "dataset"]
INSTEAD = {
    "model": "a local folder, or 'smollm2-135m-instruct'",
    "dataset": "a local file, or 'reasoning_gym:<task>'",
}


@dataclass(frozen=True)
class Access:
    """Who asks the hub. `token` None: this machine."""

    token: str | None = None
    owner: str = ""

    def key(self, *parts: str) -> str:
        """A key of the cache for what this owner with this token was told."""
        text = json.dumps([self.owner, self.token, *parts])
        return f"hub:{hashlib.sha256(text.encode()).hexdigest()}"

    def headers(self) -> dict[str, str]:
        from huggingface_hub.utils import build_hf_headers

        return build_hf_headers(token=self.token)


def access_of(spec: RunSpec, owner: User | None) -> Access:
    """With the owner's token where the run names one that there is; a missing one is a problem of its own elsewhere."""
    for name in TOKENS:
        if owner is not None and name in spec.secrets:
            try:
                return Access(values([name], owner)[name], owner.username)
            except Missing:
                return Access()
    return Access()


def problem(kind: Kind, repo: str, access: Access) -> str:
    """One sentence when the hub can't give this repository, "" when it can. Remembered for a minute."""
    return cache.get_or_set(access.key(kind, repo), lambda: _ask(kind, repo, access) or "", 60) or ""


def _ask(kind: Kind, repo: str, access: Access) -> str | None:
    """None also for a repository that the hub's cache on this machine has."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound, HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError:
        return f"{repo!r} is neither a path on this machine nor a hub id such as 'Qwen/Qwen3-0.6B'."
    try:
        if any(cached.repo_id == repo and cached.repo_type == kind for cached in scan_cache_dir().repos):
            return None
    except CacheNotFound:
        pass  # nothing was ever downloaded here
    offline = f"The hub can't be reached from this machine and {repo!r} is not in its cache; give {INSTEAD[kind]}."
    if constants.HF_HUB_OFFLINE:
        return offline
    url = f"{constants.ENDPOINT}/api/{kind}s/{repo}"
    try:
        status = httpx.get(url, headers=access.headers(), timeout=SECONDS, follow_redirects=True).status_code
    except (httpx.HTTPError, OSError):
        return offline
    if status in (401, 403, 404):
        if access.token is None:
            return (
                f"The hub has no {kind} {repo!r}, or it is private: then store a token that may read it under Secrets, and "
                f"name it in the run's secrets ({TOKENS[0]})."
            )
        return f"The hub has no {kind} {repo!r} that the {TOKENS[0]} of {access.owner} may read."
    return None if status < 400 else f"The hub answered {status} when asked for {repo!r}; try again later."


def model_config(repo: str, access: Access) -> dict[str, Any] | None:
    """config.json of a model, from the hub's cache on this machine or from the hub; None when neither has it."""
    try:
        return cache.get_or_set(access.key("config", repo), lambda: _config(repo, access), 600)
    except (OSError, ValueError):
        return None


def _config(repo: str, access: Access) -> dict[str, Any] | None:
    from huggingface_hub import constants, try_to_load_from_cache

    cached = try_to_load_from_cache(repo, "config.json")
    if isinstance(cached, str):
        with open(cached, encoding="utf-8") as file:
            return json.load(file)
    if constants.HF_HUB_OFFLINE:
        return None
    url = f"{constants.ENDPOINT}/{repo}/resolve/main/config.json"
    try:
        answer = httpx.get(url, headers=access.headers(), timeout=SECONDS, follow_redirects=True)
        return answer.json() if answer.is_success else None
    except httpx.HTTPError:
        return None
