"""With PEFT the initial policy is the model with its adapter switched off: no copy is made."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from composer_plugins.errors import ConfigError
from parity_tests import tiny


def lora() -> LoraConfig:
    # Both matrices random: the policy starts away from its base, so that the two can be told apart.
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def test_the_teacher_and_the_reference_are_the_model_without_its_adapter() -> None:
    base = tiny.model().eval()
    made = tiny.trainer(hint_weight=1.0, replay_weight=1.0, arguments={"peft_config": lora()})
    assert made._base is None
    inputs = tiny.batch(made)
    answer = inputs["replay_chosen_ids"][0]
    length = int(inputs["replay_chosen_mask"][0].sum())
    ids = answer[inputs["replay_chosen_attention"][0].bool()]
    logprobs = base(ids[None]).logits[0, -length - 1 : -1].log_softmax(-1)
    expected = logprobs.gather(-1, ids[-length:, None]).sum()
    torch.testing.assert_close(inputs["replay_ref_chosen"][0], expected.detach(), rtol=1e-4, atol=1e-4)


def test_only_the_adapter_learns_and_it_stays_on() -> None:
    made = tiny.trainer(hint_weight=1.0, replay_weight=1.0, max_steps=2, arguments={"peft_config": lora()})
    before = {name: p.clone() for name, p in made.model.named_parameters()}
    made.train()
    moved = {name for name, p in made.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved and all("lora_" in name for name in moved)
    ids = torch.tensor([[5, 6, 7]])
    with made.model.disable_adapter():
        without = made.model(ids).logits
    assert not torch.allclose(made.model(ids).logits, without)


def test_an_ema_of_a_peft_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="hint_teacher='ema' keeps a copy of all weights"):
        tiny.trainer(hint_weight=1.0, hint_teacher="ema", arguments={"peft_config": lora()})


def test_a_model_that_comes_with_an_adapter_is_refused() -> None:
    with pytest.raises(ConfigError, match="the policy without it is not the initial policy"):
        tiny.trainer(policy_model=get_peft_model(tiny.model(), lora()), replay_weight=1.0)
