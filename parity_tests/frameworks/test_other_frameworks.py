"""The snippets of docs/other_frameworks.md run, on stand-ins for what they import of each project."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from parity_tests.frameworks.snippets import ADVANTAGES, LOGPROBS, MASK, OLD, check_trains, stand_in
from parity_tests.rigs.paths import ROOT

PAGE = (ROOT / "docs/other_frameworks.md").read_text()
SECTIONS = {section.split("\n")[0]: section for section in PAGE.split("\n## ")[1:]}
SNIPPETS = {name: re.findall(r"```python\n(.*?)```", text, re.DOTALL) for name, text in SECTIONS.items()}


def program(section: str) -> dict[str, Any]:
    """The names that the first snippet of a section defines."""
    exec(SNIPPETS[section][0], names := {})
    return names


def test_every_project_of_the_table_has_a_section_and_the_other_way_round() -> None:
    rows = re.findall(r"^\| \[(.*?)\]\(#(.*?)\)", PAGE, re.MULTILINE)
    assert [name for name, _ in rows] == [*SECTIONS]
    assert all(anchor == name.lower() for name, anchor in rows)
    for name, text in SECTIONS.items():
        heads = re.findall(r"^\*\*(.*?)\.\*\*", text, re.MULTILINE)
        assert heads == ["Hook", "Today", "What would change our mind"], name


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


class Scored:
    """The two helpers of NeMo-Aligner's model."""

    ref_policy_kl_penalty = 0.3

    def get_reduced_masked_logps(self, logps: Tensor, labels: Tensor, *_: Any) -> Tensor:
        return (logps * (labels > -1)).sum(-1)

    def split_output_tensor(self, output: Tensor) -> tuple[Tensor, Tensor]:
        return output[: len(output) // 2], output[len(output) // 2 :]


def test_the_nemo_aligner_method(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "nemo_aligner.models.nlp.gpt.megatron_gpt_dpo_model"
    stand_in(monkeypatch, module, MegatronGPTDPOModel=Scored)
    logprobs, mask = LOGPROBS[:2].clone().requires_grad_(), MASK[:2]
    labels = torch.where(mask, 1, -100)
    loss, accuracy = program("NeMo-Aligner")["RobustDPO"]().loss_func(logprobs, OLD[:2], labels, None)
    assert accuracy == 1.0  # the chosen one has more tokens, each 0.1 above the reference
    check_trains(loss, logprobs, mask)


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


def test_the_deepspeed_chat_method(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "dschat.rlhf.ppo_trainer", DeepSpeedPPOTrainer=object)
    logprobs = LOGPROBS.clone().requires_grad_()
    loss = program("DeepSpeed-Chat")["Trainer"]().actor_loss_fn(logprobs, OLD, ADVANTAGES, MASK.long())
    check_trains(loss, logprobs)
