"""The hint channel: its teachers, its tokens and its denominator."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from composer_plugins.errors import ComposerWarning, ConfigError
from composer_plugins.kernels.divergences import sampled_token
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs import by_rows, tiny

HINT_ONLY = {"policy_weight": 0.0, "hint_weight": 1.0, "dtype": torch.float64}


@pytest.mark.parametrize("beta", [0.1, 0.9])
def test_hint_loss_and_gradient_equal_a_loop_over_unpadded_rows(beta: float) -> None:
    policy = tiny.model(torch.float64)
    initial = copy.deepcopy(policy).eval()
    made = tiny.trainer(
        policy_model=policy, **HINT_ONLY, hint_params={"beta": beta}, max_steps=3, temperature=0.7
    )
    made.train()  # so that the teacher and the student are no longer the same
    inputs = tiny.batch(made)
    tiny.assert_computes(made, inputs, by_rows.hint(made, inputs, initial, beta, temperature=0.7))


def test_a_model_given_as_a_path_is_taught_by_its_initial_weights(tmp_path: Any) -> None:
    initial = tiny.model(seed=3)
    initial.save_pretrained(tmp_path)
    made = tiny.trainer(policy_model=str(tmp_path), hint_weight=1.0, max_steps=2)
    made.train()
    for mine, theirs in zip(made._hint.teacher.model.parameters(), initial.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_policy_has_its_own_weights_again_after_an_error_in_the_ema_teacher() -> None:
    made = tiny.trainer(**HINT_ONLY, hint_teacher="ema", hint_ema_rate=0.25, max_steps=2)
    made.train()
    own = [p.detach().clone() for p in made.model.parameters()]
    with pytest.raises(KeyError, match="out of memory"), made._hint.teacher.in_eval_mode() as teacher:
        assert not all(map(torch.equal, teacher.parameters(), own))
        raise KeyError("out of memory")
    assert all(map(torch.equal, made.model.parameters(), own))


def test_the_teacher_is_that_of_the_checkpoint_whatever_the_output_dir_has(tmp_path: Any) -> None:
    """`output_dir` has a checkpoint of the same step by another run, or none."""
    options = {"hint_weight": 1.0, "hint_teacher": "ema", "hint_ema_rate": 0.3, "save_steps": 2}
    options |= {"replay_weight": 1.0, "save_strategy": "steps", "dataset": tiny.rows(16)}
    runs = {"own": 0, "other": 5}

    def made(folder: str, seed: int, steps: int) -> Any:
        given = {"policy_model": tiny.model(seed=seed), "max_steps": steps}
        return tiny.trainer(**options, **given, output_dir=str(tmp_path / folder))

    saved = {}
    for folder, seed in runs.items():
        trainer = made(folder, seed, 2)
        trainer.train()
        saved[folder] = {name: weight.clone() for name, weight in tiny.averages(trainer).items()}

    def is_from(seen: dict[str, torch.Tensor], folder: str) -> bool:
        return all(torch.equal(seen[name], weight) for name, weight in saved[folder].items())

    checkpoint = str(tmp_path / "other" / "checkpoint-2")
    runs_on = [("own", "own", True), ("own", "other", checkpoint), ("new", "other", checkpoint)]
    for output, run, resumed in runs_on:  # without a warning: the other run's sha256 file is found, and fits
        assert is_from(tiny.averages_at_the_last_step(made(output, runs[run], 3), resumed), run)


def test_resuming_without_the_ema_teachers_file_is_an_error(tmp_path: Any) -> None:
    options = {"hint_weight": 1.0, "hint_teacher": "ema", "save_steps": 1, "save_strategy": "steps"}
    options["output_dir"] = str(tmp_path)
    tiny.trainer(**options, max_steps=1).train()
    (tmp_path / "checkpoint-1" / "composer_ema_teacher.safetensors").unlink()
    with pytest.raises(ValueError, match="hint_teacher: it is 'ema', training resumes at step 1"):
        tiny.trainer(**options, max_steps=2).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    save_file({"other": torch.ones(1)}, tmp_path / "checkpoint-1" / "composer_ema_teacher.safetensors")
    with pytest.raises(ConfigError, match="has other weights than those that are trained"):
        tiny.trainer(**options, max_steps=2).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_the_ema_teacher_of_half_precision_weights_moves_in_float32() -> None:
    """By steps of 1e-4 of a weight, which bfloat16 rounds away."""
    made = tiny.trainer(hint_weight=1.0, hint_teacher="ema", hint_ema_rate=1e-4, dtype=torch.bfloat16)
    own = dict(made.model.named_parameters())
    start = {name: p.detach().float() for name, p in own.items()}
    made.train()
    assert any(not torch.equal(p.float(), start[name]) for name, p in own.items())
    for name, weight in tiny.averages(made).items():
        expected = start[name].lerp(own[name].detach().float(), 1e-4)
        assert_parity(weight, expected, terms=2, dtype=torch.float32)
        assert torch.equal(own[name].float() != start[name], weight != start[name])


@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("channel", ["hint_weight", "replay_weight"])
def test_resuming_with_another_initial_model_is_an_error(tmp_path: Any, channel: str, peft: bool) -> None:
    """The base teacher and the reference are the model that the trainer is constructed with."""
    options = {channel: 1.0, "save_steps": 1, "save_strategy": "steps", "output_dir": str(tmp_path)}

    def made(**more: Any) -> Any:
        adapter = LoraConfig(r=4, target_modules=["q_proj"]) if peft else None
        return tiny.trainer(**options, **more, arguments={"peft_config": adapter})

    made(max_steps=1).train()
    saved = str(tmp_path / "checkpoint-1")
    made(max_steps=2).train(resume_from_checkpoint=saved)  # the original model
    other = tiny.model()
    other.lm_head.weight.data[3, 5] += 1e-3
    with pytest.raises(ConfigError, match="model: its weights are not .* the original model in the"):
        made(max_steps=2, policy_model=other).train(resume_from_checkpoint=saved)
    if not peft:
        loaded = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
        with pytest.raises(ConfigError, match="model: its weights are not those"):
            made(max_steps=2, policy_model=loaded).train(resume_from_checkpoint=saved)
    (tmp_path / "checkpoint-1" / "composer_initial_weights.sha256").unlink()
    with pytest.warns(ComposerWarning, match="training resumes at step 1, and .* does not exist"):
        made(max_steps=2).train(resume_from_checkpoint=saved)


def test_a_live_teacher_passes_no_gradient() -> None:
    made = tiny.trainer(**HINT_ONLY, hint_teacher="live")
    inputs = tiny.batch(made)
    tiny.assert_computes(made, inputs, by_rows.hint(made, inputs, copy.deepcopy(made.model)))


def test_sampled_token_gradient_with_a_ratio_cap_equals_its_definition() -> None:
    """Each token weighs by its ratio to the policy that sampled it, as in SDPO, at TRL's temperature."""
    options: dict[str, Any] = {"hint_divergence": "sampled_token", "temperature": 0.7}
    options |= {"hint_params": {"ratio_cap": 1.01}, "num_iterations": 2, "learning_rate": 3e-2}
    made = tiny.trainer(**HINT_ONLY, **options)
    made.train()
    inputs = tiny.batch(made)
    old = inputs["old_per_token_logps"]
    inputs["old_per_token_logps"] = old + torch.linspace(-0.5, 0.5, old.numel()).view_as(old)
    _, gradient = tiny.loss_and_gradient(made, inputs)
    total, weights = torch.zeros((), dtype=torch.float64), []
    for i, mask in enumerate(inputs["hint_mask"]):
        mine = by_rows.logprobs(made.model, inputs, i, temperature=0.7)
        theirs = by_rows.logprobs(made._hint.teacher.model, inputs, i, "hint_prompt", temperature=0.7)
        weight = (mine - inputs["old_per_token_logps"][i, : len(mine)]).exp().clamp(max=1.01).detach()
        if mask.any():
            weights += weight.tolist()
            total = total + (weight * (mine - theirs).detach() * mine).mean()
    assert max(weights) == 1.01 and min(weights) < 1
    flat = tiny.flat_gradient(made, total / len(inputs["hint_mask"]))
    assert tiny.relative_difference(flat, gradient) <= tiny.FLOAT32


def test_padding_of_the_completions_takes_no_hint_away() -> None:
    """With pad_to_multiple_of the completions are as wide as the context, and have 5 tokens at most."""
    plain = tiny.gradients(tiny.trainer(**HINT_ONLY))[0]
    made = tiny.trainer(**HINT_ONLY, pad_to_multiple_of=tiny.MAX_LENGTH)
    assert tiny.relative_difference(plain, tiny.gradients(made)[0]) <= tiny.ROTARY
    assert made.state.log_history[0]["composer/hint/row_frac"] == 0.75  # row 1 of 4 has no hint


def test_without_a_bound_of_the_completions_a_hint_is_measured_with_each_batch() -> None:
    """TRL trains with max_completion_length=None."""
    data = tiny.rows()
    data[0]["privileged_context"] = "1" * tiny.MAX_LENGTH
    options = HINT_ONLY | {"max_completion_length": None, "replay_weight": 1.0}
    made = tiny.trainer(**options, dataset=data)
    with pytest.warns(ComposerWarning, match=r"privileged_context: with the prompt it has .* exceeds the 32"):
        made.train()
    assert made.state.log_history[0]["composer/hint/row_frac"] == 0.5  # row 1 of 4 has no hint either


def test_a_rollout_func_returns_a_hint_about_each_completion() -> None:
    """The rows of the data set have none, and a warning says what the hint loss depends on."""
    data = [{"prompt": row["prompt"], "privileged_context": None} for row in tiny.rows()]

    def hints(rollout: dict[str, Any]) -> dict[str, Any]:
        own = [f"{ids[0]}" if len(ids) > 2 else None for ids in rollout["completion_ids"]]
        return {"privileged_context": own}

    with pytest.warns(ComposerWarning, match="so the hint loss is 0 unless the rollout_func returns hints"):
        made = tiny.with_rollout(hints, dataset=data)
    inputs = tiny.batch(made)
    long = inputs["completion_mask"].sum(1) > 2
    assert 0 < long.sum() < len(long) and inputs["hint_mask"].any(1).equal(long)
    for i in long.nonzero()[:, 0].tolist():
        assert tiny.shown(made, inputs, "hint_prompt", i).endswith(str(int(inputs["completion_ids"][i, 0])))


def test_hint_mask_of_a_rollout_restricts_the_tokens() -> None:
    """Targeted distillation: a rollout_func returns one 0 or 1 per completion token."""
    made = tiny.with_rollout(lambda r: {"hint_mask": [[1] + [0] * (len(x) - 1) for x in r["completion_ids"]]})
    inputs = tiny.batch(made)
    assert inputs["hint_mask"][:, 1:].sum() == 0
    assert 0 < inputs["hint_mask"][:, 0].sum() < len(inputs["hint_mask"])  # row 1 has no hint


@pytest.mark.parametrize("estimator", ["score", "k2"])
def test_absolute_positions_give_the_gradient_of_a_loop_over_unpadded_rows(estimator: str) -> None:
    """TRL's forward pass counts the padding of prompts of unequal length as positions."""
    policy = tiny.absolute_model()
    initial = copy.deepcopy(policy).eval()
    options = {"hint_divergence": "sampled_token", "hint_params": {"estimator": estimator}}
    made = tiny.trainer(policy_model=policy, **HINT_ONLY, **options)
    inputs = tiny.batch(made)
    expected = torch.zeros((), dtype=torch.float64)
    for i, mask in enumerate(inputs["hint_mask"]):
        if mask.any():
            mine = by_rows.logprobs(made.model, inputs, i)[None]
            theirs = by_rows.logprobs(initial, inputs, i, "hint_prompt")[None].detach()
            everywhere = torch.ones_like(mine, dtype=torch.bool)
            expected = expected + sampled_token(mine, theirs, everywhere, estimator=estimator).loss.mean()
    tiny.assert_computes(made, inputs, expected / len(inputs["hint_mask"]), value=1e-12, gradient=1e-12)


def test_a_ratio_to_trls_old_policy_is_an_error_with_absolute_positions() -> None:
    options = {"policy_model": tiny.absolute_model(), "hint_params": {"ratio_cap": 2.0}}
    with pytest.raises(ConfigError, match="hint_params.ratio_cap: it is 2.0, and .*; set it to None"):
        tiny.trainer(**HINT_ONLY, **options, hint_divergence="sampled_token")


def test_a_chat_hint_goes_into_the_last_user_message() -> None:
    columns = {"prompt": "a?", "privileged_context": "[12]"}
    row = {name: [{"role": "user", "content": text}] for name, text in columns.items()}
    options = {"hint_weight": 1.0, "teacher_prompt_template": "{privileged_context}{prompt}"}
    made = tiny.trainer(**options, dataset=[row] * 4, scripted=False)
    assert tiny.shown(made, tiny.batch(made), "hint_prompt") == "U:[12]a?\nA:"


@pytest.mark.parametrize("divergence", ["jsd", "sampled_token"])
def test_the_kl_is_that_of_the_sampling_policy_from_the_teacher(divergence: str) -> None:
    """With num_iterations=2 the policy has moved at the second step, and the sampling policy has not."""
    options = {"max_steps": 2, "num_iterations": 2, "learning_rate": 3e-2}
    made = tiny.trainer(**HINT_ONLY, hint_divergence=divergence, **options)
    first, second = tiny.logged(made, "composer/hint/kl")
    assert abs(first) > 1e-3  # the completions are scripted, so it may be negative
    assert second == pytest.approx(first, rel=1e-5)
