"""What the form says before a launch: rendered prompts, memory against devices, where the run goes, who waits for whom."""

from __future__ import annotations

import json
import re
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from tests.webapp import seed
from tests.webapp.runs.test_form import posted
from trainer_core.spec import ModelSpec, ResourceSpec, RolloutSpec, RunSpec
from webapp.hosts.models import Device, Host, Lease
from webapp.hosts.offers import offers
from webapp.runs import forms, precision, prelaunch, rendering
from webapp.runs.checks import check_spec
from webapp.runs.models import Run, State

PROMPTS = [
    [{"role": "user", "content": "6 * 7 = ?"}],
    [{"role": "system", "content": "Be brief – “so”."}, {"role": "user", "content": "<b>{{ 1 + 1 }}</b>\n\n"}],
]


def gpu_host(name: str, gpus: int, gib: int = 80, **fields: Any) -> list[Device]:
    host = Host.objects.create(name=name, last_seen_at=timezone.now(), **fields)
    return [
        Device.objects.create(
            host=host, uuid=f"GPU-{name}-{index}", kind="gpu", index=index, name="H100", memory_mib=gib * 1024
        )
        for index in range(gpus)
    ]


@pytest.fixture
def qwen(tmp_path: Path) -> str:
    """A folder that says it is a Qwen3-1.7B; its weights are elsewhere."""
    folder = tmp_path / "qwen3"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({
        "model_type": "qwen3", "hidden_size": 2048, "num_hidden_layers": 28, "intermediate_size": 6144, "head_dim": 128,
        "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151_936, "tie_word_embeddings": True,
    }))  # fmt: skip
    return str(folder)


@pytest.mark.parametrize("source", ["tiny", "smollm2"])
def test_prompts_are_rendered_as_transformers_renders_them(
    source: str, tiny_model: Path, db: None, settings: Any
) -> None:
    from transformers import AutoTokenizer

    folder = tiny_model if source == "tiny" else Path(settings.MODELS_DIR) / "smollm2-135m-instruct"
    if not folder.is_dir():
        pytest.skip("the built-in model was not made on this machine")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rendered = rendering.render(folder, PROMPTS)
    for prompt, answer in zip(PROMPTS, rendered, strict=True):
        text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        assert answer == {"text": text, "tokens": len(tokenizer.encode(text, add_special_tokens=False))}


def test_a_template_that_refuses_or_is_missing_is_said(tiny_model: Path, tmp_path: Path, db: None) -> None:
    folder = tmp_path / "picky"
    shutil.copytree(tiny_model, folder)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('only questions, please') }}")
    with pytest.raises(rendering.NotRendered, match=r"picky refuses these prompts: only questions, please"):
        rendering.render(folder, PROMPTS)
    with pytest.raises(rendering.NotRendered, match=r"has no tokenizer_config\.json"):
        rendering.render(tmp_path, PROMPTS)
    (folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(rendering.NotRendered, match="refuses"):
        rendering.render(folder, PROMPTS)


def test_the_check_shows_prompts_memory_devices_and_who_waits(
    as_ada: Client, ada: Any, tiny_model: Path, settings: Any
) -> None:
    seed.make_host()
    spec = RunSpec(model=ModelSpec(path=str(tiny_model)))
    answer = as_ada.post("/runs/check/", posted(forms.from_spec(spec))).json()
    assert answer["problems"] == []
    first = answer["prompts"][0]
    assert first["text"].startswith("<|im_start|>user\n")
    assert first["text"].endswith("<|im_start|>assistant\n")
    marks = ("<|im_start|>", "<|im_end|>", "<|im_start|>")
    assert first["tokens"] == len(first["text"].encode()) - sum(
        len(mark) - 1 for mark in marks
    )  # else a token is a byte
    before = answer["before"]
    assert [row["title"] for row in before["memory"]["rows"]] == ["Trainer", "vLLM server"]
    assert before["memory"]["sentence"].startswith("Server and trainer together need about")
    assert [host["name"] for host in before["hosts"]] == ["workbench"]
    assert before["waits"][0] == "Starts at once on workbench, with the CPU slot."
    assert "The trainer waits for 64 samples a step" in before["waits"][1]


def test_an_invalid_form_estimates_nothing(as_ada: Client, ada: Any) -> None:
    data = posted(forms.from_spec(RunSpec())) | {"training.max_steps": "many"}
    answer = as_ada.post("/runs/check/", data).json()
    assert "before" not in answer
    assert answer["problems"]


def test_a_model_too_large_for_its_gpu_names_the_knobs(qwen: str, db: None) -> None:
    gpu_host("small", 2, gib=24)
    spec = RunSpec(model=ModelSpec(path=qwen))
    full = spec.model_copy(update={"lora": spec.lora.model_copy(update={"enabled": False})})
    said = prelaunch.before_launch(full, 100)["memory"]
    assert said["tight"]
    assert "would need about" in said["sentence"]
    assert "LoRA" in said["sentence"]
    assert not prelaunch.before_launch(spec, 100)["memory"]["tight"]


def test_a_server_too_large_for_its_gpu_names_other_knobs(qwen: str, db: None) -> None:
    gpu_host("tiny", 2, gib=2)
    gpu_host("small", 0)
    said = prelaunch.before_launch(RunSpec(model=ModelSpec(path=qwen)), 100)["memory"]
    assert said["tight"]
    assert said["sentence"].startswith("The server would need about 3.6 GiB, but the memory of a GPU is 2.0 GiB")
    assert "more GPUs a server" in said["sentence"]


def test_more_gpus_than_a_host_has_are_counted_out(tiny_model: Path, ada: Any, db: None) -> None:
    gpu_host("box", 4)
    resources = ResourceSpec(server_replicas=2, rollout_gpus=2)
    problems = check_spec(RunSpec(model=ModelSpec(path=str(tiny_model)), resources=resources), ada)
    assert [problem.message for problem in problems if problem.field == "resources"] == [
        "5 GPUs of one host are needed (2 servers x 2 for rollouts, 1 for training), but box has 4."
    ]


def test_servers_on_a_cpu_are_counted_together(tiny_model: Path, db: None) -> None:
    seed.make_host()
    one = RunSpec(model=ModelSpec(path=str(tiny_model)))
    three = one.model_copy(update={"resources": ResourceSpec(server_replicas=3)})
    rows = [prelaunch.before_launch(spec, 100)["memory"]["rows"][1] for spec in (one, three)]
    assert rows[1]["bytes"] == 3 * rows[0]["bytes"]
    assert rows[1]["title"] == "3 vLLM servers together"
    said = prelaunch.before_launch(three, 100)
    assert said["memory"]["sentence"].startswith("Servers and trainer together need about")
    assert said["waits"][0] == "Starts at once on workbench, with the CPU slot for 3 servers and the trainer."


def test_the_picture_marks_what_the_run_would_get(qwen: str, ada: Any) -> None:
    devices = gpu_host("box", 4)
    gpu_host("away", 4, drained=True)
    holder = seed.make_run(ada, "holder", steps=0, rollouts=False)
    Lease.objects.create(device=devices[0], attempt=holder.current_attempt, purpose="server")
    spec = RunSpec(model=ModelSpec(path=qwen), resources=ResourceSpec(rollout_gpus=1, trainer_gpus=2))
    answer = prelaunch.before_launch(spec, 100)
    pictures = {host["name"]: host for host in answer["hosts"]}
    box = pictures["box"]["devices"]
    assert box[0]["run"] == "holder"
    assert [device["roles"] for device in box] == [[], ["server"], ["trainer"], ["trainer"]]
    assert pictures["away"]["state"] == "drained"
    assert answer["waits"][0] == "Starts at once on box, with 1 GPU to generate and 2 to train."
    wide = spec.model_copy(update={"resources": ResourceSpec(rollout_gpus=2, trainer_gpus=2)})
    assert prelaunch.before_launch(wide, 100)["waits"][0] == (
        "Waits for 2 GPUs to generate and 2 to train of box, held by run holder."
    )
    several = spec.model_copy(update={"resources": ResourceSpec(server_replicas=2, trainer_gpus=1)})
    answer = prelaunch.before_launch(several, 100)
    box = next(host for host in answer["hosts"] if host["name"] == "box")["devices"]
    assert [(device["roles"], device["server"]) for device in box] == [
        ([], None), (["server"], 0), (["server"], 1), (["trainer"], None),
    ]  # fmt: skip
    assert answer["waits"][0] == "Starts at once on box, with 2 GPUs to generate (2 servers of 1) and 1 to train."
    assert answer["memory"]["rows"][1]["title"] == "Each vLLM server"
    Run.objects.filter(pk=seed.make_run(ada, "first", state=State.QUEUED, steps=0).pk)
    assert "behind 1 that wait already" in prelaunch.before_launch(spec, 100)["waits"][0]


def test_a_run_over_two_hosts_is_drawn_on_both(qwen: str, ada: Any) -> None:
    gpu_host("a", 3)
    devices = gpu_host("b", 2)
    spec = RunSpec(model=ModelSpec(path=qwen), resources=ResourceSpec(trainer_gpus=2, trainer_hosts=2))
    answer = prelaunch.before_launch(spec, 100)
    roles = {host["name"]: [device["roles"] for device in host["devices"]] for host in answer["hosts"]}
    assert roles == {"a": [["server"], ["trainer"], ["trainer"]], "b": [["trainer"], ["trainer"]]}
    assert answer["waits"][0] == "Starts at once on a and b, with 1 GPU to generate and 2 to train on each."
    alone = spec.model_copy(update={"resources": ResourceSpec(trainer_gpus=2)})
    parts = [dict(prelaunch.before_launch(each, 100)["memory"]["rows"][0]["parts"]) for each in (spec, alone)]
    assert parts[0]["weights"] < parts[1]["weights"], "sharded over four processes instead of two"
    holder = seed.make_run(ada, "holder", steps=0, rollouts=False)
    Lease.objects.create(device=devices[0], attempt=holder.current_attempt, purpose="server")
    assert prelaunch.before_launch(spec, 100)["waits"][0] == (
        "Waits for 1 GPU to generate and 2 to train on each of a and b, held by run holder."
    )


def test_a_host_without_gpus_takes_runs_only_where_no_gpu_is_up(db: None) -> None:
    cpu = seed.make_host("cpu")
    gpus = gpu_host("gpus", 2)
    assert {offer.host.name: offer.takes_runs for offer in offers()} == {"cpu": False, "gpus": True}
    Host.objects.filter(pk=gpus[0].host_id).update(last_seen_at=timezone.now() - timedelta(minutes=5))
    assert {offer.host.name: offer.takes_runs for offer in offers()} == {"cpu": True, "gpus": False}
    Host.objects.filter(pk=cpu.pk).update(drained=True)
    assert not any(offer.takes_runs for offer in offers())


def test_bfloat16_on_a_processor_without_it_is_warned_of_and_not_the_default(as_ada: Client, ada: Any) -> None:
    host = seed.make_host("plain")
    spec = RunSpec()
    assert not any("bfloat16" in text for text in prelaunch.before_launch(spec, None)["waits"])  # it did not tell yet
    Host.objects.filter(pk=host.pk).update(bf16=False)
    assert prelaunch.before_launch(spec, None)["waits"][-1] == (
        "The processor of plain has no bfloat16 instructions, so server.dtype bfloat16 and training.bf16 take ten times as "
        "long or more here; choose float32."
    )
    fitted = precision.fitted(spec)
    assert (fitted.server.dtype, fitted.training.bf16) == ("float32", False)
    assert not any("bfloat16" in text for text in prelaunch.before_launch(fitted, None)["waits"])
    page = as_ada.get("/runs/new/").content.decode()
    assert re.search(r'name="server\.dtype".*?<option selected>float32</option>', page, re.DOTALL)
    gpu_host("big", 2)  # takes the runs instead
    assert precision.fitted(spec) == spec
    assert not any("bfloat16" in text for text in prelaunch.before_launch(spec, None)["waits"])


def test_nothing_to_wait_for_is_said_of_a_synchronous_run(db: None) -> None:
    spec = RunSpec(rollout=RolloutSpec(max_staleness=0))
    answer = prelaunch.before_launch(spec, None)
    assert answer["waits"][0].startswith("No host that takes runs has enough devices")
    assert answer["waits"][1].startswith("Each side waits for the other")
    assert answer["hosts"] == []


@pytest.mark.parametrize(
    "config, sentence",
    [(None, "config.json is not at hand"), ({"model_type": "mamba"}, "the model is a mamba; the trainer knows llama")],
)
def test_what_cannot_be_estimated_is_said(config: Any, sentence: str, tmp_path: Path, db: None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    answer = prelaunch.before_launch(RunSpec(model=ModelSpec(path=str(tmp_path))), None)["memory"]
    assert sentence in answer["sentence"]
    assert answer["rows"] == []
