"""Exporters get a run's values, and cannot harm it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from tests.trainer_core.training.test_trainer import groups, spool_lines
from trainer_core import exporters
from trainer_core.spec import ExporterSpec

MakeTrainer = Callable[..., Any]


class Tracker(TrainerCallback):
    """Keeps what it is told, and where."""

    calls: list[tuple[str, int, dict[str, float]]] = []
    threads: set[str] = set()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.calls.append((args.run_name, state.global_step, {}))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        control.should_training_stop = True  # a tracker does not steer training
        self.threads.add(threading.current_thread().name)
        self.calls.append(("log", state.global_step, logs))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.calls.append(("end", state.global_step, {}))


class Broken(TrainerCallback):
    def on_log(self, *_: Any, **__: Any) -> None:
        raise SystemExit("the tracking server said 500\nand more")


class NotThere(TrainerCallback):
    def __init__(self) -> None:
        raise RuntimeError("Run `pip install nothing`.")


class Slow(Tracker):
    def on_log(self, *args: Any, **context: Any) -> None:
        time.sleep(0.5)
        super().on_log(*args, **context)


class Hanging(TrainerCallback):
    asked = threading.Event()

    def on_log(self, *_: Any, **__: Any) -> None:
        self.asked.wait(60)


@pytest.fixture
def train(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Trains three steps with trackers of these kinds in place of TensorBoard's."""

    def run(**kinds: type[TrainerCallback]) -> Any:
        monkeypatch.setattr(integration_utils, "INTEGRATION_TO_CALLBACK", kinds)
        trainer = make_trainer(groups(6), max_steps=3, report_to=list(kinds), run_name="mine")
        trainer.train()
        return trainer

    return run


def warnings(trainer: Any) -> list[str]:
    assert [line["step"] for line in spool_lines(trainer, "metrics")] == [1, 2, 3]
    return [line["text"] for line in spool_lines(trainer, "event") if line["name"] == "exporter"]


def test_values_arrive_in_order_on_a_thread_of_their_own(train: Callable[..., Any]) -> None:
    Tracker.calls, Tracker.threads = [], set()
    trainer = train(tracker=Tracker)
    assert warnings(trainer) == []
    assert Tracker.threads == {"exporter-tracker"}
    assert trainer.args.report_to == ["tracker"]
    steps = [(name, step) for name, step, logs in Tracker.calls if name != "log" or "loss" in logs]
    assert steps == [("mine", 0), ("log", 1), ("log", 2), ("log", 3), ("end", 3)]
    found = [logs["rewards/trained_mean"] for name, _, logs in Tracker.calls if "loss" in logs]
    assert found == pytest.approx([line["values"]["rewards/trained_mean"] for line in spool_lines(trainer, "metrics")])


def test_one_that_fails_is_told_and_the_others_go_on(train: Callable[..., Any]) -> None:
    Tracker.calls = []
    told = warnings(train(broken=Broken, missing=NotThere, tracker=Tracker))
    assert sorted(told) == [
        "The exporter broken failed and gets no more values; training goes on. SystemExit: the tracking server said 500",
        "The exporter missing failed and gets no more values; training goes on. RuntimeError: Run `pip install nothing`.",
    ]
    assert Tracker.calls[-1][:2] == ("end", 3)


def test_one_that_hangs_is_left_behind(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporters, "STALLED_S", 0.5)
    monkeypatch.setattr(exporters, "WAITING", 2)
    Hanging.asked.clear()
    started = time.monotonic()
    told = warnings(train(hanging=Hanging))
    assert time.monotonic() - started < 30
    assert told == ["The exporter hanging did not finish; its last values may be missing there."]
    Hanging.asked.set()


def test_one_that_is_slow_may_send_the_rest(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporters, "STALLED_S", 1.5)
    Tracker.calls = []
    assert warnings(train(slow=Slow)) == []
    assert [name for name, *_ in Tracker.calls] == ["mine", "log", "log", "log", "log", "end"]


def test_a_name_that_is_not_known_is_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(ValueError, match="nothing is not supported"):
        make_trainer([], report_to=["nothing"])


def test_what_libraries_read_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("WANDB_PROJECT", "of-the-host")
    found = exporters.environment(ExporterSpec(project="maths"), tmp_path)
    assert found["WANDB_PROJECT"] == "of-the-host"
    assert found["MLFLOW_EXPERIMENT_NAME"] == "maths"
    assert found["TENSORBOARD_LOGGING_DIR"] == str(tmp_path / "tensorboard")
    assert found["MLFLOW_TRACKING_URI"] == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://host:5000")
    assert exporters.environment(ExporterSpec(), tmp_path)["MLFLOW_TRACKING_URI"] == "http://host:5000"
    wanted = ExporterSpec(mlflow_url="https://mine")
    assert exporters.environment(wanted, tmp_path)["MLFLOW_TRACKING_URI"] == "https://mine"


def test_tensorboard_writes_event_files(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="TensorBoard is an exporter that users install"
    )
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tensorboard"))
    trainer = make_trainer(groups(4), max_steps=2, report_to=["tensorboard"])
    trainer.train()
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    points = [(point.step, point.value) for point in found.Scalars("train/rewards/trained_mean")]
    lines = spool_lines(trainer, "metrics")
    assert [step for step, _ in points] == [1, 2]
    assert [value for _, value in points] == pytest.approx([line["values"]["rewards/trained_mean"] for line in lines])
