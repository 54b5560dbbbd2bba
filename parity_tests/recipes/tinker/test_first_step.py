"""The first step of SmolLM2 on recorded replies over HTTP, against the formula's gradient of the same LoRA.

The server trains the matrices of a LoRA, and not the model's. So the norm of its gradient is not that of the
file: the formula is differentiated in torch, by PEFT, at the matrices that the server has.
"""

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file

from composer_plugins.recipes.smollm.model import Loaded
from composer_plugins.recipes.tinker.server import served
from parity_tests.rigs import first_step
from parity_tests.rigs.first_step import GROUPS, OBJECTIVES, SIZE, Found, check, expected
from parity_tests.rigs.paths import ROOT
from parity_tests.rigs.tinker_first_step import RANK

pytestmark = pytest.mark.slow

ALPHA = 32  # of the server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the model and the server's files are."""
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def found(smollm: Loaded, folder: Path) -> dict[str, Found]:
    """What the server finds for each loss of the program."""
    saved = folder / "model"
    smollm.model.save_pretrained(saved)
    smollm.tokenizer.save_pretrained(saved)
    with served(saved, folder, sequences=GROUPS * SIZE) as url:
        command = [sys.executable, "-m", "parity_tests.rigs.tinker_first_step", url, str(saved)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=1500)
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: Found(*numbers) for name, numbers in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.fixture(scope="module")
def with_lora(smollm: Loaded, folder: Path, found: dict[str, Found]) -> Any:
    """The model with the LoRA that the server has written beside what it found, in float64."""
    assert found
    (archive,) = folder.glob("checkpoints/*/sampler_weights/*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder / "lora", filter="data")
    weights = load_file(folder / "lora" / "adapter_model.safetensors")
    layers = sorted({name.split(".")[-3] for name in weights})
    model = get_peft_model(smollm.model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=layers))
    assert not set_peft_model_state_dict(model, weights).unexpected_keys
    return model.double().eval()


@pytest.mark.parametrize("objective", ["dapo", "dapo+hint"])
def test_the_first_step_over_http_has_the_loss_and_gradient_of_the_formula(
    found: dict[str, Found], with_lora: Any, objective: str
) -> None:
    norm = first_step.computed(with_lora, first_step.replies(), OBJECTIVES[objective]).grad_norm
    check(found[objective], objective, expected(objective)._replace(grad_norm=norm))
