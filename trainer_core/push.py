"""Uploads a folder to the Hugging Face hub, in a process of its own.

    HF_TOKEN=... python -m trainer_core.push --folder FOLDER --repo NAME/MODEL [--private]

HF_ENDPOINT names another hub. Lines on stdout as those of trainer_core.merge; {"done": true} comes with the model's `url`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from trainer_core.merge import end_with_parent, say


def push(folder: Path, repo: str, private: bool) -> str:
    """Returns the address of the model's page. Raises what huggingface_hub raises."""
    from huggingface_hub import HfApi

    api = HfApi(token=os.environ["HF_TOKEN"])
    say(text=f"Makes {repo}, unless it is there.", share=0.05)
    url = api.create_repo(repo, private=private, exist_ok=True)
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 2**20
    say(text=f"Uploads {len(files)} files, {size:,.1f} MiB.", share=0.15)
    api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload from Offbeat")
    return str(url)


def sentence(error: Exception, repo: str) -> str:
    """What happened, for people."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401:
        return "The hub does not know this token; make one with write access in the hub's settings."
    if status == 403:
        return f"This token may not write to {repo}; it needs write access, and the name must be yours or your organisation's."
    return f"The hub did not take it: {type(error).__name__}: {' '.join(str(error).split())[:300]}."


def main() -> None:
    parser = argparse.ArgumentParser(description="Uploads a folder to the Hugging Face hub.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--repo", required=True)
    parser.add_argument("--private", action="store_true")
    arguments = parser.parse_args()
    end_with_parent()
    try:
        url = push(arguments.folder, arguments.repo, arguments.private)
    # whatever a library raises: whoever waits gets one sentence
    except Exception as error:  # noqa: BLE001
        say(failed=sentence(error, arguments.repo).replace(os.environ["HF_TOKEN"], "•••"))
        sys.exit(1)
    say(done=True, url=url)


if __name__ == "__main__":
    main()
