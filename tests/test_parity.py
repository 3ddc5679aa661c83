"""Trainer and server must mean the same probabilities, or every importance ratio is wrong from the first step on."""

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.server

PROMPTS = ("What is 3 * 4?", "Say hello to the world.", "1 2 3 4 5 6 7")


def sample(server, prompt_ids, seed, temperature):
    """(sampled token ids, their log-probabilities, [{token: log-probability} of the most likely ones])."""
    request = {
        "model": "policy",
        "prompt": prompt_ids,
        "max_tokens": 24,
        "temperature": temperature,
        "seed": seed,
        "logprobs": 8,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    response = httpx.post(f"{server.url}/v1/completions", json=request, timeout=60)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    top = [
        {int(token.removeprefix("token_id:")): value for token, value in position.items()}
        for position in choice["logprobs"]["top_logprobs"]
    ]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"], top


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_of_sampled_tokens_are_those_of_the_model_in_fp32(tiny_server, temperature):
    model = AutoModelForCausalLM.from_pretrained(tiny_server.model_path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_server.model_path)
    worst = 0.0
    compared = 0
    for seed, prompt in enumerate(PROMPTS):
        chat = [{"role": "user", "content": prompt}]
        prompt_ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True)["input_ids"]
        output_ids, log_probs, top = sample(tiny_server, prompt_ids, seed, temperature)
        with torch.no_grad():
            logits = model(torch.tensor([prompt_ids + output_ids])).logits[0, len(prompt_ids) - 1 : -1]
        expected = torch.log_softmax(logits.double() / temperature, dim=-1)
        for position, token in enumerate(output_ids):
            assert top[position][token] == log_probs[position]
            for candidate, value in top[position].items():
                worst = max(worst, abs(value - expected[position, candidate].item()))
                compared += 1
            best = set(expected[position].topk(8).indices.tolist())
            assert best <= top[position].keys()
    assert compared > 100
    assert worst < 1e-3
