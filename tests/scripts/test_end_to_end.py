"""What a person does, on real parts only: studio, worker, supervisor, vLLM server, trainer, and a real browser."""

from __future__ import annotations

import time
import zipfile
from pathlib import Path

import httpx
import pytest
import torch
from peft import PeftModel
from playwright.sync_api import Browser, Page, expect
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.scripts.conftest import RunningStudio

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.browser, pytest.mark.timeout(1500)]

REWARD = """
def early_letters(completions, **columns):
    texts = [completion[-1]["content"] for completion in completions]
    return [sum(letter in "abcdefghijklm" for letter in text) / (len(text) or 1) for text in texts]
"""
LOADED_S, START_S, STEP_S = 30_000, 420_000, 240_000
"""Milliseconds a page, a start of server and trainer, and some steps may take on a busy machine."""

NEW_PASSWORD = "known to nobody else"
PLOT = "document.querySelector('#chart-reward .js-plotly-plot')"
POINTS = f"{PLOT}?.data?.reduce((most, trace) => Math.max(most, trace.x.length), 0) ?? 0"


def spec_yaml(model: Path) -> str:
    return f"""
name: from the browser
model: {{path: {model}}}
data: {{source: "reasoning_gym:products", size: 200, options: {{max_digits: 1}}}}
rollout: {{num_generations: 2, max_completion_length: 12, max_staleness: 2}}
training:
  {{max_steps: 5000, learning_rate: 1.0e-4, per_device_train_batch_size: 4, gradient_accumulation_steps: 1, bf16: false,
    gradient_checkpointing: false}}
lora: {{r: 4, alpha: 8}}
server: {{max_model_len: 512, dtype: float32, kv_cache_gib: 0.0625, max_num_seqs: 16}}
checkpoints: {{save_steps: 1000}}
"""


def sign_in(page: Page, studio: RunningStudio) -> None:
    page.goto(f"{studio.url}/login/")
    page.fill("#id_username", "admin")
    page.fill("#id_password", studio.password)
    page.click("[data-testid=sign-in]")
    page.wait_for_url("**/account/password/")
    page.fill("#id_old_password", studio.password)
    page.fill("#id_new_password1", NEW_PASSWORD)
    page.fill("#id_new_password2", NEW_PASSWORD)
    page.click("[data-testid=save-password]")
    page.wait_for_url("**/runs/")


def write_reward(page: Page, studio: RunningStudio) -> None:
    page.goto(f"{studio.url}/rewards/new/")
    page.locator(".cm-content").click()
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(REWARD)
    page.click("[data-testid=test-reward]")
    expect(page.locator("[data-testid=test-values] tbody tr")).to_have_count(3)
    page.click("[data-testid=save-reward]")
    expect(page.locator("[data-testid=reward-name]")).to_have_text("early_letters")


def launch(page: Page, studio: RunningStudio, model: Path) -> None:
    page.goto(f"{studio.url}/runs/new/")
    page.get_by_text("Import and export as YAML").click()
    page.fill("#id_yaml", spec_yaml(model))
    page.click("[data-testid=import-yaml]")
    page.select_option("[id='id_rewards.0.name']", "early_letters")
    page.fill("#id_name", "a first own run")
    expect(page.locator("[data-testid=check-result]")).to_contain_text("Ready to launch")
    page.click("[data-testid=launch]")
    expect(page.locator("[data-testid=run-name]")).to_have_text("a first own run")


def wait_until(page: Page, condition: str, milliseconds: int) -> None:
    """Poll a JavaScript condition from outside: the pages' own security policy forbids Playwright's way of waiting."""
    deadline = time.monotonic() + milliseconds / 1000
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, f"not within {milliseconds / 1000:.0f} s: {condition}"
        page.wait_for_timeout(500)


def wait_for_points(page: Page, more_than: int) -> int:
    page.locator("#chart-reward").scroll_into_view_if_needed()
    wait_until(page, f"({POINTS}) > {more_than}", STEP_S)
    return int(page.evaluate(POINTS))


def state_is(page: Page, state: str, timeout: int) -> None:
    expect(page.locator("[data-testid=state]").first).to_have_text(state, timeout=timeout)


def test_a_first_own_run(studio: RunningStudio, chromium: Browser, tiny_model: Path, tmp_path: Path) -> None:
    studio.wait_ready()
    context = chromium.new_context(viewport={"width": 1400, "height": 900})
    page = context.new_page()
    page.set_default_timeout(LOADED_S)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    sign_in(page, studio)
    write_reward(page, studio)
    launch(page, studio, tiny_model)
    here = page.url

    # From here on the page is never loaded again: everything that changes on it is live.
    page.evaluate("window.neverReloaded = true")
    state_is(page, "running", START_S)
    seen = wait_for_points(page, 0)
    wait_for_points(page, seen + 2)
    assert page.evaluate("window.neverReloaded") is True

    page.click("[data-testid=stop-and-save]")
    if page.locator("[data-testid=confirm-yes]").is_visible():
        page.click("[data-testid=confirm-yes]")
    state_is(page, "stopped", STEP_S)
    expect(page.locator("[data-testid=reason]").first).to_contain_text("Saved a checkpoint")
    saved_step = int(page.locator("[data-testid=step]").first.inner_text().split()[0])

    page.click("[data-testid=resume]")
    state_is(page, "running", START_S)
    wait_until(page, f"parseInt(document.querySelector('[data-testid=step]').innerText) > {saved_step}", STEP_S)
    page.click("[data-testid=stop-now]")
    page.click("[data-testid=confirm-yes]")
    state_is(page, "stopped", STEP_S)
    assert page.url == here

    with page.expect_download() as waiting:
        page.locator("[data-testid=download-adapter]").first.click()
    waiting.value.save_as(tmp_path / "adapter.zip")
    with zipfile.ZipFile(tmp_path / "adapter.zip") as archive:
        archive.extractall(tmp_path / "adapter")
    (config,) = (tmp_path / "adapter").rglob("adapter_config.json")
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32), config.parent
    )
    moved = [parameter.abs().max() for name, parameter in model.named_parameters() if "lora_B" in name]
    assert max(moved) > 0  # lora_B starts at zero: it was trained
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    output = model.generate(**tokenizer("2 times 3", return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert output.shape[1] > 3
    context.close()
    assert complaints == []
    assert httpx.get(f"{studio.url}/api/health").status_code == 200
