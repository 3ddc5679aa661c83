"""The command against a live server, as a person in a terminal uses it."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from tests.webapp import seed
from trainer_core.spec import RunSpec
from webapp.accounts.models import ApiToken, User
from webapp.cli import main
from webapp.runs.models import Run

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume asynchronous iterators"),
]


@pytest.fixture
def server(live_server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A live server, a configuration folder of its own, and a token in the environment."""
    monkeypatch.setattr("webapp.runs.lifecycle.notify_queued", lambda: None)  # no broker here
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    _, token = ApiToken.create(seed.make_user("ada"), "cli")
    monkeypatch.setenv("OFFBEAT_URL", live_server.url)
    monkeypatch.setenv("OFFBEAT_TOKEN", token)
    return token


@pytest.fixture
def run(server: str) -> Run:
    return seed.make_run(User.objects.get(username="ada"), "a run", state="completed")


def offbeat(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def test_login_keeps_the_token_for_its_owner_only(
    server: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, live_server: Any
) -> None:
    monkeypatch.delenv("OFFBEAT_URL")
    monkeypatch.delenv("OFFBEAT_TOKEN")
    code, _, err = offbeat(capsys, "runs", "list")
    assert (code, err) == (3, "offbeat: Not logged in; run `offbeat login`, or set OFFBEAT_URL and OFFBEAT_TOKEN.\n")
    code, _, err = offbeat(capsys, "login", "--url", live_server.url, "--token", "wrong")
    assert code == 3
    assert "live API token" in err
    config = tmp_path / "config" / "offbeat" / "config.json"
    assert not config.exists()
    code, out, _ = offbeat(capsys, "login", "--url", live_server.url + "/", "--token", server)
    assert (code, "as ada" in out) == (0, True)
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    assert offbeat(capsys, "runs", "list")[0] == 0


def test_a_run_is_launched_stopped_and_resumed(server: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(RunSpec(name="from a file").to_yaml())
    code, out, _ = offbeat(capsys, "launch", str(spec))
    assert (code, "from a file" in out, "queued" in out) == (0, True, True)
    run = Run.objects.get()
    assert offbeat(capsys, "runs", "stop", str(run.pk)[:6])[0] == 0
    run.refresh_from_db()
    assert run.state == "stopped"
    code, _, err = offbeat(capsys, "runs", "stop", "from a file")
    assert (code, "only a queued, starting or running one can be stopped" in err) == (1, True)

    def play() -> None:
        time.sleep(1.5)
        Run.objects.filter(pk=run.pk).update(state="running", summary={"step": 3, "max_steps": 200, "reward": 0.25})
        time.sleep(1.5)
        Run.objects.filter(pk=run.pk).update(state="failed", reason="Out of memory.")
        connection.close()

    worker = threading.Thread(target=play)
    worker.start()
    code, out, _ = offbeat(capsys, "runs", "resume", str(run.pk), "--follow")
    worker.join()
    assert code == 1
    assert "failed: Out of memory." in out
    assert "3 steps, reward 0.25" in out


def test_a_bad_spec_is_explained_and_nothing_is_made(
    server: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("rollout: {num_generations: 1}\ntraining: {max_steps: 0}\n")
    code, _, err = offbeat(capsys, "launch", str(spec))
    assert code == 1
    assert "rollout.num_generations" in err
    assert "training.max_steps" in err
    assert Run.objects.count() == 0
    assert offbeat(capsys, "launch", str(tmp_path / "none.yaml"))[0] == 2


def test_runs_are_listed_and_shown(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = offbeat(capsys, "runs", "list", "--state", "completed", "--search", "run")
    assert (code, str(run.pk)[:8] in out, "24/40" in out) == (0, True, True)
    assert json.loads(offbeat(capsys, "runs", "list", "--json")[1])[0]["name"] == "a run"
    code, _, err = offbeat(capsys, "runs", "list", "--state", "nonsense")
    assert (code, "There is no state 'nonsense'" in err) == (1, True)
    out = offbeat(capsys, "runs", "show", "a run")[1]
    assert "Generation-bound" in out
    assert "step 20, adapter" in out
    assert "eval/reward" not in out
    run.checkpoints.update(best=True, evaluation={"eval/reward": 0.75})
    assert ", eval/reward 0.7500, best" in offbeat(capsys, "runs", "show", "a run")[1]
    code, _, err = offbeat(capsys, "runs", "show", "zzz")
    assert (code, "There is no run 'zzz'" in err) == (1, True)


def test_logs_and_metrics(run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "step 24 loss" in offbeat(capsys, "runs", "logs", "a run")[1]
    assert (
        "WARNING the cache is small" in offbeat(capsys, "runs", "logs", "a run", "--file", "server-0.log", "--all")[1]
    )
    code, _, err = offbeat(capsys, "runs", "logs", "a run", "--file", "x.log")
    assert (code, "server-0.log" in err) == (1, True)
    out = offbeat(capsys, "runs", "metrics", "a run")[1]
    assert "perf/rollout_wait_s" in out
    code, out, _ = offbeat(capsys, "runs", "metrics", "a run", "--metric", "reward")
    assert (code, len(out.splitlines())) == (0, 25)
    assert offbeat(capsys, "runs", "metrics", "a run", "--output", "all.parquet")[0] == 0
    assert (tmp_path / "all.parquet").read_bytes()[:4] == b"PAR1"
    assert offbeat(capsys, "runs", "metrics", "a run", "--output", "all.xls")[0] == 2


def test_an_adapter_is_downloaded_and_a_broken_download_goes_on(
    run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source = run.checkpoints.get().folder
    code, out, _ = offbeat(capsys, "runs", "download", "a run", "--output", "got")
    assert (code, "step 20" in out) == (0, True)
    got = tmp_path / "got"
    assert sorted(path.name for path in got.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert (got / "adapter_model.safetensors").read_bytes() == (source / "adapter_model.safetensors").read_bytes()
    data = bytes(range(256)) * 400
    (source / "adapter_model.safetensors").write_bytes(data)
    stat_ = (source / "adapter_model.safetensors").stat()
    part = got / "adapter_model.safetensors.part"
    part.write_bytes(data[:5000])
    tag = part.with_name(part.name + ".etag")
    tag.write_text(f'"{stat_.st_ino:x}-{stat_.st_mtime_ns:x}-{stat_.st_size:x}"')
    assert offbeat(capsys, "runs", "download", "a run", "--output", "got")[0] == 0
    assert (got / "adapter_model.safetensors").read_bytes() == data
    part.write_bytes(b"of another file")
    tag.write_text('"other"')
    assert offbeat(capsys, "runs", "download", "a run", "--output", "got", "--all")[0] == 0
    assert (got / "adapter_model.safetensors").read_bytes() == data
    assert (got / "optimizer.pt").exists()
    assert not part.exists()
    assert offbeat(capsys, "runs", "download", "a run", "--best")[0] == 1
    run.checkpoints.update(best=True)
    code, out, _ = offbeat(capsys, "runs", "download", "a run", "--best", "--output", "best")
    assert (code, "step 20" in out) == (0, True)
    code, _, err = offbeat(capsys, "runs", "download", "a run", "--step", "7")
    assert (code, "there are 20" in err) == (1, True)


def test_a_server_away_is_said(
    server: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFBEAT_URL", "http://127.0.0.1:9")
    code, _, err = offbeat(capsys, "runs", "list")
    assert (code, "can't be reached" in err) == (3, True)
    monkeypatch.setenv("OFFBEAT_URL", "127.0.0.1:9")
    assert offbeat(capsys, "runs", "list")[0] == 2


def test_the_command_is_light() -> None:
    code = "import sys, webapp.cli; print(*[name for name in ('django', 'torch', 'numpy', 'pydantic') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""
    wrong = subprocess.run([sys.executable, "-m", "webapp.cli", "nonsense"], capture_output=True, text=True)
    assert wrong.returncode == 2
