"""Every setting of a training is one that a spec can have, or there is a reason why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from trainer_core import config, launch
from trainer_core.attention.backends import BACKENDS
from trainer_core.spec import AttentionBackend, RunSpec

NOT_IN_A_SPEC = {
    "model_init_kwargs": "arguments of from_pretrained are for code: quantised or patched models, not settings",
    "ignore_data_skip": "always on",
    "logging_nan_inf_filter": "a loss that is no number is shown as such",
    "logging_steps": "every step is reported, the pages thin it out",
    "log_completions": "the pages show all rollouts",
    "num_completions_to_print": "the pages show all rollouts",
}


def settings_of(monkeypatch: pytest.MonkeyPatch, spec: RunSpec) -> dict[str, Any]:
    """What `config_of` gives to AsyncGRPOConfig."""
    with monkeypatch.context() as patched:
        patched.setattr(config, "AsyncGRPOConfig", dict)
        return dict(launch.config_of(spec, Path("run"), Path("run/attempts/1"), ["http://a"]))  # type: ignore[call-overload]


def test_each_field_of_ours_is_set_or_exempt(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {name for name in config.AsyncGRPOConfig.__annotations__ if not name.startswith("_")}
    given = set(settings_of(monkeypatch, RunSpec()))
    assert own - given == set(NOT_IN_A_SPEC)


@pytest.mark.parametrize(("path", "value", "name"), [
    ("training.beta", 0.1, "beta"),
    ("training.score_centering", False, "score_centering"),
    ("training.num_sampler_logprobs", 4, "num_sampler_logprobs"),
    ("training.compile_layers", True, "compile_layers"),
    ("training.router_aux_loss_coef", 0.01, "router_aux_loss_coef"),
    ("training.attention_backend", "flex", "attention_backend"),
    ("training.max_epochs", 2.5, "max_epochs"),
    ("agent.fork_threshold_tokens", 7, "fork_threshold_tokens"),
    ("server.request_timeout", 30.0, "request_timeout"),
    ("server.weight_sync_timeout", 40.0, "weight_sync_timeout"),
    ("server.startup_timeout", 50.0, "vllm_server_timeout"),
    ("rollout.heartbeat_stale_after_s", 60.0, "heartbeat_stale_after_s"),
    ("rollout.max_generation_failures", 3, "max_generation_failures"),
    ("evaluation.temperature", 0.0, "eval_temperature"),
    ("evaluation.top_p", 0.9, "eval_top_p"),
    ("evaluation.pass_above", 0.5, "eval_pass_above"),
    ("exporters.targets", ["tensorboard"], "report_to"),
    ("exporters.project", "maths", "project"),
])  # fmt: skip
def test_a_setting_arrives(monkeypatch: pytest.MonkeyPatch, path: str, value: Any, name: str) -> None:
    section, field = path.split(".")
    assert settings_of(monkeypatch, RunSpec())[name] != value
    assert settings_of(monkeypatch, RunSpec.model_validate({section: {field: value}}))[name] == value


def test_the_defaults_of_a_spec_are_those_of_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """But for what says otherwise in its help, or depends on the run."""
    differ = {
        "attempt_dir", "vllm_server_base_url", "reward_weights", "bf16", "token_budget", "vllm_server_timeout", "report_to",
    }  # fmt: skip
    given = settings_of(monkeypatch, RunSpec())
    library = config.AsyncGRPOConfig(output_dir=str(tmp_path), use_cpu=True)
    own = set(config.AsyncGRPOConfig.__annotations__) & set(given) - differ
    unset = {name: getattr(config.AsyncGRPOConfig, name) for name in ("epsilon_high", "max_concurrent_rollouts")}
    expected = {name: getattr(library, name) for name in own} | unset
    assert {name: given[name] for name in own} == expected


def test_a_spec_from_before_there_were_several_servers_has_one_over_its_gpus() -> None:
    resources = RunSpec.from_yaml("resources: {rollout_gpus: 2, trainer_gpus: 1}").resources
    assert (resources.server_replicas, resources.rollout_gpus) == (1, 2)


def test_the_attention_backends_are_those_there_are() -> None:
    assert get_args(AttentionBackend) == ("auto", *BACKENDS)


@pytest.mark.parametrize(("sections", "sentence"), [
    ({"server": {"api_servers": 2}, "lora": {"push": "adapter"}}, "takes new adapters with one API server only"),
    ({"resources": {"server_replicas": 4}, "rollout": {"max_concurrent_rollouts": 3}}, "some servers would never be asked"),
    ({"resources": {"server_replicas": 17}}, "less than or equal to 16"),
    ({"resources": {"server_replicas": 0}}, "greater than or equal to 1"),
    ({"data": {"source": "rows.jsonl", "streaming": True}, "training": {"max_epochs": 1}}, "how many rows it has"),
    ({"evaluation": {"at_start": True}}, "evaluation.at_start is on, but nothing is evaluated"),
    ({"exporters": {"targets": ["neptune"]}}, "'neptune' is no exporter; there are tensorboard, wandb, trackio, mlflow"),
    ({"exporters": {"mlflow_url": "file:///etc"}}, "found 'file:///etc'; http://... or https://... is needed, or nothing"),
    ({"exporters": {"mlflow_url": "http://a b"}}, "found 'http://a b'; http://... or https://... is needed"),
    ({"secrets": ["hf_token"]}, "found the name 'hf_token'; capitals, digits and underscores are allowed, with _KEY, _TOKEN"),
    ({"secrets": ["VLLM_API_KEY"]}, "and none of OFFBEAT_, VLLM_, DJANGO_, CELERY_, NCCL_ and CUDA_ in front"),
])  # fmt: skip
def test_what_does_not_go_together_is_said(sections: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError) as caught:
        RunSpec.model_validate(sections)
    assert sentence in str(caught.value)
