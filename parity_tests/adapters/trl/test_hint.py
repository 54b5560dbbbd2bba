"""The hint channel: who teaches, on which tokens, divided by what."""

import copy
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from composer_plugins.adapters.trl_mixin.forward import completion_logits, token_logprobs
from composer_plugins.adapters.trl_mixin.trl_facts import loss_mask
from composer_plugins.columns import hinted_prompt
from composer_plugins.kernels.divergences import jsd
from parity_tests.support import tiny

HINT_ONLY = {"policy_weight": 0.0, "hint_weight": 1.0, "dtype": torch.float64}
# Qwen3 computes its rotary angles in float32 whatever the model's dtype, and padding shifts positions.
ROTARY = 1e-6


def by_rows(
    made: Any, inputs: dict[str, Any], teacher: Any, beta: float = 0.5, temperature: float = 1.0
) -> torch.Tensor:
    """The hint loss row by row, without padding: the second opinion."""
    total = torch.zeros((), dtype=torch.float64)
    for i in range(len(inputs["completion_ids"])):
        live = inputs["completion_mask"][i].bool()
        completion = inputs["completion_ids"][i][live]
        prompt = inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()]
        hinted = inputs["hint_prompt_ids"][i][inputs["hint_prompt_mask"][i].bool()]
        if torch.equal(prompt, hinted):
            continue  # a row without a hint
        n = len(completion)
        with torch.no_grad():
            theirs = teacher(torch.cat([hinted, completion])[None]).logits[0, -n - 1 : -1]
        mine = made.model(torch.cat([prompt, completion])[None]).logits[0, -n - 1 : -1]
        everywhere = torch.ones(n, dtype=torch.bool)
        total = total + jsd(mine / temperature, theirs / temperature, everywhere, beta=beta).loss.mean()
    return total / len(inputs["completion_ids"])


@pytest.mark.parametrize("beta", [0.1, 0.9])
def test_hint_loss_and_gradient_equal_a_loop_over_unpadded_rows(beta: float) -> None:
    policy = tiny.model(torch.float64)
    initial = copy.deepcopy(policy).eval()
    made = tiny.trainer(
        policy_model=policy, **HINT_ONLY, hint_params={"beta": beta}, max_steps=3, temperature=0.7
    )
    made.train()  # so that the teacher and the student are no longer the same
    inputs = tiny.batch(made)
    loss, gradient = tiny.loss_and_gradient(made, inputs)
    expected = by_rows(made, inputs, initial, beta, temperature=0.7)
    made.model.zero_grad()
    expected.backward()
    flat = torch.cat([p.grad.flatten() for p in made.model.parameters() if p.grad is not None])
    assert loss == pytest.approx(expected.item(), rel=ROTARY)
    assert tiny.relative_difference(flat, gradient) <= ROTARY


def test_the_base_teacher_keeps_the_initial_weights() -> None:
    policy = tiny.model()
    initial = copy.deepcopy(policy)
    made = tiny.trainer(policy_model=policy, hint_weight=1.0, max_steps=3)
    made.train()
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(made._base(ids).logits, initial(ids).logits)
    assert not torch.allclose(made.model(ids).logits, initial(ids).logits)


def test_a_model_given_as_a_path_is_taught_by_its_initial_weights(tmp_path: Any) -> None:
    initial = tiny.model(seed=3)
    initial.save_pretrained(tmp_path)
    made = tiny.trainer(policy_model=str(tmp_path), hint_weight=1.0, max_steps=2)
    made.train()
    for mine, theirs in zip(made._base.parameters(), initial.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_ema_teacher_follows_the_policy_at_its_rate() -> None:
    policy = tiny.model(torch.float64)
    expected = [p.detach().clone() for p in policy.parameters()]
    made = tiny.trainer(policy_model=policy, **HINT_ONLY, hint_teacher="ema", hint_ema_rate=0.25, max_steps=3)

    class Reference(tiny.TrainerCallback):
        def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
            for mine, theirs in zip(expected, model.parameters(), strict=True):
                mine.add_(0.25 * (theirs.detach() - mine))

    made.add_callback(Reference())
    made.train()
    for mine, theirs in zip(made._ema.parameters(), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_the_ema_teacher_survives_a_checkpoint(tmp_path: Any) -> None:
    options = {"hint_weight": 1.0, "hint_teacher": "ema", "hint_ema_rate": 0.3, "save_steps": 2}
    options |= {"save_strategy": "steps", "output_dir": str(tmp_path)}
    first = tiny.trainer(**options, max_steps=2)
    first.train()
    saved = [p.clone() for p in first._ema.parameters()]
    resumed = tiny.trainer(**options, max_steps=3)
    seen: list[torch.Tensor] = []

    class AtTheFirstStep(tiny.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            seen.extend(p.clone() for p in resumed._ema.parameters())

    resumed.add_callback(AtTheFirstStep())
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert all(torch.equal(a, b) for a, b in zip(saved, seen, strict=True))


def test_resuming_without_the_ema_teachers_file_is_an_error(tmp_path: Any) -> None:
    options = {"hint_weight": 1.0, "hint_teacher": "ema", "save_steps": 1, "save_strategy": "steps"}
    options["output_dir"] = str(tmp_path)
    tiny.trainer(**options, max_steps=1).train()
    (tmp_path / "checkpoint-1" / "composer_ema_teacher.safetensors").unlink()
    with pytest.raises(ValueError, match="resuming at step 1 with hint_teacher='ema'"):
        tiny.trainer(**options, max_steps=2).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_a_live_teacher_warns_and_passes_no_gradient() -> None:
    with pytest.warns(UserWarning, match="collapsed to reward 0 in 3 of 3"):
        made = tiny.trainer(**HINT_ONLY, hint_teacher="live")
    inputs = tiny.batch(made)
    _, gradient = tiny.loss_and_gradient(made, inputs)
    expected = by_rows(made, inputs, copy.deepcopy(made.model))
    made.model.zero_grad()
    expected.backward()
    flat = torch.cat([p.grad.flatten() for p in made.model.parameters() if p.grad is not None])
    assert tiny.relative_difference(flat, gradient) <= ROTARY


def test_the_sampled_token_form_reads_trls_own_log_probabilities() -> None:
    """They must be those of the plain forward pass, temperature included, wherever a token counts."""
    made = tiny.trainer(hint_weight=1.0, temperature=0.7)
    inputs = tiny.batch(made)
    ids, mask = inputs["completion_ids"], inputs["completion_mask"]
    whole = torch.cat([inputs["prompt_ids"], ids], 1), torch.cat([inputs["prompt_mask"], mask], 1)
    theirs = made._get_per_token_logps_and_entropies(made.model, *whole, ids.shape[1])[0]
    ours = token_logprobs(completion_logits(made, made.model, *whole, ids.shape[1]), ids)
    live = inputs["hint_mask"]
    assert live.any()
    torch.testing.assert_close(theirs[live], ours[live], rtol=1e-4, atol=1e-5)


def test_sampled_token_gradient_equals_its_definition() -> None:
    made = tiny.trainer(**HINT_ONLY, hint_divergence="sampled_token", max_steps=2)
    made.train()
    inputs = tiny.batch(made)
    _, gradient = tiny.loss_and_gradient(made, inputs)
    ids, mask = inputs["completion_ids"], inputs["completion_mask"]

    def logprobs(model: Any, prompt: str) -> torch.Tensor:
        whole = torch.cat([inputs[f"{prompt}_ids"], ids], 1), torch.cat([inputs[f"{prompt}_mask"], mask], 1)
        return token_logprobs(completion_logits(made, model, *whole, ids.shape[1]), ids)

    student, teacher = logprobs(made.model, "prompt"), logprobs(made._base, "hint_prompt")
    live = inputs["hint_mask"]
    token = torch.where(live, (student - teacher).detach() * student, 0.0)
    made.model.zero_grad()
    (token.sum(1) / live.sum(1).clamp(min=1)).mean().backward()
    flat = torch.cat([p.grad.flatten() for p in made.model.parameters() if p.grad is not None])
    assert tiny.relative_difference(flat, gradient) <= 1e-6  # TRL's fused head computes in float32


def test_rows_without_a_hint_push_nothing() -> None:
    data = tiny.rows()
    for row in data:
        row["privileged_context"] = None
    made = tiny.trainer(**HINT_ONLY, dataset=Dataset.from_list(data))
    loss, gradient = tiny.loss_and_gradient(made, tiny.batch(made))
    assert loss == 0 and not gradient.any()


def test_hint_mask_of_a_rollout_narrows_the_tokens() -> None:
    """Targeted distillation: a rollout_func leaves one 0 or 1 per completion token in its rows."""

    def first_token_only(prompts: list[str], trainer: Any) -> dict[str, Any]:
        made = tiny.rollout(prompts, trainer)
        return made | {"hint_mask": [[1] + [0] * (len(ids) - 1) for ids in made["completion_ids"]]}

    made = tiny.trainer(hint_weight=1.0, arguments={"rollout_func": first_token_only})
    inputs = tiny.batch(made)
    assert inputs["hint_mask"][:, 1:].sum() == 0
    assert 0 < inputs["hint_mask"][:, 0].sum() < len(inputs["hint_mask"])  # row 1 has no hint


def test_hint_mask_of_the_wrong_length_is_an_error() -> None:
    def too_long(prompts: list[str], trainer: Any) -> dict[str, Any]:
        made = tiny.rollout(prompts, trainer)
        return made | {"hint_mask": [[1] * (len(ids) + 1) for ids in made["completion_ids"]]}

    made = tiny.trainer(hint_weight=1.0, arguments={"rollout_func": too_long})
    with pytest.raises(ValueError, match="hint_mask has .* entries for a completion of"):
        tiny.batch(made)


def test_a_hint_mask_of_anything_but_0_and_1_is_an_error() -> None:
    def halves(prompts: list[str], trainer: Any) -> dict[str, Any]:
        made = tiny.rollout(prompts, trainer)
        return made | {"hint_mask": [[0.5] * len(ids) for ids in made["completion_ids"]]}

    made = tiny.trainer(hint_weight=1.0, arguments={"rollout_func": halves})
    with pytest.raises(ValueError, match="wanted a 0 or a 1"):
        tiny.batch(made)


def test_a_rollout_that_rewrites_the_prompt_is_an_error() -> None:
    """The student would be conditioned on one prompt and the teacher on another."""

    def rewritten(prompts: list[str], trainer: Any) -> dict[str, Any]:
        made = tiny.rollout(prompts, trainer)
        return made | {"prompt_ids": [[5, 6, *ids] for ids in made["prompt_ids"]]}

    made = tiny.trainer(hint_weight=1.0, arguments={"rollout_func": rewritten})
    with pytest.raises(ValueError, match="rollout_func returned other prompt_ids"):
        tiny.batch(made)


def test_tokens_that_a_tool_wrote_are_not_distilled() -> None:
    """A rollout_func marks them with env_mask 0."""

    def second_by_a_tool(prompts: list[str], trainer: Any) -> dict[str, Any]:
        made = tiny.rollout(prompts, trainer)
        marks = [[1, 0, 1, 1, 1][: len(ids)] for ids in made["completion_ids"]]
        return made | {"env_mask": marks}

    made = tiny.trainer(hint_weight=1.0, arguments={"rollout_func": second_by_a_tool})
    inputs = tiny.batch(made)
    assert inputs["hint_mask"][:, 0].any() and not inputs["hint_mask"][:, 1].any()
    assert not loss_mask(inputs)[:, 1].any()


def test_the_hint_stands_in_the_last_user_message_and_leaves_the_rest() -> None:
    prompt = [
        {"role": "user", "content": "a?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": [{"type": "text", "text": "b?"}], "name": "me"},
        {"role": "assistant", "content": "2"},
    ]
    made = hinted_prompt(prompt, "[12]", "{prompt}|{privileged_context}")
    assert made == [*prompt[:2], prompt[2] | {"content": "b?|[12]"}, prompt[3]]


def test_padding_does_not_move_a_model_with_absolute_positions() -> None:
    made = tiny.trainer(
        policy_model=GPT2LMHeadModel(
            GPT2Config(vocab_size=len(tiny.SYMBOLS), n_positions=32, n_embd=16, n_layer=1, n_head=2)
        )
    )
    ids, ones = torch.tensor([[5, 6, 7, 8]]), torch.ones(1, 4, dtype=torch.long)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], 1)
    padding = torch.cat([torch.zeros(1, 3, dtype=torch.long), ones], 1)
    plain = completion_logits(made, made.model.eval(), ids, ones, 2)
    torch.testing.assert_close(completion_logits(made, made.model, padded, padding, 2), plain)


def test_a_chat_hint_goes_into_the_last_user_message() -> None:
    data = [
        {
            "prompt": [{"role": "user", "content": "a?"}],
            "privileged_context": [{"role": "user", "content": "[12]"}],
        }
    ] * 4
    made = tiny.trainer(
        hint_weight=1.0,
        scripted=False,
        dataset=Dataset.from_list(data),
        teacher_prompt_template="{privileged_context}{prompt}",
    )
    inputs = tiny.batch(made)
    shown = made._tokenizer.decode(inputs["hint_prompt_ids"][0], skip_special_tokens=True)
    assert shown == "U:[12]a?\nA:"
