"""Stored rollouts: a group side by side, the best first, searched, token by token, and always as text."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from tests.webapp import seed
from tests.webapp.rollouts import examples
from webapp.accounts.models import User
from webapp.rollouts.models import StoredRollout
from webapp.rollouts.text import messages, searchable
from webapp.runs.models import Run

pytestmark = pytest.mark.django_db


@pytest.fixture
def run(ada: User) -> Run:
    return seed.make_run(ada, steps=4)


def page_of(client: Client, run: Run, /, rest: str = "", **query: Any) -> str:
    answer = client.get(f"/runs/{run.pk}/rollouts/{rest}", query)
    assert answer.status_code == 200
    return answer.content.decode()


def change(rollout: StoredRollout | None, **data: Any) -> StoredRollout:
    assert rollout is not None
    rollout.data.update(data)
    rollout.text = searchable(rollout.data)
    rollout.save()
    return rollout


def test_the_newest_step_is_shown_first_and_others_by_choice(as_ada: Client, run: Run) -> None:
    page = page_of(as_ada, run)
    assert 'min="0" max="3" value="3"' in page
    assert page.count('data-testid="group"') == 2
    earlier = page_of(as_ada, run, step=1)
    assert "Row 2" in earlier
    assert "Row 3" in earlier
    assert ("step=0" in earlier, "step=2" in earlier) == (True, True)


@pytest.mark.parametrize("asked, shown", [("2", 1), ("99", 3), ("-5", 0), ("nonsense", 3), ("", 3), ("9" * 40, 3)])
def test_a_step_without_rollouts_gives_the_one_before_it(as_ada: Client, run: Run, asked: str, shown: int) -> None:
    StoredRollout.objects.filter(step=2).delete()
    assert f'max="3" value="{shown}"' in page_of(as_ada, run, step=asked)


def test_a_group_is_sorted_by_reward_with_unscored_rollouts_last(as_ada: Client, run: Run) -> None:
    group = StoredRollout.objects.filter(run=run, group_id="3-0").order_by("id")
    for rollout, reward in zip(group, [0.2, None, 0.9, 0.5, 0.1, 0.7, 0.3, 0.6], strict=True):
        StoredRollout.objects.filter(pk=rollout.pk).update(reward=reward)
    page = page_of(as_ada, run, step=3)
    first = page.split('data-testid="group"')[1]
    shown = re.findall(r'class="reward-value[^"]*">([^<]+)<', first)
    assert shown == ["0.900", "0.700", "0.600", "0.500", "0.300", "0.200", "0.100", "unscored"]


def test_what_a_model_wrote_is_text(as_ada: Client, run: Run) -> None:
    attack = "<img src=x onerror=alert(1)>"
    call = {"function": {"name": attack, "arguments": {attack: attack}}}
    said = [{"role": attack, "content": attack, "name": attack, "tool_calls": [call, attack, 3]}]
    rollout = change(StoredRollout.objects.filter(run=run, step=3).first(), completion=said, prompt=attack)
    for page in (page_of(as_ada, run), page_of(as_ada, run, f"{rollout.pk}/"), page_of(as_ada, run, search="onerror")):
        assert "<img src=x" not in page
        assert page.count("&lt;img src=x") >= 6


@pytest.mark.parametrize(
    "completion",
    [
        None, "plain text", [], ["just text"], [{"role": "assistant"}], [{"content": None}], [{"tool_calls": 3}], 7,
        [{"content": [{"type": "text", "text": "a"}, {"type": "image"}]}], [{"tool_calls": [{"function": None}]}],
    ],
)  # fmt: skip
def test_completions_of_any_shape_are_shown(as_ada: Client, run: Run, completion: Any) -> None:
    rollout = change(StoredRollout.objects.filter(run=run, step=3).first(), completion=completion)
    page_of(as_ada, run)
    page_of(as_ada, run, f"{rollout.pk}/")


def test_tool_calls_are_shown_as_such(as_ada: Client, run: Run) -> None:
    examples.add_conversation(run, 3)
    page = page_of(as_ada, run, step=3, page=1)
    assert 'data-testid="tool-call"' in page
    assert "get_weather" in page
    first = messages(examples.TOOL_TALK, "assistant")[0].calls[0]
    assert (first.name, first.arguments) == ("get_weather", '{\n  "city": "Kraków",\n  "unit": "C"\n}')
    as_text = {"tool_calls": [{"function": {"name": "f", "arguments": '{"a":1}'}}, {"name": "g", "arguments": "a="}]}
    assert [(call.name, call.arguments) for call in messages([as_text], "assistant")[0].calls] == [
        ("f", '{\n  "a": 1\n}'), ("g", "a="),
    ]  # fmt: skip


def test_a_huge_text_is_cut_in_the_list_and_folded_on_its_page(as_ada: Client, run: Run) -> None:
    examples.add_conversation(run, 3, long=400_000)
    page = page_of(as_ada, run, step=3)
    assert len(page) < 100_000
    assert "397.0k more characters" in page
    rollout = StoredRollout.objects.get(rollout_id="talk-0")
    whole = page_of(as_ada, run, f"{rollout.pk}/")
    assert whole.count("Let me think about it again.") > 400_000 // 30
    assert '<details class="message">' in whole


def test_search_finds_what_was_said_in_all_steps(as_ada: Client, run: Run) -> None:
    change(
        StoredRollout.objects.filter(run=run, step=1).first(),
        completion=[{"role": "assistant", "content": "A rare Wörd"}],
    )
    for words in ("rare", "wörd", "RARE", "WÖRD", "word rare".replace("word", "wörd"), '"rare wörd"'):
        page = page_of(as_ada, run, search=words)
        assert page.count('data-testid="group"') == 1, words
        assert page.count('class="rollout found"') == 1
        assert "A rare Wörd" in page
    for words in ("nobody said this", '"wörd rare"', "rare absent"):
        assert "Nothing matches" in page_of(as_ada, run, search=words)


def test_search_finds_tool_calls_and_percent_signs_as_they_are(as_ada: Client, run: Run) -> None:
    examples.add_conversation(run, 2)
    assert page_of(as_ada, run, search="get_weather kraków").count('data-testid="group"') == 1
    assert "Nothing matches" in page_of(as_ada, run, search="get%weather")


def test_search_by_steps_and_reward(as_ada: Client, run: Run) -> None:
    StoredRollout.objects.filter(run=run).update(reward=0.5)
    for step, reward in ((0, 0.1), (1, 0.9), (3, 0.95)):
        rollout = StoredRollout.objects.filter(run=run, step=step).first()
        assert rollout is not None
        StoredRollout.objects.filter(pk=rollout.pk).update(reward=reward)

    def steps(**query: Any) -> list[str]:
        return re.findall(r'class="tag" href="[^"]*\?step=\d+">step (\d+)<', page_of(as_ada, run, **query))

    assert steps(min_reward="0.9") == ["3", "1"]
    assert steps(max_reward="0.2") == ["0"]
    assert steps(min_reward="0.9", to_step="2") == ["1"]
    assert steps(from_step="2", to_step="2") == ["2", "2"]
    assert steps(from_step="3", max_reward="0.94", min_reward="0.6") == []


def test_a_limit_that_is_none_is_said_and_left_out(as_ada: Client, run: Run) -> None:
    page = page_of(as_ada, run, from_step="soon", max_reward="much")
    assert "is no step; a whole number is needed" in page
    assert "is no reward; a number such as 0.5 is needed" in page
    assert page.count('data-testid="group"') == 2


def test_a_rollout_has_a_page_of_its_own_with_all_that_is_known(as_ada: Client, run: Run) -> None:
    examples.add_tokens(run, 3)
    rollout = StoredRollout.objects.filter(run=run, step=3).first()
    assert rollout is not None
    page = page_of(as_ada, run, f"{rollout.pk}/")
    assert "step 5, staleness 1" in page
    assert page.count(f"/rollouts/{rollout.pk}/") >= 2
    assert "last_number_match" in page
    assert as_ada.get(f"/runs/{run.pk}/rollouts/{rollout.pk + 999}/").status_code == 404


def test_a_rollout_of_which_little_is_known_has_a_page(as_ada: Client, run: Run) -> None:
    rollout = StoredRollout.objects.filter(run=run, step=3).first()
    assert rollout is not None
    for data in ({}, {"rewards": {}}, {"rewards": None, "duration_s": "long", "tokens": "many", "advantage": None}):
        StoredRollout.objects.filter(pk=rollout.pk).update(data=data)
        page_of(as_ada, run, f"{rollout.pk}/")
        page_of(as_ada, run, step=3)


def test_tokens_come_by_rollout_and_only_with_their_run(as_ada: Client, ada: User, run: Run) -> None:
    examples.add_tokens(run, 3)
    found = as_ada.get(f"/runs/{run.pk}/rollouts/tokens/", {"group": "3-1"}).json()["rollouts"]
    assert len(found) == 8
    for pk, sequences in found.items():
        (tokens,) = sequences
        said = StoredRollout.objects.get(pk=int(pk)).data["completion"][0]["content"]
        assert "".join(tokens["text"]) == f"{said}<|im_end|>\nuser"
    without = as_ada.get(f"/runs/{run.pk}/rollouts/tokens/", {"group": "0-0"}).json()["rollouts"]
    assert set(map(tuple, without.values())) == {()}
    other = seed.make_run(ada, state="starting", steps=0)
    assert as_ada.get(f"/runs/{other.pk}/rollouts/tokens/", {"group": "3-1"}).status_code == 404


def test_old_and_new_answers_to_a_prompt_stand_side_by_side(as_ada: Client, run: Run) -> None:
    assert "No prompt has come up twice" in page_of(as_ada, run, "prompts/")
    examples.add_conversation(run, 0, "early", row_index=77)
    examples.add_conversation(run, 3, "late", row_index=77)
    StoredRollout.objects.filter(group_id="late").update(reward=1.0)
    listed = page_of(as_ada, run, "prompts/")
    assert re.findall(r"Row (\d+)<", listed) == ["77"]
    assert "+0.500" in listed
    assert "Old against new" in page_of(as_ada, run, step=3)
    page = page_of(as_ada, run, "prompts/", row=77)
    sides = page.split('data-testid="side"')[1:]
    assert ["Step 0" in sides[0], "Step 3" in sides[1], len(sides)] == [True, True, 2]
    assert page_of(as_ada, run, "prompts/", row=77, old=3, new=0).split('data-testid="side"')[1].count("Step 3") == 1
    assert as_ada.get(f"/runs/{run.pk}/rollouts/prompts/", {"row": 12345}).status_code == 404


def test_rollouts_of_other_runs_stay_there(as_ada: Client, ada: User, run: Run) -> None:
    other = seed.make_run(ada, state="starting", steps=0)
    assert "No rollouts yet" in page_of(as_ada, other)
    rollout = StoredRollout.objects.filter(run=run).first()
    assert rollout is not None
    assert as_ada.get(f"/runs/{other.pk}/rollouts/{rollout.pk}/").status_code == 404
    for rest in ("", "prompts/", "tokens/?group=3-1", f"{rollout.pk}/"):
        assert Client().get(f"/runs/{run.pk}/rollouts/{rest}").headers["Location"].startswith("/login/")


def test_tens_of_thousands_of_rollouts_stay_fast(as_ada: Client, run: Run, django_assert_max_num_queries: Any) -> None:
    attempt = examples.newest_attempt(run)
    said = {"prompt": [{"role": "user", "content": "What is 3 * 4?"}], "completion": "so " * 300, "tokens": 300}
    text = searchable(said)
    StoredRollout.objects.bulk_create(
        [
            StoredRollout(
                run=run, attempt=attempt, step=10 + index // 64, group_id=f"many-{index // 8}", row_index=index // 8 % 500,
                reward=index % 8 / 8, created_at=timezone.now(), rollout_id=f"many-{index}", data=said, text=text,
            )
            for index in range(20_000)
        ],
        batch_size=500,
    )  # fmt: skip
    for rest, query in (("", {}), ("", {"search": "absent"}), ("", {"min_reward": "0.8"}), ("prompts/", {})):
        page_of(as_ada, run, rest, **query)  # what is loaded once
        took = []
        for _ in range(3):  # other processes on the same core make single readings longer
            begun = time.process_time()
            with django_assert_max_num_queries(20):
                page_of(as_ada, run, rest, **query)
            took.append(time.process_time() - begun)
        assert min(took) < 0.6, (rest, query)
