"""A policy loss with ref_logprobs gets those of TRL, or of the initial policy, which the trainer loads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from transformers import AutoModelForCausalLM, TrainerCallback

from composer_plugins.adapters.trl_mixin import ComposerGRPOTrainer
from composer_plugins.errors import ComposerWarning, ConfigError
from parity_tests.rigs import by_rows, own_loss, tiny

TRLS_KL = {"beta": 0.3, "use_bias_correction_kl": False}  # k3, without the ratio as its factor
STEPS = 2  # at the first the policy is the reference, and the KL and its gradient are 0


@pytest.fixture(autouse=True)
def my_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_loss.written(tmp_path, monkeypatch)


class ByHand(TrainerCallback):
    """Before each optimizer step, the formula's value and gradient beside those of the trainer."""

    def __init__(self, made: Any, initial: Any, betas: float) -> None:
        self.made, self.initial, self.betas = made, initial, betas
        self.batches, self.values = list[dict[str, Any]](), list[Tensor]()
        self.apart, self.kls = list[tuple[float, float]](), list[float]()
        compute = made._compute_loss

        def seen(model: Any, inputs: dict[str, Any]) -> Tensor:
            loss: Tensor = compute(model, inputs)
            self.batches.append(inputs)
            self.values.append(loss.detach())
            return loss

        made._compute_loss = seen

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        losses, kls = list[Tensor](), list[Tensor]()
        for inputs in self.batches:
            for row, advantage in enumerate(inputs["advantages"]):
                own = by_rows.logprobs(self.made.model, inputs, row)
                with torch.no_grad():
                    reference = by_rows.logprobs(self.initial, inputs, row)
                losses.append(own_loss.by_hand(own, reference, advantage, self.betas))
                kls.append(own.detach() - reference)
        expected = torch.cat(losses).mean()
        weights = [p for p in self.made.model.parameters() if p.requires_grad]
        wanted = torch.cat([x.flatten() for x in torch.autograd.grad(expected, weights)])
        found = torch.cat([p.grad.flatten() for p in weights if p.grad is not None])
        size = torch.cat(losses).detach().abs().mean()  # the losses of a batch nearly cancel
        value = float((sum(self.values) - expected.detach()).abs() / size)
        self.apart.append((value, tiny.relative_difference(wanted, found)))
        self.kls.append(float(torch.cat(kls).abs().max()))
        self.batches.clear()
        self.values.clear()


def by_hand(made: Any, initial: Any, betas: float = own_loss.BETA) -> ByHand:
    """Train, and return what was compared."""
    compared = ByHand(made, initial.eval(), betas)
    made.add_callback(compared)
    made.train()
    assert len(compared.apart) == STEPS and compared.kls[-1] > 0.01
    return compared


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_reinforce_with_a_kl_equals_its_formula_over_micro_batches(parts: int) -> None:
    sizes = {"per_device_train_batch_size": 16 // parts, "gradient_accumulation_steps": parts}
    made = tiny.trainer(policy=own_loss.NAME, dtype=torch.float64, max_steps=STEPS, **sizes)
    assert made.beta == made.args.beta == 0
    for value, gradient in by_hand(made, tiny.model(torch.float64)).apart:
        assert value <= tiny.FLOAT32 and gradient <= tiny.FLOAT32
    assert not [name for entry in made.state.log_history for name in entry if name == "kl"]  # TRL's own


def test_with_beta_trls_kl_is_added_and_a_warning_says_so() -> None:
    options = {"policy": own_loss.NAME, "dtype": torch.float64, "max_steps": STEPS} | TRLS_KL
    with pytest.warns(ComposerWarning, match="^beta: it is 0.3, so TRL adds its own KL, .*or set beta to 0"):
        made = tiny.trainer(**options)
    for value, gradient in by_hand(made, tiny.model(torch.float64), own_loss.BETA + 0.3).apart:
        assert value <= tiny.FLOAT32 and gradient <= tiny.FLOAT32


def test_with_an_adapter_the_model_without_it_is_the_reference() -> None:
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_alpha=64)
    options = {"policy": own_loss.NAME, "max_steps": STEPS, "dtype": torch.float64, "learning_rate": 0.1}
    made = tiny.trainer(**options, arguments={"peft_config": adapter})
    assert made.ref_model is None
    for value, gradient in by_hand(made, tiny.model(torch.float64)).apart:
        assert value <= tiny.FLOAT32 and gradient <= 10 * tiny.FLOAT32  # LoRA's weights stay in float32


def test_an_adapter_that_has_been_trained_is_refused() -> None:
    adapter = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    with pytest.raises(ConfigError, match="is not the initial policy"):
        tiny.trainer(policy=own_loss.NAME, arguments={"peft_config": adapter})


def test_one_copy_is_the_reference_of_the_policy_and_of_the_pairs() -> None:
    made = tiny.trainer(policy=own_loss.NAME, replay_weight=1.0, replay_loss="dpo")
    assert made.ref_model is made._replay.reference.model is not made.model
    assert not any(one.requires_grad for one in made.ref_model.parameters())


def test_an_optional_reference_is_passed_where_trl_has_one(tmp_path: Path) -> None:
    with (tmp_path / "my_losses.py").open("a") as file:
        file.write("""
def optional(logprobs, advantages, mask, *, ref_logprobs=None):
    reference = logprobs.detach() if ref_logprobs is None else ref_logprobs
    return reinforce_kl(logprobs, reference, advantages, mask, beta=0.0 if ref_logprobs is None else 0.1)
""")
    without = tiny.trainer(policy="my_losses:optional", dtype=torch.float64, max_steps=STEPS)
    by_hand(without, tiny.model(torch.float64), 0.0)
    assert without.ref_model is None
    with pytest.warns(ComposerWarning, match="^beta: .*; leave the KL out of the loss$"):
        made = tiny.trainer(policy="my_losses:optional", dtype=torch.float64, max_steps=STEPS, **TRLS_KL)
    assert max(max(one) for one in by_hand(made, tiny.model(torch.float64), 0.4).apart) <= tiny.FLOAT32


def test_trls_kl_of_a_model_without_a_path_is_to_the_initial_policy(tmp_path: Path) -> None:
    """TRL alone raises OSError: it loads its reference from the path."""
    tiny.model().save_pretrained(tmp_path)
    with_path = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    found, wanted = (
        tiny.gradients(tiny.trainer(policy_model=one, beta=0.4, max_steps=STEPS)) for one in (None, with_path)
    )
    assert all(map(torch.equal, found, wanted))
    assert not torch.equal(found[1], tiny.gradients(tiny.trainer(max_steps=STEPS))[1])


def test_a_loss_that_casts_the_head_has_no_frozen_copy() -> None:
    with pytest.raises(ConfigError, match="^cast_lm_head_to_fp32: "):
        tiny.trainer(policy=own_loss.NAME, cast_lm_head_to_fp32=True)


def test_a_constructor_that_fails_leaves_the_options_as_they_were() -> None:
    """TRL's constructor sees beta 0 where the reference is ours, and a notebook may call it again."""
    args = tiny.config(beta=0.3)
    with pytest.raises(ValueError):
        ComposerGRPOTrainer(
            model=tiny.model(),
            args=args,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            train_dataset=None,
            processing_class=tiny.tokenizer(),
        )
    assert (args.beta, args.loss_type) == (0.3, None)
