"""The GPU twin of test_push.py: the same pushes over NCCL, trainer and server on a GPU each."""

import pytest
import torch

from tests.tiny_model import tiny_qwen3
from tests.trainer_core.sync.test_push import config_for, disturb, greedy, greedy_reference, load
from tests.vllm_server import running_server, tiny_spec
from trainer_core.sync import choose_sync
from trainer_core.sync.nccl import NcclSync

pytestmark = [pytest.mark.gpu, pytest.mark.server, pytest.mark.slow]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: one to serve, one to train")
def test_full_weights_over_nccl(tmp_path):
    torch.manual_seed(6)
    spec = tiny_spec(server={"dtype": "float32", "enforce_eager": True})
    torch.cuda.set_device(1)  # the server takes the first
    model = load(tiny_qwen3()).cuda()
    with running_server(spec, tiny_qwen3(), tmp_path / "server.log", device="cuda") as server:
        sync = choose_sync(config=config_for(tmp_path), model=model, server_urls=[server.url])
        assert isinstance(sync, NcclSync)
        sync.open()
        outputs = set()
        for version in (1, 2, 3):
            disturb(model)
            report = sync.push(model, version)
            assert 0 < report.transfer_s < report.pause_s
            assert sum(report.phases.values()) + report.transfer_s == pytest.approx(report.pause_s, abs=0.01)
            output = greedy(server, sync.model_name(version))
            assert output == greedy_reference(model.cpu())
            model.cuda()
            outputs.add(tuple(output))
        sync.reopen()
        sync.push(model, 4)
        sync.close()
    assert len(outputs) == 3
