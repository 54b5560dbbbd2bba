"""With PEFT the initial policy is the model with its adapter switched off: no copy is made."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from composer_plugins.diagnosis import ComposerWarning
from composer_plugins.errors import ConfigError
from parity_tests.support import tiny


def lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"])


def test_the_teacher_and_the_reference_are_the_model_without_its_adapter() -> None:
    base = tiny.model().eval()
    made = tiny.trainer(hint_weight=1.0, replay_weight=1.0, max_steps=3, arguments={"peft_config": lora()})
    made.train()  # so that the policy is no longer its base
    assert made._hint.teacher.model is made._replay.reference.model is made.model
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


@pytest.mark.parametrize("options", [{"init_lora_weights": "pissa"}, {"bias": "all"}], ids=str)
def test_an_adapter_whose_absence_is_not_the_initial_policy_is_refused(options: dict[str, str]) -> None:
    adapter = LoraConfig(r=4, target_modules=["q_proj"], **options)
    with pytest.raises(ConfigError, match="the model without its adapter is not the initial policy"):
        tiny.trainer(hint_weight=1.0, arguments={"peft_config": adapter})


def test_a_teacher_without_its_adapter_sees_no_dropout() -> None:
    """The policy is in training mode when the teacher runs; two forward passes must still agree."""
    adapter = LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.5)
    with pytest.warns(ComposerWarning, match="collapsed"):
        live = tiny.trainer(hint_weight=1.0, hint_teacher="live", arguments={"peft_config": adapter})
    inputs = tiny.batch(live)
    for parameter in live.model.parameters():
        parameter.data.add_(0.01)  # so that the adapter, and its dropout, matter
    ids, mask = inputs["hint_prompt_ids"], inputs["hint_prompt_mask"]
    with live._hint.teacher.in_eval_mode() as teacher:
        first, second = (teacher(input_ids=ids, attention_mask=mask).logits for _ in range(2))
    assert torch.equal(first, second)
    assert teacher.training, "the policy was left in evaluation mode"


def test_an_ema_of_a_peft_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="hint_teacher: it is 'ema', which keeps a copy of all weights"):
        tiny.trainer(hint_weight=1.0, hint_teacher="ema", arguments={"peft_config": lora()})


def test_a_model_that_comes_with_an_adapter_is_refused() -> None:
    with pytest.raises(ConfigError, match="it has an adapter already"):
        tiny.trainer(policy_model=get_peft_model(tiny.model(), lora()), replay_weight=1.0)
