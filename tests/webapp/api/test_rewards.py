"""Reward functions through the API: stored, versioned, and run in the real sandbox."""

from __future__ import annotations

from typing import Any

from django.test import Client

from webapp.rewards.models import RewardFunction

SOURCE = """def length(completions, answer, **columns):
    return [len(completion[0]["content"]) + a for completion, a in zip(completions, answer)]
"""


def post(client: Client, path: str, body: Any) -> Any:
    return client.post(path, body, content_type="application/json")


def test_a_function_is_stored_and_versioned(api: Client, bobs_api: Client) -> None:
    answer = post(api, "/api/rewards", {"source": SOURCE, "description": "How long it is."})
    assert answer.status_code == 201, answer.content
    assert (answer.json()["name"], answer.json()["versions"]) == ("length", [1])
    assert post(bobs_api, "/api/rewards/length/versions", {"source": SOURCE + "#\n"}).status_code == 403
    version = post(api, "/api/rewards/length/versions", {"source": SOURCE + "# 2\n", "note": "n"})
    assert (version.status_code, version.json()["number"]) == (201, 2)
    assert api.get("/api/rewards/length/versions/1").json()["source"] == SOURCE
    names = {item["name"]: item for item in api.get("/api/rewards").json()}
    assert names["length"]["versions"] == [1, 2]
    assert names["last_number_match"]["builtin"]
    assert api.get("/api/rewards/length/versions/9").status_code == 404
    assert api.get("/api/rewards/nobody").status_code == 404


def test_a_syntax_error_has_its_line(api: Client) -> None:
    answer = post(api, "/api/rewards", {"source": "def f(completions):\n    return [\n"})
    assert answer.status_code == 422
    assert answer.json()["problems"][0]["field"].startswith("line ")
    assert RewardFunction.objects.count() == 0


def test_a_source_runs_in_the_sandbox(api: Client) -> None:
    body = {"source": SOURCE, "completions": ["ab", "abc"], "columns": {"answer": 1}}
    answer = post(api, "/api/rewards/test", body).json()
    assert answer["values"] == [[3.0, 4.0]]
    assert answer["error"] is None
    assert answer["level"]
    failing = post(api, "/api/rewards/test", {**body, "source": SOURCE.replace("len(", "lenn(")}).json()
    assert failing["error"]["type"] == "NameError"
    assert failing["error"]["line"] == 2
    assert post(api, "/api/rewards/test", {"source": SOURCE}).status_code == 422
