"""What the form shows before a launch, in a real browser: memory, devices to choose from, prompts as the model reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.webapp import seed
from tests.webapp.browser.conftest import Studio, Watched

pytestmark = [pytest.mark.browser, pytest.mark.slow]

QWEN3 = {
    "model_type": "qwen3", "hidden_size": 2048, "num_hidden_layers": 28, "intermediate_size": 6144, "head_dim": 128,
    "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151_936, "tie_word_embeddings": True,
}  # fmt: skip
SEED = """
from datetime import timedelta
from django.utils import timezone
from tests.webapp import seed
from webapp.hosts.models import Device, Host
from webapp.accounts.models import User
if not User.objects.filter(username="launcher").exists():
    seed.make_user("launcher")
host = Host.objects.create(name="rack", last_seen_at=timezone.now() + timedelta(hours=1))
for index in range(4):
    Device.objects.create(host=host, uuid=f"GPU-rack-{index}", kind="gpu", index=index, name="NVIDIA H100", memory_mib=81920)
"""


@pytest.fixture
def launcher(web: Watched, studio: Studio) -> Iterator[Watched]:
    """Somebody at a studio with a host of four GPUs, which is gone again afterwards."""
    studio.run_code(SEED)
    folder = studio.home / "qwen3"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN3))
    web.sign_in("launcher", seed.PASSWORD)
    yield web
    studio.run_code('from webapp.hosts.models import Device, Host\nDevice.objects.filter(host__name="rack").delete()\n'
                    'Host.objects.filter(name="rack").delete()')  # fmt: skip


def counts(page: Page) -> tuple[str, str]:
    return tuple(page.input_value(f"[id='id_resources.{name}']") for name in ("server_replicas", "trainer_gpus"))  # type: ignore[return-value]


def test_memory_devices_and_waits_are_shown_and_gpus_chosen_on_the_picture(launcher: Watched, studio: Studio) -> None:
    page = launcher.go("/runs/new/")
    page.fill("[id='id_model.path']", str(studio.home / "qwen3"))
    memory = page.locator("[data-testid=memory]")
    expect(memory).to_contain_text("of a GPU.", timeout=60_000)  # the first check imports the generators of datasets
    expect(memory.locator("tr.sum")).to_have_count(2)
    expect(memory.locator("tr", has_text="optimizer state").first).to_be_visible()
    rack = page.locator("[data-testid=hosts-picture] .host-picture", has=page.locator(".host-name", has_text="rack"))
    cells = rack.locator(".device-cell")  # other tests of this studio have hosts of their own
    expect(cells).to_have_text(["GPU 0generates", "GPU 1trains", "GPU 2free", "GPU 3free"])
    expect(page.locator("[data-testid=waits] li").first).to_have_text(
        "Starts at once on rack, with 1 GPU to generate and 1 to train."
    )
    cells.nth(3).click()  # one more that generates
    expect(cells).to_have_text(["GPU 0server 0", "GPU 1server 1", "GPU 2trains", "GPU 3free"])
    assert counts(page) == ("2", "1")
    expect(page.locator("[data-testid=waits] li").first).to_have_text(
        "Starts at once on rack, with 2 GPUs to generate (2 servers of 1) and 1 to train."
    )
    commands = page.locator("[data-testid=commands]")
    expect(commands.locator("h3")).to_have_text(["vLLM server 0", "vLLM server 1", "Trainer"])
    launcher.shoot("launch-form-servers")
    cells.nth(0).click()  # and it trains instead
    expect(cells).to_have_text(["GPU 0generates", "GPU 1trains", "GPU 2trains", "GPU 3free"])
    assert counts(page) == ("1", "2")
    expect(page.locator("[data-testid=commands]")).to_contain_text("--num_processes 2")
    launcher.shoot("launch-form-gpus")
    assert launcher.barriers() == []
    page.set_viewport_size({"width": 390, "height": 900})
    assert launcher.overflow() == 0
    launcher.shoot("launch-form-gpus-390")
    cells.nth(1).focus()
    page.keyboard.press("Enter")  # by keyboard too: one less that trains
    expect(cells).to_have_text(["GPU 0generates", "GPU 1trains", "GPU 2free", "GPU 3free"])


def test_full_training_that_does_not_fit_names_the_knobs(launcher: Watched, studio: Studio) -> None:
    page = launcher.go("/runs/new/")
    page.fill("[id='id_model.path']", str(studio.home / "qwen3"))
    page.uncheck("[id='id_lora.enabled']")
    page.uncheck("[id='id_training.gradient_checkpointing']")
    page.fill("[id='id_training.token_budget']", "60000")
    expect(page.locator("[data-memory-sentence]")).to_contain_text("would need about")
    expect(page.locator("[data-memory-sentence]")).to_contain_text("gradient checkpointing")
    launcher.shoot("launch-form-too-large")
