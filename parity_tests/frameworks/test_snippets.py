"""The snippets of docs/other_frameworks.md run, on stand-ins for what they import.

They were run against the code of the projects too; the page says what, with which result.
"""

import re
import sys
from itertools import accumulate
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from composer_plugins.kernels.policy import dppo_tv
from parity_tests.rigs.paths import ROOT

PAGE = (ROOT / "docs/other_frameworks.md").read_text()
SECTIONS = {one.split("\n")[0]: one for one in PAGE.split("\n## ")[1:]}
MASK = torch.arange(4) < torch.tensor([[4], [2], [3]])
LOGPROBS = torch.full((3, 4), -1.0)
OLD = LOGPROBS - 0.1
ADVANTAGES = torch.tensor([[1.0], [-1.0], [0.5]]).expand(3, 4)


def program(section: str) -> dict[str, Any]:
    """The names that the first Python snippet of a section defines."""
    exec(re.findall(r"```python\n(.*?)```", SECTIONS[section], re.DOTALL)[0], names := {})
    return names


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **names: Any) -> None:
    """A module of this name, and its parents, in sys.modules."""
    for parent in accumulate(name.split("."), "{}.{}".format):
        if parent not in sys.modules:
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    vars(sys.modules[name]).update(names)


def check_trains(loss: Tensor, inputs: Tensor, mask: Tensor = MASK) -> None:
    """The loss is a finite number whose gradient is 0 at masked tokens and nowhere else."""
    (gradient,) = torch.autograd.grad(loss, inputs)
    assert loss.dim() == 0 and loss.isfinite()
    assert torch.equal(gradient != 0, mask.expand_as(gradient))


def test_the_table_of_the_page_names_its_sections() -> None:
    assert re.findall(r"^\| \[(.*?)\]", PAGE, re.MULTILINE) == [*SECTIONS]


def test_the_torchforge_function(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "forge.rl.loss", LossOutput=lambda loss, metrics: SimpleNamespace(loss=loss))
    logits = torch.randn(3, 4, 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    targets = torch.where(MASK, 1, -100)
    output = program("TorchForge")["dppo"](
        logits,
        target_ids=targets,
        advantages=ADVANTAGES,
        generator_logprobs=logits.detach().log_softmax(-1)[..., 1],
        loss_mask=MASK.float(),
        ref_logprobs=None,
    )
    check_trains(output.loss, logits, MASK.unsqueeze(-1))


def test_the_openrlhf_method(monkeypatch: pytest.MonkeyPatch) -> None:
    def aggregate_loss(loss: Tensor, mask: Tensor, token_level: bool, *, dp_size: int, **_: Any) -> Tensor:
        return (loss * mask).sum() * dp_size

    class PolicyLoss:
        token_level_loss = True
        forward: Any

    stand_in(monkeypatch, "openrlhf.models.loss", PolicyLoss=PolicyLoss, aggregate_loss=aggregate_loss)
    program("OpenRLHF")["install"]()
    logprobs = LOGPROBS.clone().requires_grad_()
    outputs = PolicyLoss().forward(
        logprobs,
        OLD,
        ADVANTAGES,
        action_mask=MASK.long(),
        rollout_log_probs=OLD,
        dp_size=2,
        batch_num_tokens=9,
    )
    assert len(outputs) == 5 and outputs[2].item() == pytest.approx(-0.1)
    check_trains(outputs[0], logprobs)


def test_the_unsloth_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNSLOTH_RETURN_LOGITS", "0")  # the snippet sets it
    logits = torch.zeros(3, 5, 7, requires_grad=True)
    loss = program("Unsloth")["loss_of"](
        lambda **_: SimpleNamespace(logits=logits),
        torch.ones(3, 5, dtype=torch.long),
        torch.ones(3, 5),
        OLD,
        ADVANTAGES[:, :1],
        MASK,
    )
    check_trains(loss, logits, torch.cat([MASK, torch.zeros(3, 1, dtype=torch.bool)], 1).unsqueeze(-1))


def test_the_llama_factory_method(monkeypatch: pytest.MonkeyPatch) -> None:
    class CustomDPOTrainer:
        beta = 0.1
        compute_preference_loss: Any

    runs = []
    stand_in(monkeypatch, "llamafactory.train.dpo.trainer", CustomDPOTrainer=CustomDPOTrainer)
    stand_in(monkeypatch, "llamafactory.train.tuner", run_exp=lambda: runs.append(1))
    program("LLaMA-Factory")
    scores = torch.tensor([-1.0, -2.0], requires_grad=True)
    zero = torch.zeros(2)
    losses, chosen, rejected = CustomDPOTrainer().compute_preference_loss(scores, zero, zero, zero)
    assert runs == [1] and losses.shape == (2,)
    assert torch.allclose(chosen, torch.tensor([-0.1, -0.2])) and not chosen.requires_grad
    assert torch.equal(rejected, zero)
    check_trains(losses.mean(), scores, torch.tensor([True, True]))


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
