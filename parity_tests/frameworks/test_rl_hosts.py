"""The snippets of docs/rl_hosts.md run, on stand-ins for what they import of each project.

They were run against the code of the projects too; the page says what, with which result.
"""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from composer_plugins.kernels.policy import dppo_tv
from parity_tests.frameworks.snippets import ADVANTAGES, LOGPROBS, MASK, OLD, check_trains, stand_in
from parity_tests.rigs.paths import ROOT

PAGE = (ROOT / "docs/rl_hosts.md").read_text()
SECTIONS = {section.split("\n")[0]: section for section in PAGE.split("\n## ")[1:]}


def program(section: str) -> dict[str, Any]:
    """The names that the first Python snippet of a section defines."""
    (snippet, *_) = re.findall(r"```python\n(.*?)```", SECTIONS[section], re.DOTALL)
    exec(snippet, names := {})
    return names


def test_the_table_names_every_section() -> None:
    assert re.findall(r"^\| \[(.*?)\]", PAGE, re.MULTILINE) == [*SECTIONS]
    assert all("**Run.**" in text for text in SECTIONS.values())


def test_the_estimator_of_rllm(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, Any] = {}

    def register_rllm_adv_estimator(name: str) -> Any:
        return lambda function: known.setdefault(name, function)

    module = "rllm.trainer.algorithms.advantage"
    stand_in(monkeypatch, module, register_rllm_adv_estimator=register_rllm_adv_estimator)
    program("rLLM")
    rewards = [np.array([1.0, 0.0, 0.0, 1.0]), np.array([0.0, 1.0])]
    advantages, returns = known["maxrl"](rewards, None, traj_groups=[])
    assert advantages is returns and [len(one) for one in advantages] == [4, 2]
    np.testing.assert_allclose(advantages[0], [1.0, -1.0, -1.0, 1.0])  # (R - mean) / mean


def test_the_worker_of_roll(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "roll.pipeline.rlvr.actor_pg_worker", ActorPGWorker=object)
    worker = program("ROLL")["DPPOWorker"]()
    worker._cached_metrics = {"response_mask": MASK.long(), "old_log_probs": OLD}
    logprobs = LOGPROBS.clone().requires_grad_()
    loss = worker._compute_vanilla_pg_loss(None, logprobs, ADVANTAGES)
    assert torch.equal(loss, dppo_tv(logprobs, OLD, ADVANTAGES, MASK).loss)
    check_trains(loss.sum(), logprobs)


class SwiftTrainer:
    """What a subclass of ms-swift's GRPOTrainer relies on: two methods, and the accelerator."""

    accelerator = SimpleNamespace(num_processes=2)

    def _get_per_token_logps_and_entropies(self, logps: Tensor, *_: Any) -> tuple[Tensor, None]:
        return logps, None

    def _compute_loss_and_metrics(self, model: Any, inputs: Any, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        logps, _ = self._get_per_token_logps_and_entropies(inputs)
        return (logps * batch.advantages).sum(), {"of": "ms-swift"}

    def _undo_gradient_accumulation_scaling(self, loss: Tensor) -> Tensor:
        return 4 * loss


@pytest.mark.parametrize("old", [OLD, None])
def test_the_trainer_of_ms_swift(monkeypatch: pytest.MonkeyPatch, old: Tensor | None) -> None:
    mapping = {"grpo": "swift.rlhf_trainers.GRPOTrainer"}
    stand_in(monkeypatch, "swift.rlhf_trainers", GRPOTrainer=SwiftTrainer)
    stand_in(monkeypatch, "swift.trainers", TrainerFactory=SimpleNamespace(TRAINER_MAPPING=mapping))
    trainer = program("ms-swift")["DPPOTrainer"]()
    assert mapping == {"grpo": "my_swift.DPPOTrainer"}
    logprobs = LOGPROBS.clone().requires_grad_()
    batch = SimpleNamespace(
        advantages=ADVANTAGES, completion_mask=MASK.long(), old_per_token_logps=old, num_items_in_batch=18.0
    )
    loss, metrics = trainer._compute_loss_and_metrics(None, logprobs, batch)
    known = logprobs.detach() if old is None else old
    wanted = 4 * dppo_tv(logprobs, known, ADVANTAGES, MASK).loss.sum() / 9
    assert torch.equal(loss, wanted) and metrics == {"of": "ms-swift"} and batch.advantages is ADVANTAGES
    check_trains(loss, logprobs)


def test_the_engine_of_areal(monkeypatch: pytest.MonkeyPatch) -> None:
    class FSDPPPOActor:
        def train_batch(self, input_: Any, loss_fn: Any, loss_weight_fn: Any) -> tuple[Any, Any]:
            return loss_fn, loss_weight_fn

    stand_in(monkeypatch, "areal.engine", FSDPPPOActor=FSDPPPOActor)
    names = program("AReaL")
    loss_fn, weight = names["DPPOActor"]().train_batch({}, "theirs", "weight")
    assert loss_fn is names["dppo"] and weight == "weight"
    packed = LOGPROBS.flatten().clone().requires_grad_()
    data = {"loss_mask": MASK.flatten().int(), "logprobs": OLD.flatten(), "advantages": ADVANTAGES.flatten()}
    loss = loss_fn(packed, torch.zeros(12), data, vocab_min_logits=None, vocab_max_logits=None)
    check_trains(loss, packed, MASK.flatten())
