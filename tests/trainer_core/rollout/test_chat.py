"""Turn after turn through real templates: what was sampled stays, prompts say the same as the template, work stays small."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer_core.rollout import chat_templates
from trainer_core.rollout.chat import Chat
from trainer_core.rollout.conversation import reconcile, training_arrays
from trainer_core.rollout.tools import assistant_message
from trainer_core.rollout.types import Message, TurnRecord


def weigh(name: str, grams: int) -> str:
    """Weighs.

    Args:
        name: What.
        grams: How much.
    """
    return name * grams


TOOLS = {"weigh": weigh}
TEMPLATES = {
    "hermes": chat_templates.byte_tokenizer(chat_templates.HERMES),
    "qwen3": chat_templates.byte_tokenizer(chat_templates.QWEN3),
    "drops thinking": chat_templates.byte_tokenizer(chat_templates.DROPS_THINKING),
    "never thinking": chat_templates.byte_tokenizer(chat_templates.NEVER_THINKING),
    "empty thought": chat_templates.byte_tokenizer(chat_templates.EMPTY_THOUGHT),
    "llama3": chat_templates.byte_tokenizer(chat_templates.LLAMA3),
    "smollm2": chat_templates.smollm2(),
    **chat_templates.published(),
}
KNOWN = [name for name, tokenizer in TEMPLATES.items() if tokenizer is not None]
REWRITES = {"drops thinking", "never thinking", "published deepseek_r1_distill"}
"""Templates that drop the thinking of earlier answers; all others only add to what they wrote."""
INVITATIONS = {
    **{name: "<|start_header_id|>assistant<|end_header_id|>\n\n" for name in KNOWN if "llama" in name},
    "published qwen3_5_think": "<|im_start|>assistant\n<think>\n",
    "published deepseek_r1_distill": "",  # it goes on behind the results of tools
}


class Talk:
    """Plays the loop: `say` is a turn of the model, `answers` are what tools say to it."""

    def __init__(self, tokenizer: Any, question: str, **kwargs: Any) -> None:
        self.tokenizer = tokenizer
        self.chat = Chat(tokenizer, kwargs)
        self.messages: list[Message] = [{"role": "user", "content": question}]
        self.prompt = self.chat.first_prompt(self.messages, TOOLS)
        self.turns: list[TurnRecord] = []

    def say(self, ids: list[int], answers: list[str]) -> None:
        """One turn of these tokens, and the messages that follow it."""
        log_probs = [-len(self.turns) - 0.001 * position for position in range(len(ids))]
        turn = TurnRecord(self.prompt, ids, log_probs)
        self.turns.append(turn)
        text, calls = self.chat.read(ids, TOOLS)
        answer = assistant_message(text, calls)
        results: list[Message] = [{"role": "tool", "name": "weigh", "content": answer} for answer in answers]
        self.messages += [answer, *results]
        self.prompt = self.chat.next_prompt(turn, answer, results, self.messages, TOOLS)

    def rendered(self) -> str:
        """The whole conversation as the template writes it."""
        return self.tokenizer.apply_chat_template(
            self.messages, tools=list(TOOLS.values()), add_generation_prompt=True, tokenize=False
        )


def call_text(name: str, thought: str, arguments: dict[str, Any]) -> str:
    """What the template writes for a call after a thought, so that writing it again gives the same."""
    if "<|eot_id|>" in TEMPLATES[name].all_special_tokens:
        return json.dumps({"name": "weigh", "parameters": arguments})
    body = json.dumps({"name": "weigh", "arguments": arguments})
    return f"<think>\n{thought}\n</think>\n\nI weigh.\n<tool_call>\n{body}\n</tool_call>"


@pytest.mark.parametrize("name", KNOWN)
def test_which_templates_are_appended_to(name: str) -> None:
    assert Chat(TEMPLATES[name]).appends(TOOLS) == (name not in REWRITES)
    assert Chat(TEMPLATES[name]).appends({}) == (name not in REWRITES)


@pytest.mark.parametrize("name", ["hermes", "qwen3", "drops thinking", "never thinking", "llama3"])
def test_prompts_say_what_the_template_says(name: str) -> None:
    """Answers written as the template writes them: appended or not, the next prompt is the template's, token for token."""
    tokenizer = TEMPLATES[name]
    talk = Talk(tokenizer, "How heavy?")
    for turn in range(4):
        text = call_text(name, f"thought {turn}", {"name": "x" * turn, "grams": turn})
        talk.say([*tokenizer.encode(text), tokenizer.eos_token_id], [f"result {turn}"] * (1 + turn % 2))
        assert tokenizer.decode(talk.prompt) == talk.rendered()
        assert talk.prompt == tokenizer.encode(talk.rendered(), add_special_tokens=False)
    assert json.loads(json.dumps(talk.messages))[1]["tool_calls"][0]["function"]["name"] == "weigh"


@pytest.mark.parametrize("name", ["hermes", "published qwen2_5", "published qwen3", "llama3", "published llama3_1",
                                  "published llama3_2"])  # fmt: skip
@pytest.mark.parametrize("end", ["its own", "another"])
def test_several_calls_in_a_turn_are_answered_in_order(name: str, end: str) -> None:
    """Also where the template refuses an answer with more than one call, and where nothing can be appended to it."""
    tokenizer = TEMPLATES[name]
    talk = Talk(tokenizer, "How heavy?")
    for turn in range(2):
        said = [call_text(name, "", {"name": f"n{turn}{call}", "grams": call}).split("\n\n")[-1] for call in range(3)]
        stop = tokenizer.eos_token if end == "its own" else "<|endoftext|>"
        text = ("; " if "llama" in name else "\n").join(said)
        talk.say([*tokenizer.encode(text, add_special_tokens=False), tokenizer.convert_tokens_to_ids(stop)],
                 [f"result {turn}{call}" for call in range(3)])  # fmt: skip
        assert len(talk.messages[-4]["tool_calls"]) == 3
    prompt = tokenizer.decode(talk.prompt)
    places = [prompt.index(f"result {turn}{call}") for turn in range(2) for call in range(3)]
    assert places == sorted(places)
    assert all(prompt.count(f"n{turn}{call}") == 1 for turn in range(2) for call in range(3))
    transitions = [drift.transition for drift in reconcile(talk.turns, 0).drifts]
    assert transitions == (["clean"] if end == "its own" else ["fork"])


@pytest.mark.parametrize("name", KNOWN)
def test_which_templates_tell_the_model_of_its_tools(name: str) -> None:
    assert Chat(TEMPLATES[name]).shows(TOOLS) == (
        name not in ("smollm2", "published llama3", "published deepseek_r1_distill")
    )
    assert Chat(TEMPLATES[name]).shows({})


any_text = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12)


@pytest.mark.parametrize("name", KNOWN)
@settings(max_examples=15, deadline=None)
@given(
    any_text,
    st.lists(st.tuples(st.integers(0, 2**32), st.booleans(), st.lists(any_text, max_size=2)), min_size=1, max_size=4),
    st.sampled_from([0, 8, 1024]),
)
def test_sampled_ids_survive_any_conversation(
    name: str, question: str, shapes: list[tuple[int, bool, list[str]]], threshold: int
) -> None:
    """The model says any tokens, in no tokenizer's order, sometimes around a call; the tools answer any text."""
    tokenizer = TEMPLATES[name]
    specials = set(tokenizer.all_special_ids)
    talk = Talk(tokenizer, question)
    for seed, calls, answers in shapes:
        rng = random.Random(seed)
        ids = [
            token
            for token in rng.choices(range(min(len(tokenizer), 5000)), k=rng.randint(0, 9))
            if token not in specials
        ]
        if calls:
            ids += tokenizer.encode(call_text(name, "", {"name": "x", "grams": 1}), add_special_tokens=False)
        talk.say([*ids, tokenizer.eos_token_id], answers)
    assert tokenizer.decode(talk.prompt).endswith(INVITATIONS.get(name, "<|im_start|>assistant\n"))
    for _, _, answers in shapes:
        for answer in answers:
            if name != "smollm2" and not name.startswith(("published llama", "published deepseek")):
                assert answer.strip() in tokenizer.decode(talk.prompt)
    result = reconcile(talk.turns, threshold)
    if talk.chat.appends(TOOLS):
        assert [drift.transition for drift in result.drifts] == ["clean"] * (len(shapes) - 1)
        (sequence,) = result.sequences
        mask = training_arrays(sequence, talk.turns).completion_mask
        assert mask.sum() == sum(len(turn.output_ids) for turn in talk.turns)
    trained = 0
    for sequence in result.sequences:
        arrays = training_arrays(sequence, talk.turns)
        for position in np.flatnonzero(arrays.completion_mask):
            source = sequence.sources[position]
            assert source is not None
            turn, offset = talk.turns[source[0]], source[1]
            assert sequence.ids[: position + 1] == turn.prompt_ids + turn.output_ids[: offset + 1]
            assert arrays.log_probs[position] == pytest.approx(turn.output_log_probs[offset])
            trained += 1
    lost = sum(len(turn.output_ids) for turn in talk.turns) - trained
    realigned = sum(drift.transition == "realign" for drift in result.drifts)
    assert lost <= max(0, threshold - 1) * realigned


@pytest.mark.parametrize("name", [name for name in KNOWN if name in ("empty thought", "published qwen3")])
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}])
def test_answers_without_a_thought_stay_as_they_were_sampled(name: str, options: dict[str, Any]) -> None:
    """The template writes an empty thought into the last answer and leaves it out of earlier ones."""
    tokenizer = TEMPLATES[name]
    talk = Talk(tokenizer, "How heavy?", **options)
    assert talk.chat.appends(TOOLS)
    for turn in range(3):
        text = (
            call_text(name, "", {"name": "x" * turn, "grams": turn}).partition("</think>\n\n")[2]
            if turn < 2
            else "Done x"
        )
        talk.say([*tokenizer.encode(text), tokenizer.eos_token_id], [f"result {turn}"])
    result = reconcile(talk.turns, 0)
    assert [drift.transition for drift in result.drifts] == ["clean"] * 2
    assert len(result.sequences) == 1
    for turn, answer in zip(talk.turns[1:], ("result 0", "result 1"), strict=True):
        end = "assistant\n<think>\n\n</think>\n\n" if options else "assistant\n"
        added = f"<tool_response>\n{answer}\n</tool_response><|im_end|>\n<|im_start|>{end}"
        assert tokenizer.decode(turn.prompt_ids).endswith(added)


@pytest.mark.parametrize("threshold, kind", [(0, "fork"), (1024, "realign")])
def test_dropped_thinking_forks_or_realigns(threshold: int, kind: str) -> None:
    tokenizer = TEMPLATES["drops thinking"]
    talk = Talk(tokenizer, "How heavy?")
    for turn in range(3):
        text = call_text("drops thinking", f"thought {turn}", {"name": "x", "grams": turn})
        talk.say([*tokenizer.encode(text), tokenizer.eos_token_id], ["1"])
    assert "thought" not in tokenizer.decode(talk.prompt)
    result = reconcile(talk.turns, threshold)
    assert [drift.transition for drift in result.drifts] == [kind] * 2
    assert len(result.sequences) == (3 if kind == "fork" else 1)


@pytest.mark.parametrize("name", [name for name in KNOWN if name not in REWRITES])
def test_the_work_of_a_turn_is_that_of_its_new_messages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TEMPLATES[name]
    talk = Talk(tokenizer, "x" * 3000)
    encoded: list[int] = []
    encode, render = talk.chat._encode, talk.chat._render
    monkeypatch.setattr(talk.chat, "_encode", lambda text: encoded.append(len(text)) or encode(text))
    rendered: list[int] = []

    def count(messages: list[Message], *args: Any, **kwargs: Any) -> str:
        text = render(messages, *args, **kwargs)
        rendered.append(len(text))
        return text

    monkeypatch.setattr(talk.chat, "_render", count)
    ids = [*tokenizer.encode(call_text(name, "t", {"name": "x", "grams": 1})), tokenizer.eos_token_id]
    work = []
    for _ in range(30):
        encoded.clear()
        rendered.clear()
        talk.say(ids, ["result"])
        work.append((sum(encoded), sum(rendered)))
    assert work[1:] == [work[1]] * 29, "a turn costs more the longer the conversation is"
    assert work[1][0] < 200


def test_a_token_that_the_template_does_not_end_with_makes_it_tokenise_again() -> None:
    """An answer that stopped at another token than the template's: nothing can be appended after it."""
    tokenizer = TEMPLATES["hermes"]
    talk = Talk(tokenizer, "q")
    talk.say([*tokenizer.encode("word"), tokenizer.convert_tokens_to_ids("<|endoftext|>")], ["1"])
    assert tokenizer.decode(talk.prompt) == talk.rendered()
    assert "<|endoftext|>" not in talk.rendered()
