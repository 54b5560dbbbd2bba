"""Which models a run holds: the policy, and one frozen copy wherever the same weights serve."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from parity_tests.rigs import tiny

ALL = {"hint_weight": 0.7, "replay_weight": 0.3, "beta": 0.4, "max_steps": 2, "dtype": torch.float64}


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """The initial model on disk: TRL loads its reference model from there."""
    tiny.model(torch.float64).save_pretrained(tmp_path)
    return str(tmp_path)


def load(path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)


def held(**options: Any) -> tuple[Any, int]:
    """A trainer, and the number of models that its constructor made."""

    def models() -> list[Any]:
        gc.collect()
        return [one for one in gc.get_objects() if type(one) is Qwen3ForCausalLM]

    before = models()
    made = tiny.trainer(**options)
    return made, len(models()) - len(before)  # `before` keeps alive what it has counted


@pytest.mark.parametrize("as_path", [True, False], ids=["path", "object"])
def test_trls_reference_model_is_the_base_teacher_and_the_replay_reference(saved: str, as_path: bool) -> None:
    options = ALL | {"model_init_kwargs": {"dtype": torch.float64} if as_path else None}
    made, models = held(policy_model=saved if as_path else load(saved), **options)
    assert made.ref_model is made._hint.teacher.model is made._replay.reference.model
    assert models == (2 if as_path else 1)  # the policy of a path, and the reference


def test_one_copy_gives_the_gradient_of_two(saved: str) -> None:
    """TRL's reference is a copy of its own where it is to be synchronised, here after more steps than run."""
    one = tiny.trainer(policy_model=load(saved), **ALL)
    shared = tiny.gradients(one)
    two = tiny.trainer(policy_model=load(saved), **ALL, sync_ref_model=True, ref_model_sync_steps=99)
    assert two._hint.teacher.model is not two.ref_model
    assert all(map(torch.equal, shared, tiny.gradients(two)))


def test_a_reference_model_that_moves_is_not_the_base_teacher(saved: str) -> None:
    made = tiny.trainer(policy_model=load(saved), **ALL, sync_ref_model=True, ref_model_sync_steps=1)
    made.train()
    initial = list(load(saved).parameters())
    assert all(map(torch.equal, made._hint.teacher.model.parameters(), initial))
    assert not all(map(torch.equal, made.ref_model.parameters(), initial))


def test_a_reference_model_with_other_weights_than_the_policy_is_not_the_base_teacher(saved: str) -> None:
    """TRL loads it from the path that the model object came from, whatever was done to the object."""
    policy = load(saved)
    policy.lm_head.weight.data[3, 5] += 1e-9
    made = tiny.trainer(policy_model=policy, **ALL)
    assert made._hint.teacher.model is made._replay.reference.model is not made.ref_model
    assert all(map(torch.equal, made._hint.teacher.model.parameters(), policy.parameters()))


@pytest.mark.parametrize("teacher", ["base", "ema"])
@pytest.mark.parametrize("peft", [True, False], ids=["lora", "full"])
def test_base_teacher_and_reference_are_one_copy_and_none_with_an_adapter(peft: bool, teacher: str) -> None:
    adapter = LoraConfig(r=4, target_modules=["q_proj"]) if peft else None
    options = {
        "beta": 0.4 if peft else 0.0,
        "hint_weight": 1.0,
        "hint_teacher": teacher,
        "replay_weight": 1.0,
    }
    made, models = held(**options, policy_model=tiny.model(), arguments={"peft_config": adapter})
    assert models == (0 if peft else 1) and made.ref_model is None
    assert (made._replay.reference.model is made.model) is peft
    assert made._hint.teacher.model is (made.model if teacher == "ema" else made._replay.reference.model)


def test_without_a_channel_that_needs_it_trls_reference_model_is_left_as_it_is(saved: str) -> None:
    made = tiny.trainer(policy_model=load(saved), beta=0.4, replay_weight=1.0, replay_loss="simpo")
    assert made._replay.reference is None
    assert all(parameter.requires_grad for parameter in made.ref_model.parameters())
