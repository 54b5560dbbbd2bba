"""Recorded batches: what is written, what is read back, and that recording never stops a run."""

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from composer_plugins.batches import Recorder, load, save, steps
from composer_plugins.errors import ComposerWarning, ConfigError, DataError
from composer_plugins.losses.choosing import choose
from parity_tests.rigs.paths import ROOT


def tensors(rows: int = 3, tokens: int = 5, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    drawn = torch.rand(rows, tokens, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)
    mask = torch.arange(tokens).expand(rows, tokens) < torch.tensor([[2], [tokens], [0]])[:rows]
    lower = {"logprobs": -drawn, "old_logprobs": -drawn - 0.2, "advantages": drawn[:, :1] - 0.5}
    return {name: x.to(dtype) for name, x in lower.items()} | {"mask": mask}


def recorder(folder: object, every: int = 1) -> Any:
    choice, about = choose("policy", "dapo", {"clip_high": 0.3}), {"framework": "f", "version": "1"}
    return Recorder.of(str(folder) if folder else None, every, choice, **about, mode="token-mean")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    given = tensors(dtype=dtype) | {"ids": torch.arange(15).view(3, 5), "group_ids": torch.tensor([0, 0, 1])}
    given["logprobs"][0, 0] = torch.nan
    given |= {"ref_logprobs": given["logprobs"], "entropies": given["advantages"].expand(3, 5)}  # shared
    logits = {"student_logits": torch.zeros(3, 5, 9), "rewards": None}
    file = save(tmp_path, given | logits, choice="cispo@trl", step=7, counts={"num_tokens": torch.tensor(9)})
    (batch,) = load(file)
    assert batch.tensors.keys() == given.keys()
    for name, x in given.items():
        back = batch.tensors[name]
        assert back.dtype == x.dtype and torch.equal(back.isnan(), x.isnan()), name
        assert torch.equal(back.nan_to_num(), x.nan_to_num()), name
    about = {"name": "cispo@trl", "mode": "token-mean", "step": 7, "counts": {"num_tokens": 9}}
    assert about.items() <= batch.about.model_dump().items()


def test_a_recorder_writes_every_nth_step_and_what_it_is_given(tmp_path: Path) -> None:
    record = recorder(tmp_path, every=3)
    for step in (5, 5, 6, 7, 8, 9):
        given = tensors()
        loss = given["logprobs"].requires_grad_().sum()
        record(given | {"not_an_input": 1}, loss=loss, factor=2, step=step)
    assert steps(tmp_path) == [5, 8] and len(load(tmp_path, step=5)) == 2
    about = load(tmp_path, step=8)[0].about
    assert about.params == {"clip_high": 0.3} and about.factor == 2 and about.framework == "f"
    assert about.loss == pytest.approx(tensors()["logprobs"].sum().item())
    assert recorder(None) is None
    unknown = Recorder.of(str(tmp_path / "own"), 1, "", framework="f", version="1", mode="")
    assert unknown is not None
    unknown(tensors())
    assert load(tmp_path / "own")[0].about.name == ""
    without = recorder(tmp_path / "calls", every=2)
    for _ in range(4):
        without(tensors())
    assert steps(tmp_path / "calls") == [0, 2]
    with pytest.raises(ConfigError, match="record_every: it is 0; set"):
        recorder(tmp_path, every=0)


FAULTS = {"pathlib.Path.write_bytes": OSError(28, "No space left on device")}
FAULTS |= {"pathlib.Path.mkdir": PermissionError(13, "Permission denied"), "os.getpid": RuntimeError()}


@pytest.mark.parametrize("name", [*FAULTS, "safetensors.torch"])
def test_a_recorder_that_cannot_write_warns_once(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    record, fault = recorder(tmp_path), Mock(side_effect=FAULTS.get(name))
    with monkeypatch.context() as patch:
        patch.setattr(name, fault) if name in FAULTS else patch.setitem(sys.modules, name, None)
        with pytest.warns(ComposerWarning, match="The run goes on, and records nothing more"):
            record(tensors())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        record(tensors())
    assert not [*tmp_path.rglob("*.*")]


PROGRAM = "import sys, torch; from composer_plugins.batches import save\n"
PROGRAM += "for i in range(3): save(sys.argv[1], {'mask': torch.ones(1, 2).bool()}, step=i)"


@pytest.mark.slow
def test_two_processes_of_one_rank_write_no_file_twice(tmp_path: Path) -> None:
    started = [subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], cwd=ROOT) for _ in range(2)]
    assert [one.wait() for one in started] == [0, 0]
    assert len(load(tmp_path)) == 6 and steps(tmp_path) == [0, 1, 2]
    assert len({batch.about.process for batch in load(tmp_path, step=1)}) == 2


WRONG = [{"schema_version": 2}, {"counts": {"num_token": 1.0}}, {"new": 1}, {"step": "three"}]


@pytest.mark.parametrize("changed", WRONG, ids=lambda one: [*one][0])
def test_metadata_that_is_not_known_is_an_error(changed: dict[str, Any], tmp_path: Path) -> None:
    file = save(tmp_path, tensors(), choice="dapo")
    about = json.loads(load(file)[0].about.model_dump_json())
    save_file(load_file(file), file, {"composer_plugins": json.dumps(about | changed)})
    with pytest.raises(DataError, match=rf"it cannot be read: .*{[*changed][0]}.*; write it with"):
        load(file)


def test_what_is_no_record_is_an_error(tmp_path: Path) -> None:
    file = save(tmp_path, tensors(), step=2)
    with pytest.raises(DataError, match=r"no batch of step 9 is there; .* the steps that it has: \[2\]"):
        load(tmp_path, step=9)
    save_file({"mask": torch.zeros(1)}, file)
    with pytest.raises(
        DataError, match="it cannot be read: .*it has no metadata of composer_plugins; write it with"
    ):
        load(tmp_path)
    file.write_text("no tensors")
    with pytest.raises(DataError, match="it cannot be read: SafetensorError"):
        load(tmp_path)
    with pytest.raises(DataError, match="no recorded batch is there; name another folder"):
        load(tmp_path / "nothing")
    with pytest.raises(DataError, match="logprob: it is not an input of a loss"):
        save(tmp_path, {"logprob": torch.zeros(1)})


def test_prime_rls_token_export_is_read(tmp_path: Path) -> None:
    """The fields are those that trainer/rl/token_export.py of commit 559b447 writes."""
    lines = []
    for micro_step, length in ((0, 3), (0, 2), (1, 4)):
        one: dict[str, Any] = {"export_step": 5, "step": 5, "rank": 1, "micro_step": micro_step}
        one |= {name: [-0.5] * length for name in ("trainer_logprobs", "inference_logprobs", "advantages")}
        one |= {"token_ids": [*range(length)], "loss_mask": [True] * length, "rewards": [1.0] * length}
        lines.append(one | {"entropy": [None] * length})
    lines[0]["losses"] = [{"rl": {"advantage": 1.0, "mask": i > 0}, "echo": {"mask": True}} for i in range(3)]
    file = tmp_path / "step_5" / "rank_1.jsonl"
    file.parent.mkdir()
    file.write_text("\n".join(map(json.dumps, lines)))
    first, second = load(tmp_path, step=5)
    assert first.tensors["mask"].tolist() == [[False, True, True], [True, True, False]]
    assert first.tensors["entropies"][0].isnan().all() and second.tensors["ids"].tolist() == [[0, 1, 2, 3]]
    assert (first.about.framework, first.about.rank, first.about.name) == ("prime-rl", 1, "")


def test_miles_dump_is_read(tmp_path: Path) -> None:
    """The columns are those that miles/dashboard/dump_reader.py of commit 31f1ca9 reads."""

    def column(of: float) -> list[Tensor]:
        return [torch.full((3,), of), torch.full((2,), of)]

    columns = {"tokens": [torch.arange(7), torch.arange(5)], "response_lengths": [3, 2]}
    columns |= {"log_probs": column(-1.0), "rollout_log_probs": column(-1.1), "advantages": column(0.5)}
    columns |= {"loss_masks": [torch.tensor([1, 0, 1]), torch.tensor([1, 1])]}
    file = tmp_path / "train_data" / "4_0.pt"
    file.parent.mkdir()
    torch.save({"rollout_id": 4, "rank": 0, "rollout_data": columns}, file)
    (batch,) = load(tmp_path, step=4)
    assert batch.tensors["ids"].tolist() == [[4, 5, 6], [3, 4, 0]]
    assert batch.tensors["mask"].tolist() == [[True, False, True], [True, True, False]]
    assert torch.equal(batch.tensors["logprobs"], batch.tensors["old_logprobs"])
    columns["advantages"] = [torch.zeros(3), torch.zeros(1)]
    torch.save({"rollout_id": 4, "rank": 0, "rollout_data": columns}, file)
    with pytest.raises(DataError, match="has a part of each response, as with context parallelism"):
        load(tmp_path)
