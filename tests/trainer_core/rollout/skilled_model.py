"""A tiny model that uses tools: it calls a calculator and plays a guessing game, with mistakes of every kind.

A model with random weights never calls a tool, so this one is taught, in less than a minute, from conversations that are made
up here. It is taught mistakes as well (tools that do not exist, JSON that is none, arguments that make the tool raise, several
calls at once), so that at temperature 1 a run meets all of them. Cached under var/test-models like the other tiny models.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests import tiny_model
from tests.trainer_core.rollout import chat_templates
from trainer_core.rollout.chat import Chat
from trainer_core.rollout.tools import assistant_message
from trainer_core.rollout.types import Message

TEMPLATE = chat_templates.HERMES.replace("{{ tool | tojson }}", "{{ tool.function.name }}")
SUM = "State the final answer to the following arithmetic problem: "
GAME = "Find my number from 0 to 9."
# Frequent pieces are tokens of their own, as they are in real tokenizers; it makes the conversations six times shorter.
PIECES = (
    "system\n<tools>", "</tools>\nCall with <tool_call> tags.", "user\n", "assistant\n", "user<tool_response>\n",
    "\n</tool_response>", "<tool_response>\n", '<tool_call>\n{"name": "', '", "arguments": {"', '"}}\n</tool_call>',
    "}}\n</tool_call>", "calculator", "computer", "guess", 'expression": "', 'number": ', SUM, GAME, "higher", "lower", "found",
    "done", "Error: ", "there is no tool", "SyntaxError: invalid syntax", "the call is not a JSON object",
)  # fmt: skip
STEPS, BATCH, TALKS, LEARNING_RATE = 220, 32, 600, 4e-3


def calculator(expression: str) -> str:
    """Works out a sum.

    Args:
        expression: Such as 1 + 2.
    """
    return str(eval(expression, {}, {}))


def guess(number: int) -> str:
    """Guesses the number.

    Args:
        number: From 0 to 9.
    """
    raise NotImplementedError("the game's environment has it")


def tokenizer() -> Any:
    made = chat_templates.byte_tokenizer(TEMPLATE)
    made.add_tokens(list(PIECES))
    return made


def skilled_model() -> Path:
    """Folder of the taught model."""
    recipe = Path(__file__).read_bytes() + Path(tiny_model.__file__).read_bytes() + TEMPLATE.encode()
    folder = tiny_model.CACHE / f"skilled-qwen3-{hashlib.sha256(recipe).hexdigest()[:8]}"
    if folder.exists():
        return folder
    tiny_model.CACHE.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=".skilled-", dir=tiny_model.CACHE))
    made = tokenizer()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(**tiny_model._sizes(made), tie_word_embeddings=False))
        model.config.initializer_range = 0.02
        _teach(model, made)
    model.save_pretrained(building)
    made.save_pretrained(building)
    try:
        os.rename(building, folder)
    except OSError:  # another test process was first; its folder is as good
        shutil.rmtree(building)
        if not folder.exists():
            raise
    return folder


def _teach(model: Any, made: Any) -> None:
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS, pct_start=0.1)
    teacher, rng = Teacher(made), random.Random(1)
    talks = [teacher.sums() if index % 3 else teacher.game() for index in range(TALKS)]
    for _ in range(STEPS):
        ids, taught = _batch(rng.sample(talks, BATCH), made.pad_token_id)
        logits = model(input_ids=ids).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        loss = (losses * taught[:, 1:].flatten()).sum() / taught[:, 1:].sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def _batch(talks: list[tuple[list[int], list[float]]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(len(ids) for ids, _ in talks)
    ids = torch.tensor([ids + [pad] * (length - len(ids)) for ids, _ in talks])
    taught = torch.tensor([mask + [0.0] * (length - len(mask)) for _, mask in talks])
    return ids, taught


class Teacher:
    """Makes up conversations: token ids, and 1 where the model is to learn to say the token."""

    def __init__(self, made: Any) -> None:
        self._tokenizer = made
        self._chat = Chat(made)
        self._rng = random.Random(0)

    def sums(self) -> tuple[list[int], list[float]]:
        rng = self._rng
        expression = f"{rng.randint(1, 9)} {rng.choice('+-')} {rng.randint(1, 9)}"
        right = calculator(expression)
        said: list[tuple[str, list[str]]] = []
        while len(said) < 3:
            kind = rng.random()
            if kind < 0.6:
                said += [(_call("calculator", f'expression": "{expression}"'), [right]), (right, [])]
            elif kind < 0.7:
                call = _call("calculator", f'expression": "{expression}"')
                said += [(f"{call}\n{call}", [right, right]), (right, [])]
            elif kind < 0.78:
                said.append((_call("computer", f'expression": "{expression}"'), ["Error: there is no tool 'computer'"]))
            elif kind < 0.86:
                said.append(('<tool_call>\n{"name": "}}\n</tool_call>', ["Error: the call is not a JSON object"]))
            elif kind < 0.92:
                wrong = _call("calculator", f'expression": "{expression[:-1]}"')
                said.append((wrong, ["Error: SyntaxError: invalid syntax"]))
            else:
                said.append((str(rng.randint(0, 9)), []))
            if not said[-1][1]:
                break
        return self._conversation(f"{SUM}{expression} =", {"calculator": calculator}, said)

    def game(self) -> tuple[list[int], list[float]]:
        rng = self._rng
        number = rng.randint(0, 9)
        said: list[tuple[str, list[str]]] = []
        answer = ""
        while answer != "found" and len(said) < 4 and (not said or rng.random() < 0.85):
            tried = rng.randint(0, 9)
            answer = "found" if tried == number else "higher" if number > tried else "lower"
            said.append((_call("guess", f'number": {tried}'), [answer]))
        return self._conversation(GAME, {"guess": guess}, [*said, ("done", [])])

    def _conversation(
        self, question: str, tools: dict[str, Any], said: list[tuple[str, list[str]]]
    ) -> tuple[list[int], list[float]]:
        end = self._tokenizer.eos_token_id
        messages: list[Message] = [{"role": "user", "content": question}]
        ids = self._chat.first_prompt(messages, tools)
        mask = [0.0] * len(ids)
        for index, (text, answers) in enumerate(said):
            spoken = [*self._tokenizer.encode(text), end]
            ids, mask = ids + spoken, mask + [1.0] * len(spoken)
            if index + 1 < len(said):
                results: list[Message] = [{"role": "tool", "name": "f", "content": answer} for answer in answers]
                added = self._chat._added(assistant_message(text, []), results, "<|im_end|>", tools)
                assert added is not None
                more = self._tokenizer.encode(added)
                ids, mask = ids + more, mask + [0.0] * len(more)
        return ids, mask


def _call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"{arguments}}}}}\n</tool_call>'
