"""The command line of an attempt: a RunSpec becomes settings, and what is wrong becomes a sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer_core import explain, launch
from trainer_core.spec import RunSpec

SERVER = "http://127.0.0.1:9"


def run_folder(tmp_path: Path, **sections: Any) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    fields: dict[str, Any] = {"data": {"source": "reasoning_gym:products", "size": 4}}
    (run / "spec.yaml").write_text(RunSpec.model_validate({**fields, **sections}).to_yaml())
    return run


def attempt(run: Path, model: Path | str, *more: str) -> tuple[int, str]:
    """Exit code and the text of the last spool event, which must be `failed`."""
    folder = run / "attempts" / "1"
    code = launch.main([
        "--spec", str(run / "spec.yaml"), "--run-dir", str(run), "--attempt-dir", str(folder), "--model", str(model),
        "--server", SERVER, *more,
    ])  # fmt: skip
    last = json.loads((folder / "spool.jsonl").read_text().splitlines()[-1])
    assert (last["kind"], last["level"], last["name"]) == ("event", "error", "failed")
    return code, last["text"]


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer_core import trainer

    monkeypatch.setattr(trainer, "_load", lambda *_: pytest.fail("the model was loaded"))


@pytest.mark.usefixtures("no_model")
def test_what_is_wrong_is_said_before_the_model_loads(tmp_path: Path, tiny_llama: Path) -> None:
    run = run_folder(tmp_path)
    assert attempt(run, "/nowhere/model") == (
        1, "Model /nowhere/model does not exist or has no config.json; give a Hugging Face model folder or a hub id",
    )  # fmt: skip
    code, text = attempt(run, tiny_llama, "--resume", str(tmp_path))
    assert code == 1
    assert "has no rollout_state.json" in text

    (tmp_path / "rows.jsonl").write_text('{"question": "a"}\n')
    spec = RunSpec.model_validate({"data": {"source": str(tmp_path / "rows.jsonl")}})
    (run / "spec.yaml").write_text(spec.to_yaml())
    code, text = attempt(run, tiny_llama)
    assert "has no 'prompt' column; found question" in text

    spec = RunSpec.model_validate({"data": {"size": 4}, "rewards": [{"name": "no_such_reward"}]})
    (run / "spec.yaml").write_text(spec.to_yaml())
    code, text = attempt(run, tiny_llama)
    assert code == 1
    assert "no_such_reward" in text

    (run / "spec.yaml").write_text("training: {max_steps: 0}")
    code, text = attempt(run, tiny_llama)
    assert code == 1
    assert "max_steps" in text
    assert "\n" not in text

    (run / "spec.yaml").unlink()
    assert "does not exist" in attempt(run, tiny_llama)[1]


def test_settings_of_a_spec(tmp_path: Path) -> None:
    spec = RunSpec.model_validate(
        {
            "rollout": {"num_generations": 4, "max_completion_length": 33, "temperature": 0.9, "max_staleness": 2},
            "training": {"max_steps": 7, "learning_rate": 3e-4, "per_device_train_batch_size": 2,
                         "gradient_accumulation_steps": 6, "token_budget": None, "bf16": False, "epsilon_high": 0.3},
            "server": {"max_model_len": 300},
            "rewards": [{"name": "last_number_match", "weight": 2.0}],
            "checkpoints": {"save_steps": 3, "save_total_limit": 2},
            "evaluation": {"every_steps": 3, "num_generations": 5},
        }
    )  # fmt: skip
    config = launch.config_of(spec, tmp_path, tmp_path / "attempts" / "1", ["http://a", "http://b"])
    expected = {
        "num_generations": 4, "max_completion_length": 33, "temperature": 0.9, "max_staleness": 2, "max_steps": 7,
        "learning_rate": 3e-4, "samples_per_step": 12, "token_budget": 300, "bf16": False, "epsilon": 0.2,
        "epsilon_high": 0.3, "reward_weights": [2.0], "save_steps": 3, "save_total_limit": 2,
        "server_urls": ["http://a", "http://b"], "output_dir": str(tmp_path / "checkpoints"),
        "attempt_path": tmp_path / "attempts" / "1", "eval_steps": 3, "eval_num_generations": 5, "eval_strategy": "steps",
    }  # fmt: skip
    assert {name: getattr(config, name) for name in expected} == expected


def test_adapter_of_a_spec() -> None:
    lora = launch.lora_of(RunSpec.model_validate({"lora": {"r": 4, "alpha": 8, "target_modules": "q_proj, v_proj"}}))
    assert (lora.r, lora.lora_alpha, lora.target_modules) == (4, 8, {"q_proj", "v_proj"})
    assert launch.lora_of(RunSpec.model_validate({"lora": {"enabled": False}})) is None


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("the model is bad\nmore"), "The model is bad"),
        (MemoryError(), "The trainer ran out of memory: lower training.token_budget"),
        (OSError(28, "No space left on device", "/x/y"), "No space left on device: /x/y"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_sentences(error: Exception, text: str) -> None:
    assert explain.sentence(error).startswith(text)


def test_help() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "trainer_core.launch", "--help"], capture_output=True, text=True, check=True
    )
    assert "--attempt-dir" in found.stdout


def test_a_step_in_which_nothing_was_scored_has_a_line_too() -> None:
    line = launch.progress_line(7, 20, {"loss": -0.25, "perf/step_s": 1.26})
    assert line == "step 7/20 reward - loss -0.2500 kl - staleness - 1.3 s (waited - s, computed - s)"


def test_a_fault_of_the_trainer_itself_is_named_as_one() -> None:
    assert explain.sentence(KeyError("reward")).startswith("The trainer met an error of its own (KeyError: 'reward')")
