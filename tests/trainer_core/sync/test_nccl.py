"""The GPU twin of test_push.py: the same pushes over NCCL, trainer and server on a GPU each, or on one that both share."""

import pytest
import torch

from tests.tiny_model import tiny_qwen3
from tests.trainer_core.sync.test_push import config_for, disturb, greedy, greedy_reference, load
from tests.vllm_server import running_server, tiny_spec
from trainer_core.sync import STREAMED, choose_sync

pytestmark = [pytest.mark.gpu, pytest.mark.server, pytest.mark.slow]


@pytest.fixture
def server_env(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """NCCL refuses two processes on one GPU, unless it takes them for two hosts."""
    if torch.cuda.device_count() > 1:
        torch.cuda.set_device(1)  # the server takes the first
        return {}
    monkeypatch.setenv("NCCL_HOSTID", "trainer")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    return {"NCCL_HOSTID": "server", "NCCL_SOCKET_IFNAME": "lo"}


@pytest.mark.parametrize("backend", ["nccl-staged", "nccl"])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_full_weights_over_nccl(tmp_path, server_env, backend, kept):
    """`kept` is the precision of the trainer's weights, which are cast to the server's on the way."""
    torch.manual_seed(6)
    spec = tiny_spec(server={"dtype": "float32", "enforce_eager": True, "gpu_memory_utilization": 0.15})
    model = load(tiny_qwen3()).to(kept).cuda()
    arguments = ["--weight-transfer-config", f'{{"backend": "{backend}"}}']
    log = tmp_path / "server.log"
    with running_server(spec, tiny_qwen3(), log, device="cuda", extra=arguments, env=server_env) as server:
        sync = choose_sync(config=config_for(tmp_path), model=model, server_urls=[server.url])
        assert isinstance(sync, STREAMED[backend])
        sync.open()
        outputs = set()
        for version in (1, 2, 3):
            disturb(model)
            report = sync.push(model, version)
            staged = backend == "nccl-staged"
            assert report.pause_s < report.total_s if staged else report.pause_s == report.total_s
            assert sum(report.phases.values()) + report.transfer_s == pytest.approx(report.total_s, abs=0.01)
            output = greedy(server, sync.model_name(version))
            assert output == greedy_reference(model.cpu().to(torch.float32))
            model.to(kept).cuda()
            outputs.add(tuple(output))
        sync.reopen()
        sync.push(model, 4)
        sync.close()
    assert len(outputs) == 3
    assert ("Later weights are put in place by" in log.read_text()) == staged
