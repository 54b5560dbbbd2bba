"""With PEFT no copy of the model is made: the initial policy is the model with its adapter switched off, and
the ema teacher is the model with an average of the adapter's weights.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoKrConfig, LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file

from composer_plugins.errors import ConfigError
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs import by_rows, tiny

RATE = 0.3
EMA = {"hint_weight": 1.0, "hint_teacher": "ema", "hint_ema_rate": RATE}


def lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"])


def test_the_teacher_and_the_reference_are_the_model_without_its_adapter() -> None:
    base = tiny.model().eval()
    options = {"policy_weight": 0.0, "hint_weight": 1.0, "replay_weight": 1.0, "replay_params": {"beta": 0.3}}
    made = tiny.trainer(**options, max_steps=3, arguments={"peft_config": lora()})
    made.train()  # so that the policy is no longer its base
    inputs = tiny.batch(made)
    expected = by_rows.hint(made, inputs, base) + by_rows.replay(made, base, "dpo")[0]
    tiny.assert_computes(made, inputs, expected, value=1e-5, gradient=1e-5)


def test_adapter_weights_that_a_user_froze_stay_frozen() -> None:
    """PEFT's disable_adapter() makes every weight of an adapter trainable when it ends."""
    model = get_peft_model(tiny.model(), lora())
    for name, weight in model.named_parameters():
        if ".layers.0." in name:
            weight.requires_grad_(False)
    made = tiny.trainer(policy_model=model, hint_weight=1.0, replay_weight=1.0, max_steps=2)
    own = dict(made.model.named_parameters())
    before = {name: (weight.requires_grad, weight.detach().clone()) for name, weight in own.items()}
    (gradient, _) = tiny.gradients(made)
    assert len(gradient) == sum(w.numel() for w in own.values() if w.requires_grad) > 0
    for name, (is_trained, start) in before.items():
        assert own[name].requires_grad == is_trained == (".layers.1." in name and "lora_" in name)
        assert is_trained or torch.equal(own[name], start)


def test_a_run_with_a_frozen_a_of_lora_resumes_from_another_random_a(tmp_path: Path) -> None:
    """LoRA-FA trains B alone. PEFT draws A anew in each process, and the checkpoint has the first run's."""
    options = {"hint_weight": 1.0, "replay_weight": 1.0, "save_strategy": "steps", "save_steps": 2}

    def made(seed: int, **more: Any) -> Any:
        base = tiny.model()
        torch.manual_seed(seed)
        model = get_peft_model(base, lora())
        for name, weight in model.named_parameters():
            weight.requires_grad_(".lora_B." in name)
        return tiny.trainer(policy_model=model, output_dir=str(tmp_path), **options, **more)

    first, resumed = made(1, max_steps=2), made(2, max_steps=3)
    first.train()
    resumed.train(resume_from_checkpoint=True)
    expected = dict(first.model.named_parameters())
    for name, weight in resumed.model.named_parameters():
        assert weight.requires_grad == (".lora_B." in name)
        assert weight.requires_grad or torch.equal(weight, expected[name])


QV = {"target_modules": ["q_proj", "v_proj"]}


def test_a_teacher_without_its_adapter_sees_no_dropout() -> None:
    """The policy is in training mode when the teacher runs; two forward passes must still agree."""
    adapter = LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.5)
    live = tiny.trainer(hint_weight=1.0, hint_teacher="live", arguments={"peft_config": adapter})
    inputs = tiny.batch(live)
    for parameter in live.model.parameters():
        parameter.data.add_(0.01)  # so that the adapter, and its dropout, matter
    ids, mask = inputs["hint_prompt_ids"], inputs["hint_prompt_mask"]
    with live._hint.teacher.in_eval_mode() as teacher:
        first, second = (teacher(input_ids=ids, attention_mask=mask).logits for _ in range(2))
    assert torch.equal(first, second)
    assert teacher.training, "the policy was left in evaluation mode"


def test_the_ema_teacher_averages_a_and_b_of_the_adapter_and_nothing_else() -> None:
    model = tiny.model(torch.float64)
    made = tiny.trainer(policy_model=model, **EMA, max_steps=3, arguments={"peft_config": lora()})
    own = dict(made.model.named_parameters())
    start = {name: p.detach().clone() for name, p in own.items()}
    expected = {name: p.clone() for name, p in start.items() if "lora_" in name}

    class ByHand(tiny.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            for name, weight in expected.items():
                weight += RATE * (own[name].detach() - weight)

    made.add_callback(ByHand())
    made.train()
    teacher, averages = made._hint.teacher, tiny.averages(made)
    assert averages.keys() == expected.keys()
    for name, weight in expected.items():
        assert_parity(averages[name], weight, terms=6)
    after = dict(made.model.named_parameters())
    assert all(after[name] is own[name] for name in own), "the teacher's weights were left in the policy"
    assert all(torch.equal(own[name], start[name]) for name in own if name not in expected)
    twin = get_peft_model(tiny.model(torch.float64), lora()).eval()
    twin.load_state_dict(expected, strict=False)
    ids = torch.tensor([[5, 6, 7, 8]])
    with teacher.in_eval_mode() as call:
        logits = call(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    assert_parity(logits, twin(ids).logits, terms=64)
    assert not torch.allclose(made.model(ids).logits, logits, rtol=1e-3)


def test_the_ema_teacher_is_sdpos_but_for_its_start() -> None:
    """SDPO's begins with A = B = 0 and ours with the policy's: (1 - rate)^steps of that is left."""
    teacher_sync = pytest.importorskip("trl.experimental.sdpo.teacher_sync", reason="this TRL has none")
    model = tiny.model(torch.float64)
    made = tiny.trainer(policy_model=model, **EMA, max_steps=3, arguments={"peft_config": lora()})
    own = made.model.named_parameters()
    start = {name: weight.detach().clone() for name, weight in own if weight.requires_grad}
    sdpo = teacher_sync.PEFTAdapterEMACallback(model=made.model, update_rate=RATE)
    made.add_callback(sdpo)
    made.train()
    assert sdpo.shadow_weights is not None and len(sdpo.shadow_weights) == len(start)
    for name, weight in tiny.averages(made).items():
        theirs = sdpo.shadow_weights[name.replace(".default", "")]
        assert_parity(weight - (1 - RATE) ** 3 * start[name], theirs, terms=6, magnitude=1.0)


def test_the_ema_teacher_is_saved_and_resumed_and_not_in_the_saved_adapter(tmp_path: Path) -> None:
    options = EMA | {"save_steps": 2, "save_strategy": "steps", "output_dir": str(tmp_path)}
    first = tiny.trainer(**options, max_steps=2, arguments={"peft_config": lora()})
    first.train()
    checkpoint, saved = tmp_path / "checkpoint-2", tiny.averages(first)
    assert not any(path.is_dir() for path in checkpoint.iterdir()), "a second adapter was saved"
    adapter = load_file(checkpoint / "adapter_model.safetensors")
    assert adapter.keys() == get_peft_model_state_dict(first.model).keys()
    assert load_file(checkpoint / "composer_ema_teacher.safetensors").keys() == saved.keys()
    resumed = tiny.trainer(**options, max_steps=3, arguments={"peft_config": lora()})
    seen = tiny.averages_at_the_last_step(resumed, str(checkpoint))
    assert all(torch.equal(seen[name], weight) for name, weight in saved.items())


def test_a_model_that_comes_with_a_new_adapter_trains_as_with_a_peft_config() -> None:
    """Axolotl adds the adapter itself, before it constructs the trainer."""
    options = {"hint_weight": 1.0, "replay_weight": 1.0, "max_steps": 3}

    def parameters(**given: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        if "peft_config" not in given.get("arguments", {}):
            given["policy_model"] = get_peft_model(tiny.model(), lora())
        made = tiny.trainer(**options, **given)
        torch.manual_seed(1)
        for name, weight in made.model.named_parameters():
            if ".lora_A." in name:
                weight.data.normal_(generator=torch.Generator().manual_seed(2))
        made.train()
        return dict(made.model.named_parameters())

    expected, found = parameters(arguments={"peft_config": lora()}), parameters()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


TRAINED_TOKENS = {**QV, "trainable_token_indices": [3, 4, 5]}
NEW = {
    "modules_to_save": LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["k_proj", "norm"]),
    "dora": LoraConfig(r=4, target_modules=["q_proj"], use_dora=True),
    "embedding": LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"]),
    "ia3": IA3Config(**QV, feedforward_modules=[]),
    "lokr": LoKrConfig(**QV, r=4),
}


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
@pytest.mark.parametrize("kind", NEW)
def test_a_new_adapter_starts_at_its_reference(kind: str) -> None:
    """The first ones come with the model, and the trainer adds those that are no LoRA."""
    given: dict[str, Any] = {"arguments": {"peft_config": NEW[kind]}}
    if isinstance(NEW[kind], LoraConfig):
        given = {"policy_model": get_peft_model(tiny.model(), NEW[kind])}
    made = tiny.trainer(**given, replay_weight=1.0)
    made.train()
    assert made.state.log_history[0]["composer/replay/rewards/margins"] == 0.0


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
@pytest.mark.parametrize(
    "part", [".lora_B.", ".lora_embedding_A.", ".modules_to_save.", "norm", ".trainable_tokens_delta."]
)
def test_a_model_that_comes_with_a_trained_adapter_is_refused(part: str) -> None:
    adapter = LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"], modules_to_save=["k_proj"])
    if "tokens" in part:
        adapter = LoraConfig(r=4, **TRAINED_TOKENS)
    model = get_peft_model(tiny.model(), adapter)
    weight = next(weight for name, weight in model.named_parameters() if part in name)
    if part == "norm":
        weight.requires_grad_(True)
    else:
        weight.data[0, 0] += 1e-6
    with pytest.raises(ConfigError, match="it has a trained adapter"):
        tiny.trainer(policy_model=model, replay_weight=1.0)


def test_trainable_tokens_learn_and_the_teachers_do_without_them() -> None:
    """The rows of the embedding that PEFT trains beside LoRA. TRL fails where the output head shares them."""
    model = tiny.model()
    model.config.tie_word_embeddings = False
    model = type(model)(model.config)
    with torch.no_grad():
        ids = torch.tensor([[3, 4, 5, 6]])
        expected = model.eval()(ids).logits
    options = {"beta": 0.1, "hint_weight": 1.0, "replay_weight": 1.0, "max_steps": 2}
    adapter = {"peft_config": LoraConfig(**TRAINED_TOKENS)}
    made = tiny.trainer(policy_model=model, **options, arguments=adapter)
    (tokens,) = [weight for name, weight in made.model.named_parameters() if "trainable_tokens" in name]
    start = tokens.detach().clone()
    made.train()
    assert made.state.log_history[0]["composer/replay/rewards/margins"] == 0.0
    assert made.state.log_history[0]["kl"] == 0.0
    assert not torch.equal(tokens, start)
    with made._hint.teacher.in_eval_mode() as teacher:
        torch.testing.assert_close(teacher(ids).logits, expected)
