"""Runs through the API: made, steered, refused."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client

from trainer_core.spec import RunSpec
from webapp.hosts.models import Host
from webapp.runs.models import Attempt, Event, Run, State


def post(client: Client, path: str, body: Any = None) -> Any:
    return client.post(path, body if body is not None else {}, content_type="application/json")


def test_a_run_is_made_from_json_and_read_back(api: Client) -> None:
    spec = RunSpec(name="from json", tags=["x"]).model_dump(mode="json")
    answer = post(api, "/api/runs", {"spec": spec})
    assert answer.status_code == 201, answer.content
    run = answer.json()
    assert (run["state"], run["name"], run["owner"], run["tags"]) == ("draft", "from json", "alice", ["x"])
    assert run["spec"] == spec
    again = api.get(f"/api/runs/{run['id']}").json()
    assert again == run
    assert again["url"] == f"http://testserver/runs/{run['id']}/"


def test_a_run_is_made_from_yaml_and_launched(api: Client) -> None:
    answer = post(api, "/api/runs", {"yaml": RunSpec(name="from yaml").to_yaml(), "launch": True})
    run = answer.json()
    assert (run["state"], len(run["attempts"])) == ("queued", 1)
    assert [event["name"] for event in api.get(f"/api/runs/{run['id']}/events").json()] == ["created", "state:queued"]


def test_a_wrong_field_is_named_with_what_is_allowed(api: Client) -> None:
    answer = post(api, "/api/runs", {"spec": {"rollout": {"num_generations": 1}, "training": {"typo": 3}}})
    assert answer.status_code == 422
    problems = {problem["field"]: problem["message"] for problem in answer.json()["problems"]}
    assert "at least 2" in problems["rollout.num_generations"]
    assert "training.typo" in problems
    assert answer.json()["detail"].startswith("rollout.num_generations: ")
    assert Run.objects.count() == 0


@pytest.mark.parametrize(
    "body,words",
    [
        ({}, "either as 'spec'"),
        ({"spec": {}, "yaml": "{}"}, "either as 'spec'"),
        ({"yaml": "a: [1"}, "not valid YAML"),
        ({"yaml": "just text"}, "mapping of sections"),
        ({"spec": {}, "lunch": True}, "lunch"),
        ({"spec": {"model": {"path": "/no/such/folder"}}}, "no folder /no/such/folder"),
        ({"spec": {"rewards": [{"name": "nonsense"}]}}, "no reward function 'nonsense'"),
    ],
)
def test_nothing_is_made_from_a_bad_body(api: Client, body: dict[str, Any], words: str) -> None:
    answer = post(api, "/api/runs", {**body, "launch": True})
    assert answer.status_code == 422
    assert words in answer.json()["detail"] + str(answer.json()["problems"])
    assert Run.objects.count() == 0
    assert Event.objects.count() == 0


def test_a_body_that_is_not_json_is_a_sentence(api: Client) -> None:
    answer = api.post("/api/runs", "{", content_type="application/json")
    assert answer.status_code == 400
    assert answer.json()["detail"]


def test_a_spec_is_validated_without_making_anything(api: Client) -> None:
    good = post(api, "/api/spec/validate", {"spec": {"name": "x"}}).json()
    assert good["valid"]
    assert RunSpec.from_yaml(good["yaml"]) == RunSpec(name="x")
    bad = post(api, "/api/spec/validate", {"yaml": "data: {source: 'reasoning_gym:nonsense'}"}).json()
    assert not bad["valid"]
    assert bad["problems"][0]["field"] == "data.source"
    schema = api.get("/api/spec/schema").json()
    assert schema["properties"]["name"]["title"] == "Name"
    assert Run.objects.count() == 0


def test_a_run_goes_its_way(api: Client, run: Run) -> None:
    path = f"/api/runs/{run.pk}"
    assert post(api, f"{path}/launch").json()["state"] == "queued"
    again = post(api, f"{path}/launch")
    assert again.status_code == 409
    assert again.json()["detail"] == "The run is queued, so it can't be launched."
    assert api.delete(path).status_code == 409
    assert post(api, f"{path}/archive").status_code == 409
    Run.objects.update(state=State.RUNNING)
    assert post(api, f"{path}/stop", {"save": True}).json()["desired"] == "stop_and_save"
    assert post(api, f"{path}/resume").status_code == 409
    Run.objects.update(state=State.STOPPED)
    assert post(api, f"{path}/stop").status_code == 409
    assert post(api, f"{path}/resume").json()["state"] == "queued"
    assert run.attempts.count() == 2
    assert post(api, f"{path}/stop").json()["state"] == "stopped"
    assert post(api, f"{path}/archive").json()["archived"] is True
    assert post(api, f"{path}/archive", {"archived": False}).json()["archived"] is False
    assert api.delete(path).status_code == 204
    assert api.get(path).status_code == 404


def test_a_resume_is_checked_as_a_launch_is(api: Client, make_run: Callable[..., Run]) -> None:
    run = make_run(State.STOPPED)
    Run.objects.update(spec=run.spec | {"data": {"source": "/nowhere/gone.jsonl"}})
    answer = post(api, f"/api/runs/{run.pk}/resume")
    assert answer.status_code == 422
    assert answer.json()["problems"] == [
        {"field": "data.source", "message": "There is no file /nowhere/gone.jsonl on this machine."}
    ]
    run.refresh_from_db()
    assert run.state == State.STOPPED


def test_a_checkpoint_of_another_run_is_not_resumed(api: Client, make_run: Callable[..., Run]) -> None:
    run = make_run(State.STOPPED)
    answer = post(api, f"/api/runs/{run.pk}/resume", {"checkpoint": 77})
    assert (answer.status_code, answer.json()["detail"]) == (404, "The run has no checkpoint 77.")


def test_a_clone_names_its_parent(bobs_api: Client, run: Run) -> None:
    clone = post(bobs_api, f"/api/runs/{run.pk}/clone").json()
    assert (clone["parent"], clone["owner"], clone["state"]) == (str(run.pk), "bob", "draft")
    assert clone["spec"] == run.spec
    changed = post(bobs_api, f"/api/runs/{run.pk}/clone", {"spec": {**run.spec, "name": "other"}}).json()
    assert changed["name"] == "other"


@pytest.mark.parametrize("action", ["launch", "stop", "resume", "archive"])
def test_others_may_look_but_not_steer(bobs_api: Client, run: Run, action: str) -> None:
    assert bobs_api.get(f"/api/runs/{run.pk}").status_code == 200
    answer = post(bobs_api, f"/api/runs/{run.pk}/{action}")
    assert answer.status_code == 403
    assert answer.json()["detail"] == "The run belongs to alice; only its owner or an admin may change it."
    assert bobs_api.delete(f"/api/runs/{run.pk}").status_code == 403


@pytest.mark.parametrize("path", ["", "/chart?metric=a", "/events", "/metrics", "/logs", "/checkpoints", "/rollouts"])
def test_an_unknown_run_is_404(api: Client, path: str) -> None:
    unknown = uuid.uuid4()
    answer = api.get(f"/api/runs/{unknown}{path}")
    assert (answer.status_code, answer.json()["detail"]) == (404, f"There is no run {unknown}.")


def test_the_list_is_filtered_sorted_and_paged(api: Client, make_run: Callable[..., Run]) -> None:
    for index in range(5):
        summary = {"reward": index / 10} if index != 2 else {"reward_kind": "nan"}
        make_run(State.RUNNING if index % 2 else State.COMPLETED, name=f"run {index}", summary=summary)
    page = api.get("/api/runs?sort=-reward&per_page=2").json()
    assert ([item["name"] for item in page["items"]], page["total"], page["pages"]) == (["run 4", "run 3"], 5, 3)
    assert [item["name"] for item in api.get("/api/runs?sort=reward").json()["items"]][-1] == "run 2"
    live = api.get("/api/runs?state=live&state=failed").json()
    assert {item["name"] for item in live["items"]} == {"run 1", "run 3"}
    assert live["states"] == {"running": 2, "completed": 3}
    answer = api.get("/api/runs?sort=nonsense")
    assert answer.status_code == 422
    assert "can't be sorted by" in answer.json()["detail"]


def test_hosts_say_who_holds_what(api: Client, attempt: Attempt) -> None:
    host = Host.objects.create(name="here", cpu_count=2)
    device = host.devices.create(uuid="GPU-here", kind="gpu", name="H200", temperature_c=61.0)
    told = api.get("/api/hosts").json()[0]
    assert (told["load"], told["devices"][0]["temperature_c"], told["devices"][0]["util"]) == (None, 61.0, None)
    assert told["devices"][0]["run"] is None
    attempt.leases.create(device=device, purpose="both")
    assert api.get("/api/hosts").json()[0]["devices"][0]["run"] == str(attempt.run_id)


def test_logs_are_read_in_pieces(api: Client, attempt: Attempt) -> None:
    attempt.folder.mkdir(parents=True)
    log = attempt.folder / "trainer.log"
    log.write_bytes(b"first\n\x1b[31mred\x1b[0m\nhalf")
    path = f"/api/runs/{attempt.run_id}/logs"
    assert api.get(path).json() == [{"attempt": 1, "name": "trainer.log", "size": log.stat().st_size}]
    piece = api.get(f"{path}/1/trainer.log").json()
    assert (piece["text"], piece["partial"]) == ("first\nred\n", "half")
    with open(log, "ab") as file:
        file.write(b" more\n")
    assert api.get(f"{path}/1/trainer.log?after={piece['end']}").json()["text"] == "half more\n"
    for name in ("..", "..%2f..%2fspec.yaml", "control", "other.log"):
        assert api.get(f"{path}/1/{name}").status_code == 404


def test_rollouts_come_by_id(api: Client, attempt: Attempt) -> None:
    for index in range(5):
        attempt.rollouts.create(
            run_id=attempt.run_id, step=index, group_id=f"g{index % 2}", row_index=index, reward=0.5,
            created_at=attempt.created_at, data={"completion": []},
        )  # fmt: skip
    path = f"/api/runs/{attempt.run_id}/rollouts"
    first = api.get(f"{path}?limit=2").json()
    assert [item["step"] for item in first] == [0, 1]
    assert [item["step"] for item in api.get(f"{path}?after={first[-1]['id']}").json()] == [2, 3, 4]
    assert [item["step"] for item in api.get(f"{path}?group=g1").json()] == [1, 3]
    assert [item["step"] for item in api.get(f"{path}?step=4").json()] == [4]
