"""Chat templates on the byte tokenizer: published ones, and some written for tests, each with a habit of a family."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from tests.tiny_model import tiny_tokenizer

_TOOLS = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>\n"
    "Call with <tool_call> tags.<|im_end|>\n{% endif %}"
)
_CALLS = (
    "{% for call in message.tool_calls or [] %}{% if not loop.first or content %}{{ '\\n' }}{% endif %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
_RESULTS = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}\n<tool_response>\n"
    "{{ message.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
_GENERATE = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def _chatml(content: str) -> str:
    return (
        f"{_TOOLS}{{% for message in messages %}}{{% if message.role == 'tool' %}}{_RESULTS}{{% else %}}"
        f"{content}<|im_start|>{{{{ message.role }}}}\n{{{{ content }}}}{_CALLS}<|im_end|>\n"
        f"{{% endif %}}{{% endfor %}}{_GENERATE}"
    )


HERMES = _chatml("{% set content = message.content %}")

# Thinking stays while tools are being used, and is dropped once a later question has been asked.
QWEN3 = _chatml(
    "{% set asked = messages | selectattr('role', 'equalto', 'user') | list | length %}{% set content = message.content %}"
    "{% if message.role == 'assistant' and '</think>' in content and messages[loop.index0 + 1:] | "
    "selectattr('role', 'equalto', 'user') | list %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
)

# Thinking is dropped from every answer but the last message.
DROPS_THINKING = _chatml(
    "{% set content = message.content %}{% if message.role == 'assistant' and not loop.last %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
)

# Thinking is dropped from every answer, even the last message.
NEVER_THINKING = DROPS_THINKING.replace(" and not loop.last", "")

# The last answer always has a thought, an empty one if need be; earlier ones only where they thought. Thinking can be turned
# off by an empty thought that the model goes on from.
EMPTY_THOUGHT = _chatml(
    "{% set parts = message.content.split('</think>') %}{% set content = parts[-1].lstrip('\\n') %}"
    "{% if message.role == 'assistant' %}"
    "{% set thought = parts[0].split('<think>')[-1].strip('\\n') if parts | length > 1 else '' %}"
    "{% if loop.last or thought %}{% set content = '<think>\\n' ~ thought ~ '\\n</think>\\n\\n' ~ content %}{% endif %}"
    "{% endif %}"
).replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
)

# A call is the whole answer and ends in another token than other answers do.
LLAMA3 = (
    "<|begin_of_text|>{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n"
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|eot_id|>{% endif %}"
    "{% for message in messages %}{% if message.tool_calls %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{% for call in message.tool_calls %}{{ "; " if not loop.first }}{"name": "{{ call.function.name }}", '
    '"parameters": {{ call.function.arguments | tojson }}}{% endfor %}<|eot_id|>'
    "{% elif message.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ message.content }}<|eot_id|>"
    "{% else %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n{{ message.content | trim }}<|eot_id|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# Tokens that the byte tokenizer lacks, by one that a template holds: the beginning and end of a text come first.
_TOKENS = {
    "<|start_header_id|>": ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
    "<｜Assistant｜>": ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"],
}
PUBLISHED = ("qwen2_5", "qwen3", "qwen3_5_think", "llama3", "llama3_1", "llama3_2", "deepseek_r1_distill")
"""Those that published models came with. TRL keeps copies, with the model and commit of each in a README beside them."""


def byte_tokenizer(template: str) -> Any:
    """The byte tokenizer of the tiny models with another chat template, and the tokens it needs."""
    tokenizer = tiny_tokenizer()
    for marker, tokens in _TOKENS.items():
        if marker in template:
            tokenizer.add_special_tokens({"additional_special_tokens": tokens})
            tokenizer.bos_token, tokenizer.eos_token = tokens[:2]
    tokenizer.chat_template = template
    return tokenizer


def published() -> dict[str, Any]:
    """The templates of PUBLISHED, read from the package trl, which is not imported."""
    package = find_spec("trl")
    assert package is not None, "trl is not installed; it is in the test extra"
    assert package.submodule_search_locations is not None
    folder = Path(package.submodule_search_locations[0]) / "chat_templates"
    # As the loader of transformers reads a template from a file: without the line end behind the last tag.
    return {
        f"published {name}": byte_tokenizer((folder / f"{name}.jinja").read_text().removesuffix("\n"))
        for name in PUBLISHED
    }


def smollm2() -> Any | None:
    """SmolLM2's own tokenizer and template, where `make run` has put the model."""
    folder = Path(__file__).resolve().parents[3] / "var" / "models" / "smollm2-135m-instruct"
    return AutoTokenizer.from_pretrained(folder) if folder.is_dir() else None
