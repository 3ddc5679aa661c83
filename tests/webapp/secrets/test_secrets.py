"""Secrets go into the environment of a run's processes, and come out nowhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from django.core.cache import cache
from django.db import connection
from django.test import Client

from tests.webapp import seed
from trainer_core.rewards.sandbox import function_name, score_once
from trainer_core.spec import RewardSpec
from webapp.accounts.models import User
from webapp.audit.models import Entry
from webapp.runs import lifecycle, logs, services
from webapp.runs.commands import preview
from webapp.runs.models import Attempt, Event, Run
from webapp.secrets import crypto
from webapp.secrets.models import Secret
from webapp.secrets.redaction import PIECE, Redactor
from webapp.secrets.services import Invalid, Missing, redactor_of, store, values, values_of
from workers.launching import environment
from workers.preparation import CannotStart, run_secrets, sandbox_hides_environment
from workers.shipping import ship_all

pytestmark = pytest.mark.django_db
VALUE = 'hf_very"secret\\value'


@pytest.fixture
def run(ada: User) -> Run:
    store(ada, "HF_TOKEN", VALUE)
    return services.create_run(seed.seeded_spec().model_copy(update={"secrets": ["HF_TOKEN"]}), ada)


def test_a_value_is_stored_encrypted_and_shown_nowhere(as_ada: Client, as_admin: Client, ada: User) -> None:
    answer = as_ada.post("/secrets/", {"name": "HF_TOKEN", "value": VALUE}, follow=True)
    assert "Stored HF_TOKEN" in answer.content.decode()
    with connection.cursor() as cursor:
        cursor.execute("SELECT * FROM secrets_secret")
        assert VALUE not in repr(cursor.fetchall())
    assert VALUE not in repr(list(Entry.objects.values()))
    assert values(["HF_TOKEN"], ada) == {"HF_TOKEN": VALUE}
    for page in (as_ada.get("/secrets/"), as_admin.get("/secrets/"), as_admin.get("/audit/")):
        assert "hf_very" not in page.content.decode()
    refused = as_ada.post("/secrets/", {"name": "PATH", "value": VALUE})
    assert (refused.status_code, "hf_very" in refused.content.decode()) == (422, False)


@pytest.mark.parametrize("name, value, sentence", [
    ("LD_PRELOAD", "x" * 9, "capitals, digits and underscores"), ("hf_token", "x" * 9, "capitals"),
    ("VLLM_API_KEY", "x" * 9, "none of OFFBEAT_, VLLM_"), ("A_KEY", "short", "8 to 8,192 are allowed"),
    ("A_KEY", "two\nlines!", "one line"), ("A_KEY", " spaces in front", "spaces around"),
])  # fmt: skip
def test_a_name_or_value_that_can_not_be_is_refused(ada: User, name: str, value: str, sentence: str) -> None:
    with pytest.raises(Invalid, match=sentence):
        store(ada, name, value)
    assert not Secret.objects.exists()


def test_only_the_owner_s_runs_get_it_unless_it_is_shared(ada: User, grace: User, admin: User) -> None:
    store(ada, "HF_TOKEN", VALUE)
    with pytest.raises(Missing, match=r"no secret HF_TOKEN for the runs of grace; there is none"):
        values(["HF_TOKEN"], grace)
    store(admin, "HF_TOKEN", "of the whole house", shared=True)
    assert values(["HF_TOKEN"], grace) == {"HF_TOKEN": "of the whole house"}
    assert values(["HF_TOKEN"], ada) == {"HF_TOKEN": VALUE}  # one's own comes first


def test_only_admins_share_and_only_owners_delete(
    as_ada: Client, as_grace: Client, as_admin: Client, ada: User
) -> None:
    assert as_ada.post("/secrets/", {"name": "A_KEY", "value": VALUE, "shared": "on"}).status_code == 403
    as_admin.post("/secrets/", {"name": "A_KEY", "value": VALUE, "shared": "on"})
    secret = Secret.objects.get()
    assert secret.shared
    path = f"/secrets/{secret.pk}/delete/"
    assert as_grace.post(path).status_code == 403
    assert as_admin.post(path).status_code == 302
    assert not Secret.objects.exists()
    viewer = User.objects.create_user("viewer", is_runner=False, is_author=False)
    client = Client()
    client.force_login(viewer)
    assert client.get("/secrets/").status_code == 403


def test_a_new_secret_key_reads_old_values_only_as_a_fallback(ada: User, settings: Any) -> None:
    store(ada, "A_KEY", VALUE)
    old, settings.SECRET_KEY = settings.SECRET_KEY, "another one"
    with pytest.raises(Missing, match="secret key has changed since it was stored; store its value again"):
        values(["A_KEY"], ada)
    settings.SECRET_KEY_FALLBACKS = [old]
    assert values(["A_KEY"], ada) == {"A_KEY": VALUE}
    assert crypto.encrypt(VALUE) != crypto.encrypt(VALUE)


def test_a_run_whose_secret_is_missing_is_refused_before_it_is_queued(as_ada: Client, run: Run) -> None:
    Secret.objects.all().delete()
    with pytest.raises(lifecycle.Refused, match="no secret HF_TOKEN"):
        lifecycle.launch(run, run.owner)
    answer = as_ada.post(f"/api/runs/{run.pk}/launch")
    assert (answer.status_code, "no secret HF_TOKEN" in answer.json()["detail"]) == (422, True)
    assert Run.objects.get().state == "draft"


def test_server_and_trainer_get_it_and_the_command_wins(run: Run) -> None:
    env = environment("mark", [], "cpu", {"HF_HUB_OFFLINE": "1"}, values_of(run))
    assert (env["HF_TOKEN"], env["HF_HUB_OFFLINE"]) == (VALUE, "1")
    assert environment("mark", [], "cpu", {"HF_TOKEN": "command"}, values_of(run))["HF_TOKEN"] == "command"


def test_settings_and_commands_show_the_name_only(as_ada: Client, run: Run) -> None:
    page = as_ada.get(f"/runs/{run.pk}/settings/").content.decode()
    assert "- HF_TOKEN" in page
    assert "hf_very" not in page + as_ada.get(f"/runs/{run.pk}/spec.yaml").content.decode()
    for command in preview(run.run_spec(), "model", "cpu"):
        assert "HF_TOKEN='<secret>'" in command["text"]


def test_logs_events_and_rollouts_are_redacted(as_ada: Client, run: Run) -> None:
    attempt = Attempt.objects.create(run=run, number=1)
    attempt.folder.mkdir(parents=True)
    quoted = json.dumps(VALUE)[1:-1]
    log = attempt.folder / "trainer.log"
    log.write_text(f"before\ntoken is {VALUE} and {quoted} here\nnum_memory_tokens=8\n")
    size = log.stat().st_size
    data = as_ada.get(f"/runs/{run.pk}/logs/data/?file=trainer.log").json()
    assert data["text"] == f"before\ntoken is {'*' * len(VALUE)} and {'*' * len(quoted)} here\nnum_memory_tokens=8\n"
    download = as_ada.get(f"/runs/{run.pk}/logs/file/?file=trainer.log")  # streams what is on disk now
    assert ("hf_very" in log.read_text(), download.headers["Content-Length"]) == (False, str(size))
    with open(log, "a") as file:
        file.write(f"again {VALUE}\n")
    text = as_ada.get(f"/api/runs/{run.pk}/logs/1/trainer.log").json()["text"]
    assert "again" in text
    assert "hf_very" not in text + log.read_text()

    event = {"v": 1, "kind": "event", "t": 1.0, "step": 1, "level": "error", "name": "failed",
             "text": f"refused {VALUE}", "data": {"header": VALUE}}  # fmt: skip
    rollout = {"v": 1, "kind": "rollout", "t": 1.0, "step": 1, "rollout": {
        "group_id": "a", "row_index": 0, "reward": 1.0, "prompt": f"say {VALUE}", "completion": "no"}}  # fmt: skip
    (attempt.folder / "spool.jsonl").write_text(json.dumps(event) + "\n")
    (attempt.folder / "rollouts.jsonl").write_text(json.dumps(rollout) + "\n")
    ship_all(attempt)
    assert Event.objects.get(name="failed").text == f"refused {'*' * len(quoted)}"
    assert "hf_very" not in repr(list(Event.objects.values())) + repr(list(run.rollouts.values()))

    lifecycle.record(run, "last_lines", f"Ends with {VALUE}", log=[f"line {VALUE}"])
    Run.objects.filter(pk=run.pk).update(state="running")
    lifecycle.change_state(run, ["running"], "failed", f"It said {VALUE}.")  # type: ignore[list-item, arg-type]
    run.refresh_from_db()
    assert run.reason == f"It said {'*' * len(VALUE)}."
    assert "hf_very" not in repr(list(Event.objects.values()))


def test_a_value_across_two_pieces_of_a_log_is_found(tmp_path: Path) -> None:
    redactor, path = Redactor(["0123456789abcdef"]), tmp_path / "trainer.log"
    with open(path, "wb") as file:
        file.write(b"x" * (PIECE - 8) + b"0123456789abcdef" + b"y" * 100)
    redactor.file(path)
    assert b"0123" not in path.read_bytes()
    with open(path, "ab") as file:
        file.write(b"z 01234567")
    redactor.file(path)
    with open(path, "ab") as file:
        file.write(b"89abcdef\n")
    redactor.file(path)
    assert path.read_bytes()[-20:] == b"yz " + b"*" * 16 + b"\n"
    cache.clear()
    assert path.stat().st_size == PIECE - 8 + 16 + 100 + 2 + 16 + 1


def test_reward_functions_never_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", VALUE)  # as in the trainer, whose child the sandbox is
    source = (
        "import os\n"
        "def look(completions, **columns):\n"
        "    found = [repr(dict(os.environ))]\n"
        "    for pid in (os.getppid(), 'self'):\n"
        "        try:\n"
        "            found.append(open(f'/proc/{pid}/environ').read())\n"
        "        except OSError:\n"
        "            pass\n"
        "    print('looked', 'PATH' in found[0] or len(found))\n"
        "    return [1.0 if 'hf_very' in ' '.join(found) else 0.0 for c in completions]\n"
    )
    call = {"prompts": [[]], "completions": [[{"role": "assistant", "content": "x"}]], "completion_ids": [[]]}
    result = score_once(source, function_name(source), [call], 30.0)
    if result.error is not None:
        pytest.fail(str(result.error))
    assert "looked" in result.output
    hidden = "landlock" in result.level or "own uid" in result.level
    assert result.values == [[0.0 if hidden else 1.0]]
    assert hidden or not sandbox_hides_environment()


@pytest.mark.parametrize("level, rewards, refused", [
    ("process + rlimits", [RewardSpec(name="mine", version=1)], True),
    ("process + rlimits", [RewardSpec()], False),
    ("process + rlimits + landlock", [RewardSpec(name="mine", version=1)], False),
    ("own uid + process", [RewardSpec(name="mine", version=1)], False),
])  # fmt: skip
def test_a_host_whose_sandbox_could_read_secrets_does_not_run_written_rewards_with_them(
    run: Run, monkeypatch: pytest.MonkeyPatch, level: str, rewards: list[RewardSpec], refused: bool
) -> None:
    monkeypatch.setattr("workers.preparation.sandbox_level", lambda: level)
    spec = run.run_spec().model_copy(update={"rewards": rewards})
    if refused:
        with pytest.raises(CannotStart, match="could read the run's secrets"):
            run_secrets(run, spec)
    else:
        assert run_secrets(run, spec) == {"HF_TOKEN": VALUE}


def test_runs_without_secrets_cost_nothing(ada: User, django_assert_num_queries: Any) -> None:
    run = services.create_run(seed.seeded_spec(), ada)
    with django_assert_num_queries(0):
        assert not redactor_of(run)
    assert logs.log_files(Attempt(run=run, number=1)) == []
