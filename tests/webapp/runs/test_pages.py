"""Pages of runs: what they show in each state, that text stays text, who may do what, and how much they ask the database."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from tests.webapp import seed
from webapp.accounts.models import User
from webapp.hosts.models import Lease
from webapp.runs import services
from webapp.runs.models import Event, Run, State
from webapp.runs.sample import sample_spec

pytestmark = pytest.mark.django_db
TABS = ("", "rollouts/", "checkpoints/", "logs/", "events/", "settings/", "live/?tab=overview", "spec.yaml")


@pytest.fixture
def run(ada: User) -> Run:
    return seed.make_run(ada)


@pytest.mark.parametrize("state", State.values)
def test_every_page_of_a_run_in_every_state(as_ada: Client, ada: User, state: str) -> None:
    steps = 0 if state in (State.DRAFT, State.QUEUED, State.STARTING) else 21
    run = seed.make_run(ada, state=state, steps=steps, reason="Because of the test.")
    for tab in TABS:
        response = as_ada.get(f"/runs/{run.pk}/{tab}")
        assert response.status_code == 200, tab
    page = as_ada.get(f"/runs/{run.pk}/").content.decode()
    assert f'class="state state-{state} pill"' in page
    if state not in (State.DRAFT, State.RUNNING):
        assert "Because of the test." in page


def test_an_unknown_run_is_a_404_page(as_ada: Client) -> None:
    response = as_ada.get("/runs/00000000-0000-0000-0000-000000000000/")
    assert response.status_code == 404
    assert b"Nothing here" in response.content


def test_names_notes_and_reasons_are_shown_as_text(as_ada: Client, ada: User) -> None:
    evil = "<script>alert(1)</script>"
    spec = sample_spec().model_copy(update={"notes": evil, "tags": [evil]})
    run = seed.make_run(ada, evil, state=State.FAILED, spec=spec, reason=evil, steps=1)
    for path in ("/runs/", *(f"/runs/{run.pk}/{tab}" for tab in TABS if tab != "spec.yaml")):
        assert evil not in as_ada.get(path).content.decode(), path
    assert as_ada.get(f"/runs/{run.pk}/spec.yaml").headers["Content-Disposition"].startswith("attachment")


def test_no_page_has_inline_script(as_ada: Client, run: Run) -> None:
    for path in ("/runs/", "/runs/new/", "/rewards/new/", "/hosts/", "/account/", f"/runs/{run.pk}/"):
        page = as_ada.get(path).content.decode()
        assert not re.search(r"<script(?![^>]*\bsrc=)", page), path
        assert not re.search(r"\son\w+=", page), path


def test_a_failure_shows_the_lines_of_its_log(as_ada: Client, ada: User) -> None:
    run = seed.make_run(ada, state=State.FAILED, steps=3, reason="The GPU ran out of memory.")
    assert "step 3 loss" in as_ada.get(f"/runs/{run.pk}/").content.decode()
    Event.objects.create(
        run=run, attempt=run.current_attempt, created_at=run.created_at, name="last_lines", text="Last lines of the log.",
        data={"log": ["torch.OutOfMemoryError: tried to allocate"]},
    )  # fmt: skip
    page = as_ada.get(f"/runs/{run.pk}/").content.decode()
    assert "torch.OutOfMemoryError: tried to allocate" in page
    assert "step 3 loss" not in page


def test_an_event_shows_its_traceback_as_text(as_ada: Client, run: Run) -> None:
    """What went wrong in a reward function is read where it is said."""
    Event.objects.create(
        run=run, attempt=run.current_attempt, created_at=run.created_at, level=Event.Level.WARNING, name="reward_error",
        text="Reward judge failed on a group: KeyError: 'gold'",
        data={"traceback": 'Traceback (most recent call last):\n  File "reward.py", line 3, in <module>\n'},
    )  # fmt: skip
    for tab in ("", "events/"):
        page = as_ada.get(f"/runs/{run.pk}/{tab}").content.decode()
        assert "<summary>Traceback</summary>" in page
        assert "line 3, in &lt;module&gt;" in page


def digest_of(html: str) -> str:
    found = re.search(r"seen=(\w+)", html)
    assert found is not None
    return found.group(1)


def test_the_live_part_is_sent_again_only_when_something_changed(as_ada: Client, run: Run) -> None:
    url = f"/runs/{run.pk}/live/?tab=overview"
    digest = digest_of(as_ada.get(url).content.decode())
    assert as_ada.get(f"{url}&seen={digest}").status_code == 204
    Run.objects.filter(pk=run.pk).update(state=State.STOPPING, reason="Asked to stop now.")
    changed = as_ada.get(f"{url}&seen={digest}")
    assert changed.status_code == 200
    assert "state-stopping" in changed.content.decode()


def test_the_list_is_sent_again_only_when_something_changed(as_ada: Client, run: Run) -> None:
    digest = digest_of(as_ada.get("/runs/?fragment=1").content.decode())
    assert as_ada.get(f"/runs/?fragment=1&seen={digest}").status_code == 204
    Run.objects.filter(pk=run.pk).update(summary={**run.summary, "step": 25})
    assert as_ada.get(f"/runs/?fragment=1&seen={digest}").status_code == 200


def test_the_list_asks_five_queries_however_many_runs_there_are(
    as_ada: Client, ada: User, django_assert_max_num_queries: Any
) -> None:
    for number in range(60):
        services.create_run(sample_spec().model_copy(update={"name": f"run {number}"}), ada)
    with django_assert_max_num_queries(5):
        page = as_ada.get("/runs/").content.decode()
    assert page.count('data-testid="run-row"') == 50


def test_the_list_filters_searches_sorts_and_pages(as_ada: Client, ada: User) -> None:
    seed.make_run(ada, "alpha", steps=3, rollouts=False)
    seed.make_run(
        ada, "beta", state=State.FAILED, steps=9, rollouts=False, spec=sample_spec().model_copy(update={"tags": ["x"]})
    )

    def names(query: str) -> list[str]:
        return re.findall(r'title="(alpha|beta)"', as_ada.get(f"/runs/{query}").content.decode())

    assert names("") == ["beta", "alpha"]
    assert names("?sort=name") == ["alpha", "beta"]
    assert names("?sort=-step") == ["beta", "alpha"]
    assert names("?state=failed") == ["beta"]
    assert names("?state=live") == ["alpha"]
    assert names("?search=alph") == ["alpha"]
    assert names("?tag=x") == ["beta"]
    assert names("?page=2") == []
    assert b"No run matches" in as_ada.get("/runs/?search=nothing-has-this").content


@pytest.mark.parametrize("query", ["?sort=evil", "?state=nonsense", "?page=-1", "?page=99999999999999999999"])
def test_nonsense_in_the_address_of_the_list_does_no_harm(as_ada: Client, run: Run, query: str) -> None:
    assert as_ada.get(f"/runs/{query}", follow=True).status_code == 200


def test_an_empty_studio_says_what_to_do(as_ada: Client) -> None:
    page = as_ada.get("/runs/").content.decode()
    assert "No runs yet" in page
    assert "?preset=sample" in page


def test_stop_and_save_is_a_wish_that_the_supervisor_reads(as_ada: Client, run: Run) -> None:
    as_ada.post(f"/runs/{run.pk}/stop/", {"save": "1"})
    run.refresh_from_db()
    assert (run.state, run.desired) == (State.RUNNING, "stop_and_save")
    as_ada.post(f"/runs/{run.pk}/stop/")
    run.refresh_from_db()
    assert run.desired == "stop"


def test_resume_from_a_chosen_checkpoint(as_ada: Client, ada: User) -> None:
    run = seed.make_run(ada, state=State.STOPPED, steps=40)
    first = run.checkpoints.get(step=20)
    as_ada.post(f"/runs/{run.pk}/resume/", {"checkpoint": str(first.pk)})
    run.refresh_from_db()
    attempt = run.current_attempt
    assert attempt is not None
    assert (run.state, attempt.number, attempt.resumed_from) == (State.QUEUED, 2, first)


def test_a_run_whose_dataset_is_gone_is_not_resumed(as_ada: Client, ada: User, tmp_path: Path) -> None:
    run = seed.make_run(ada, "mine", state=State.STOPPED)
    Run.objects.filter(pk=run.pk).update(spec=run.spec | {"data": {"source": str(tmp_path / "gone.jsonl")}})
    page = as_ada.post(f"/runs/{run.pk}/resume/", follow=True).content.decode()
    assert f"There is no file {tmp_path}/gone.jsonl on this machine." in page
    run.refresh_from_db()
    assert (run.state, run.attempts.count()) == (State.STOPPED, 1)


def test_resume_skips_a_checkpoint_whose_folder_is_gone(as_ada: Client, ada: User) -> None:
    import shutil

    run = seed.make_run(ada, state=State.STOPPED, steps=40)
    shutil.rmtree(run.checkpoints.get(step=40).folder)
    as_ada.post(f"/runs/{run.pk}/resume/")
    attempt = run.current_attempt
    assert attempt is not None
    assert attempt.resumed_from == run.checkpoints.get(step=20)


@pytest.mark.parametrize("action", ["launch", "stop", "resume", "archive", "delete"])
def test_only_the_owner_and_admins_steer_a_run(as_grace: Client, as_admin: Client, run: Run, action: str) -> None:
    path = f"/runs/{run.pk}/{action}/"
    assert as_grace.get(path).status_code == 405
    assert as_grace.post(path).status_code == 403
    assert as_admin.post(path).status_code == 302
    assert as_grace.get(f"/runs/{run.pk}/").status_code in (200, 404)


def test_others_see_a_run_without_its_buttons(as_grace: Client, run: Run) -> None:
    page = as_grace.get(f"/runs/{run.pk}/").content.decode()
    assert 'data-testid="stop-now"' not in page
    assert 'data-testid="clone"' in page


def test_a_live_run_is_neither_archived_nor_deleted(as_ada: Client, run: Run) -> None:
    for action in ("archive", "delete"):
        page = as_ada.post(f"/runs/{run.pk}/{action}/", {"archived": "1"}, follow=True).content.decode()
        assert "stop it" in page
    run.refresh_from_db()
    assert not run.archived


def test_a_run_that_still_holds_devices_is_not_deleted(as_ada: Client, ada: User) -> None:
    run = seed.make_run(ada, state=State.LOST, steps=1, lease=True)
    as_ada.post(f"/runs/{run.pk}/delete/")
    assert Run.objects.filter(pk=run.pk).exists()
    Lease.objects.all().delete()
    as_ada.post(f"/runs/{run.pk}/delete/")
    assert not Run.objects.filter(pk=run.pk).exists()


def test_delete_takes_the_folder_along(as_ada: Client, ada: User, django_capture_on_commit_callbacks: Any) -> None:
    run = seed.make_run(ada, state=State.COMPLETED, steps=20)
    folder = run.folder
    assert folder.is_dir()
    with django_capture_on_commit_callbacks(execute=True):
        as_ada.post(f"/runs/{run.pk}/delete/")
    assert not folder.exists()


def test_archived_runs_leave_the_list_and_come_back(as_ada: Client, ada: User) -> None:
    run = seed.make_run(ada, "kept", state=State.COMPLETED, steps=1)
    as_ada.post(f"/runs/{run.pk}/archive/", {"archived": "1"})
    assert b'title="kept"' not in as_ada.get("/runs/").content
    assert b'title="kept"' in as_ada.get("/runs/?archived=1").content
    as_ada.post(f"/runs/{run.pk}/archive/", {"archived": "0"})
    assert b'title="kept"' in as_ada.get("/runs/").content


def test_bulk_actions_do_what_is_allowed_and_say_what_is_not(as_ada: Client, ada: User, grace: User) -> None:
    done = seed.make_run(ada, "done", state=State.COMPLETED, steps=1, rollouts=False)
    live = seed.make_run(ada, "live one", steps=1, rollouts=False)
    hers = seed.make_run(grace, "hers", state=State.COMPLETED, steps=1, rollouts=False)
    chosen = {"run": [str(done.pk), str(live.pk), str(hers.pk), "nonsense"], "action": "archive"}
    page = as_ada.post("/runs/bulk/", chosen, follow=True).content.decode()
    assert "Archived 1 run." in page
    assert "live one: The run is live" in page
    assert "hers: it belongs to somebody else." in page
    assert set(Run.objects.filter(archived=True)) == {done}


def test_checkpoints_are_listed_downloaded_and_deleted(as_ada: Client, ada: User) -> None:
    run = seed.make_run(ada, state=State.COMPLETED, steps=40)
    page = as_ada.get(f"/runs/{run.pk}/checkpoints/").content.decode()
    assert "adapter_model.safetensors" in page
    assert "2 files for resuming" in page
    last = run.checkpoints.get(step=40)
    assert f"/checkpoints/{last.pk}/model.zip" in page
    said = as_ada.post(f"/runs/{run.pk}/checkpoints/{last.pk}/delete/", follow=True).content.decode()
    assert "781 KiB are free again" in said
    assert not last.folder.exists()
    assert "deleted already" in as_ada.post(
        f"/runs/{run.pk}/checkpoints/{last.pk}/delete/", follow=True
    ).content.decode()  # fmt: skip


def test_a_checkpoint_is_kept_while_the_run_resumes_from_it(as_ada: Client, ada: User, as_grace: Client) -> None:
    run = seed.make_run(ada, state=State.STOPPED, steps=20)
    checkpoint = run.checkpoints.get()
    path = f"/runs/{run.pk}/checkpoints/{checkpoint.pk}/delete/"
    assert as_grace.post(path).status_code == 403
    as_ada.post(f"/runs/{run.pk}/resume/")
    assert "is resuming from step 20" in as_ada.post(path, follow=True).content.decode()
    assert checkpoint.folder.is_dir()
