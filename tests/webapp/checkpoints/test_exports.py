"""Merging an adapter and pushing to a hub: asked for on the page, done in a process of its own, with a sentence if not."""

from __future__ import annotations

import io
import json
import time
import zipfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from django.test import Client
from django.utils import timezone
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from tests.trainer_core.training.replay import save_tiny_llama
from tests.webapp import seed
from tests.webapp.checkpoints.stand_in_hub import Hub, serving
from webapp.accounts.models import ApiToken, User
from webapp.checkpoints import exports
from webapp.checkpoints.models import Checkpoint, Export
from webapp.runs.lifecycle import Refused
from webapp.runs.models import Event
from webapp.secrets import services as secrets
from webapp.secrets.models import Secret
from workers import exporting

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume asynchronous"),
    pytest.mark.timeout(900),  # each merge imports PyTorch in a process of its own
]
SECRET = "hf_secretsecretsecret"


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture
def checkpoint(ada: User, base: Path) -> Checkpoint:
    """A real adapter of a tiny model, with weights that change what it says."""
    spec = seed.seeded_spec()
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"path": str(base)})})
    run = seed.make_run(ada, state="completed", steps=20, spec=spec, rollouts=False)
    found = run.checkpoints.get()
    torch.manual_seed(3)
    model: Any = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
    )
    model.save_pretrained(found.folder)
    return found


def merge(checkpoint: Checkpoint) -> Export:
    export = exports.request_merge(checkpoint, checkpoint.run.owner)
    Export.objects.filter(pk=export.pk).update(state="running")
    exporting.run_export(export.pk)
    export.refresh_from_db()
    return export


def push(checkpoint: Checkpoint, repo: str = "ada/m", **options: Any) -> Export:
    export = exports.request_push(checkpoint, checkpoint.run.owner, repo, **{"private": True, **options})
    Export.objects.filter(pk=export.pk).update(state="running")
    exporting.run_export(export.pk)
    export.refresh_from_db()
    return export


def test_merged_weights_say_what_base_and_adapter_say(
    as_ada: Client, checkpoint: Checkpoint, base: Path, tmp_path: Path
) -> None:
    export = merge(checkpoint)
    assert (export.state, export.text) == ("done", "")
    content = b"".join(as_ada.get(f"/merged/{export.pk}/model.zip"))  # type: ignore[arg-type]
    zipfile.ZipFile(io.BytesIO(content)).extractall(tmp_path / "unpacked")
    (folder,) = (tmp_path / "unpacked").iterdir()
    assert {"model.safetensors", "README.md", "reward_curve.svg", "tokenizer.json"} <= {
        path.name for path in folder.iterdir()
    }
    assert "merged" in (folder / "README.md").read_text()
    ids = torch.arange(3, 20)[None]
    plain = AutoModelForCausalLM.from_pretrained(base)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(checkpoint.folder))
    merged = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, atol=1e-4, rtol=1e-4)
        assert (merged(ids).logits - plain(ids).logits).abs().max() > 0.01
    assert list(Event.objects.filter(name="export_done").values_list("text", flat=True)) == [
        "Done: merged weights of step 20."
    ]
    page = as_ada.get(f"/runs/{checkpoint.run_id}/checkpoints/").content.decode()
    assert "Download merged" in page
    assert not list(export.folder.parent.glob(".making-*"))
    assert as_ada.get(f"/merged/{export.pk}/files/config.json", headers={"Range": "bytes=0-0"}).status_code == 206
    assert as_ada.get(f"/merged/{export.pk}/files/../../spec.yaml").status_code == 404
    freed = as_ada.post(f"/runs/{checkpoint.run_id}/exports/{export.pk}/delete/", follow=True).content.decode()
    assert "are free again" in freed
    assert not export.folder.exists()
    assert as_ada.get(f"/merged/{export.pk}/model.zip").status_code == 404


def test_an_adapter_that_does_not_fit_is_said_in_a_sentence(checkpoint: Checkpoint) -> None:
    config = json.loads((checkpoint.folder / "adapter_config.json").read_text())
    (checkpoint.folder / "adapter_config.json").write_text(json.dumps({**config, "r": 7}))
    export = merge(checkpoint)
    assert export.state == "failed"
    assert "could not be merged" in export.text
    assert not export.folder.exists()
    assert Event.objects.filter(name="export_failed").count() == 1
    exports.request_merge(checkpoint, checkpoint.run.owner)  # may be tried again


def test_a_base_model_that_is_gone_is_said(checkpoint: Checkpoint) -> None:
    checkpoint.run.spec["model"]["path"] = "/nowhere/at/all"
    checkpoint.run.save()
    export = merge(checkpoint)
    assert export.state == "failed"
    assert "/nowhere/at/all" in export.text


def test_what_can_not_be_merged_is_refused(as_ada: Client, checkpoint: Checkpoint) -> None:
    path = f"/runs/{checkpoint.run_id}/checkpoints/{checkpoint.pk}/merge/"
    as_ada.post(path)
    assert "is being merged" in as_ada.post(path, follow=True).content.decode()
    page = as_ada.post(f"/runs/{checkpoint.run_id}/checkpoints/{checkpoint.pk}/delete/", follow=True).content.decode()
    assert "is being merged or pushed" in page
    Checkpoint.objects.filter(pk=checkpoint.pk).update(kind="full")
    assert "no adapter to merge" in as_ada.post(path, follow=True).content.decode()
    Checkpoint.objects.filter(pk=checkpoint.pk).update(kind="adapter", deleted_at=timezone.now())
    assert "is deleted" in as_ada.post(path, follow=True).content.decode()


def test_only_who_may_change_the_run_makes_something_of_it(as_grace: Client, checkpoint: Checkpoint) -> None:
    export = exports.request_merge(checkpoint, checkpoint.run.owner)
    base = f"/runs/{checkpoint.run_id}"
    for path in (f"{base}/checkpoints/{checkpoint.pk}/merge/", f"{base}/checkpoints/{checkpoint.pk}/push/",
                 f"{base}/exports/{export.pk}/delete/"):  # fmt: skip
        assert as_grace.post(path).status_code == 403, path
        assert as_grace.get(path).status_code == 405, path
        assert Client(enforce_csrf_checks=True).post(path).status_code in (302, 403)


def test_a_worker_takes_what_is_queued_and_gives_up_what_is_silent(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []
    monkeypatch.setattr(exporting, "run_export", done.append)
    export = exports.request_merge(checkpoint, checkpoint.run.owner)
    exporting.start_queued("another host")
    exporting.start_queued("workbench")
    exporting.start_queued("workbench")
    deadline = time.monotonic() + 10
    while not done and time.monotonic() < deadline:
        time.sleep(0.01)
    assert done == [export.pk]
    export.refresh_from_db()
    assert export.state == "running"
    Export.objects.update(heartbeat_at=timezone.now() - timedelta(seconds=61))
    exporting.start_queued("workbench")
    export.refresh_from_db()
    assert (export.state, "ended meanwhile" in export.text) == ("failed", True)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    with serving(Hub(SECRET, "ada")) as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        yield found


def test_an_adapter_is_pushed_with_its_card_and_without_what_resuming_needs(hub: Hub, checkpoint: Checkpoint) -> None:
    secrets.store(checkpoint.run.owner, "HF_TOKEN", SECRET)
    export = push(checkpoint)
    assert (export.state, export.text, export.url) == ("done", "", f"{hub.url}/ada/m")
    assert hub.repos == {"ada/m": True}
    assert hub.files["adapter_model.safetensors"] == (checkpoint.folder / "adapter_model.safetensors").read_bytes()
    assert {"README.md", "reward_curve.svg", "run.yaml", "adapter_config.json"} <= set(hub.files)
    assert "optimizer.pt" not in hub.files
    assert b"# products, LoRA r=16, step 20" in hub.files["README.md"]


def test_a_push_of_merged_weights_takes_those(hub: Hub, checkpoint: Checkpoint) -> None:
    secrets.store(checkpoint.run.owner, "HF_TOKEN", SECRET)
    with pytest.raises(Refused, match="merge it first"):
        push(checkpoint, merged=True)
    merged = Export.objects.create(checkpoint=checkpoint, kind="merge", state="done", owner=checkpoint.run.owner)
    merged.folder.mkdir(parents=True)
    (merged.folder / "model.safetensors").write_bytes(b"merged" * 1000)
    assert push(checkpoint, merged=True, private=False).state == "done"
    assert hub.files["model.safetensors"] == (merged.folder / "model.safetensors").read_bytes()
    assert "adapter_model.safetensors" not in hub.files
    assert hub.repos == {"ada/m": False}


def test_what_the_hub_refuses_is_a_sentence_without_the_token(hub: Hub, checkpoint: Checkpoint) -> None:
    secrets.store(checkpoint.run.owner, "HF_TOKEN", "hf_anotherone")
    export = push(checkpoint)
    assert (export.state, "does not know this token" in export.text) == ("failed", True)
    secrets.store(checkpoint.run.owner, "HF_TOKEN", SECRET)
    export = push(checkpoint, "grace/m")
    assert (export.state, "may not write to grace/m" in export.text) == ("failed", True)
    assert SECRET not in export.text


def test_a_token_is_kept_sealed_and_never_shown(as_ada: Client, ada: User, checkpoint: Checkpoint) -> None:
    path = f"/runs/{checkpoint.run_id}/checkpoints/{checkpoint.pk}/push/"
    assert "stored no hub token" in as_ada.post(path, {"repo": "ada/m"}, follow=True).content.decode()
    assert (
        "is no hub token" in as_ada.post(path, {"repo": "ada/m", "token": "two words!"}, follow=True).content.decode()
    )
    assert "is no name of a model" in as_ada.post(path, {"repo": "../m", "token": SECRET}, follow=True).content.decode()
    page = as_ada.post(path, {"repo": "ada/m", "private": "on"}, follow=True).content.decode()
    export = Export.objects.get()
    assert (export.repo, export.private, export.state) == ("ada/m", True, "queued")
    assert SECRET not in page
    assert SECRET not in Secret.objects.get(owner=ada, name="HF_TOKEN").ciphertext
    Secret.objects.all().delete()
    Export.objects.update(state="running")
    exporting.run_export(export.pk)
    export.refresh_from_db()
    assert (export.state, "There is no secret HF_TOKEN" in export.text) == ("failed", True)


def test_the_api_merges_pushes_and_deletes(checkpoint: Checkpoint, ada: User, grace: User) -> None:
    def api(user: User) -> Client:
        return Client(headers={"Authorization": f"Bearer {ApiToken.create(user, 't')[1]}"})

    base = f"/api/checkpoints/{checkpoint.pk}"
    assert api(grace).post(f"{base}/merge").status_code == 403
    assert api(grace).delete(base).status_code == 403
    answer = api(ada).post(f"{base}/merge")
    assert (answer.status_code, answer.json()["state"]) == (202, "queued")
    assert api(ada).post(f"{base}/merge").status_code == 409
    assert api(ada).get(f"{base}/merged/zip").status_code == 404
    body = {"repo": "ada/m"}
    refused = api(ada).post(f"{base}/push", body, content_type="application/json")
    assert (refused.status_code, "no hub token" in refused.json()["detail"]) == (409, True)
    secrets.store(ada, "HF_TOKEN", SECRET)
    assert api(ada).post(f"{base}/push", body, content_type="application/json").status_code == 202
    assert [item["kind"] for item in api(ada).get(f"{base}/exports").json()] == ["push", "merge"]
    assert api(ada).delete(base).status_code == 409
    Export.objects.all().delete()
    assert api(ada).delete(base).json()["freed_bytes"] > 0
    assert not checkpoint.folder.exists()
