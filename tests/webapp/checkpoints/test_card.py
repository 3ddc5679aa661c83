"""The model card that goes with a download."""

from __future__ import annotations

import io
import re
import zipfile
from xml.etree import ElementTree

import pytest
import yaml
from django.test import Client
from hypothesis import given
from hypothesis import strategies as st

from tests.webapp import seed
from trainer_core.spec import RunSpec
from webapp.accounts.models import User
from webapp.checkpoints.card import card_files
from webapp.checkpoints.curve import svg
from webapp.checkpoints.models import Checkpoint
from webapp.rewards import services

numbers = st.lists(st.tuples(st.integers(0, 10**9), st.floats(allow_nan=True)), max_size=20)


@pytest.fixture
def checkpoint(ada: User) -> Checkpoint:
    function = services.create_function(
        "def polite(completions, **columns):\n    return [1] * len(completions)\n", "", ada
    )
    assert function.latest is not None
    spec = seed.seeded_spec()
    reward = spec.rewards[0].model_copy(update={"name": "polite", "version": 1, "weight": 0.5})
    spec = spec.model_copy(update={"rewards": [*spec.rewards, reward]})
    return seed.make_run(ada, "a | b `c` <d>", state="completed", steps=20, spec=spec, rollouts=False).checkpoints.get()


@pytest.mark.django_db
def test_a_card_says_how_the_checkpoint_came_about(checkpoint: Checkpoint) -> None:
    files = card_files(checkpoint)
    readme = files["README.md"]
    header = yaml.safe_load(readme.split("---")[1])
    assert (header["library_name"], "lora" in header["tags"]) == ("peft", True)
    assert "base_model" not in header  # a built-in model's name is no id of the hub
    assert r"# a \| b \`c\` \<d\>, step 20" in readme
    assert "`reasoning_gym:products`, 500 rows, seed 42" in readme
    digest = re.search(r"\[`polite`\]\(rewards/polite-v1\.py\) \| 1 \| 0\.5 \| `([0-9a-f]{64})`", readme)
    assert digest is not None
    assert files["rewards/polite-v1.py"].startswith("def polite")
    assert RunSpec.from_yaml(files["run.yaml"]) == checkpoint.run.run_spec()
    assert f"{checkpoint.reward:.4g}" in readme
    assert "PeftModel.from_pretrained" in readme
    assert "PeftModel" not in card_files(checkpoint, merged=True)["README.md"]
    picture = ElementTree.fromstring(files["reward_curve.svg"])
    line = picture.find("{http://www.w3.org/2000/svg}polyline")
    assert line is not None
    assert len(line.attrib["points"].split()) == 20
    assert "this checkpoint" in files["reward_curve.svg"]


@pytest.mark.django_db
def test_the_python_of_a_card_is_python_whatever_the_model_is_called(checkpoint: Checkpoint) -> None:
    checkpoint.run.spec["model"]["path"] = 'a"; import os #'
    code = card_files(checkpoint)["README.md"].split("```python")[1].split("```")[0]
    compile(code, "card", "exec")
    assert "import os #'" in code


@pytest.mark.django_db
@pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume asynchronous")
def test_the_card_goes_with_what_is_downloaded_for_use(as_ada: Client, checkpoint: Checkpoint) -> None:
    for part, there in (("model", True), ("all", True), ("resume", False)):
        answer = as_ada.get(f"/checkpoints/{checkpoint.pk}/{part}.zip")
        content = b"".join(answer)  # type: ignore[arg-type]
        assert answer.headers["Content-Length"] == str(len(content))
        archive = zipfile.ZipFile(io.BytesIO(content))
        names = [name.partition("/")[2] for name in archive.namelist()]
        assert ("reward_curve.svg" in names) == there
        assert names.count("README.md") == int(there)
        if there:
            assert b"Reward" in archive.read(next(name for name in archive.namelist() if name.endswith("README.md")))


@pytest.mark.django_db
def test_the_card_is_looked_at_safely(as_ada: Client, checkpoint: Checkpoint) -> None:
    answer = as_ada.get(f"/checkpoints/{checkpoint.pk}/card/reward_curve.svg")
    assert answer.headers["Content-Type"] == "image/svg+xml"
    assert answer.headers["Content-Disposition"] == "attachment"
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert as_ada.get(f"/checkpoints/{checkpoint.pk}/card/nothing").status_code == 404
    assert Client().get(f"/checkpoints/{checkpoint.pk}/card/README.md").status_code == 302


@pytest.mark.django_db
def test_a_run_with_settings_of_another_time_has_a_card_too(checkpoint: Checkpoint) -> None:
    checkpoint.run.spec["unknown"] = 1
    assert "| Run |" in card_files(checkpoint)["README.md"]


@given(numbers, st.integers(-5, 10**9))
def test_a_curve_of_any_values_is_a_picture(pairs: list[tuple[int, float]], marked: int) -> None:
    pairs.sort(key=lambda pair: pair[0])
    picture = ElementTree.fromstring(svg([x for x, _ in pairs], [y for _, y in pairs], marked))
    assert picture.tag.endswith("svg")
    assert "nan" not in ElementTree.tostring(picture).decode()
