"""hint_source="successful_rollout": the hints are those of TRL's SDPO trainer, on the same completions."""

import inspect
import warnings
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_plugins.adapters.trl_mixin import ComposerGRPOConfig, hints
from composer_plugins.adapters.trl_mixin.hints import RolloutOptions
from composer_plugins.columns import filled_prompt
from composer_plugins.errors import ComposerWarning
from parity_tests.cases.trl import HINT, ROLLOUTS, SHORT
from parity_tests.rigs import by_rows, tiny

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl.experimental.sdpo import sdpo_trainer
    from trl.experimental.sdpo.sdpo_config import SDPOConfig
    from trl.experimental.sdpo.sdpo_trainer import SDPOTrainer, SuccessfulRolloutTeacherContextBuilder


ROW_FRAC = "composer/hint/row_frac"
FEEDBACK = {"feedback_template": "_{feedback_raw}_"}


class Ranks:
    """Accelerate's view of one of several processes that hold the rows in order."""

    def __init__(self, made: Any, index: int) -> None:
        self.device, self.process_index = made.accelerator.device, index


def sdpo(made: Any, index: int, everything: dict[str, Any]) -> SimpleNamespace:
    """What TRL's builder reads of an SDPOTrainer that is process `index`; it gathers `everything`."""
    options = {name: getattr(made.args, name) for name in RolloutOptions.model_fields}
    accelerator = Ranks(made, index)
    accelerator.gather = lambda x: everything["rewards" if x.dim() == 1 else "completion_ids"]
    accelerator.pad_across_processes = lambda x, **_: x
    trainer = SimpleNamespace(
        accelerator=accelerator,
        args=SimpleNamespace(**options, use_successful_as_teacher=True),
        model=SimpleNamespace(training=True),
        num_generations=made.num_generations,
        processing_class=made.processing_class,
        chat_template_kwargs={},
        _tokenizer=made.processing_class,
    )
    trainer._tokenize_prompts_untruncated = lambda prompts: SDPOTrainer._tokenize_prompts_untruncated(
        trainer, prompts
    )
    return trainer


def prompts_only() -> list[dict[str, Any]]:
    return [{"prompt": row["prompt"]} for row in tiny.rows()]


def chat(text: str) -> list[dict[str, str]]:
    turns = (("user", "9"), ("assistant", "A"), ("user", text))
    return [{"role": role, "content": content} for role, content in turns]


def trainer(**options: Any) -> Any:
    """A trainer whose hints are successful rollouts, with short templates, on prompts alone."""
    return tiny.trainer(**ROLLOUTS, **{**SHORT, "dataset": prompts_only(), **options})


@pytest.fixture(scope="module")
def made() -> Any:
    return trainer()


@settings(max_examples=60)
@given(
    rewards=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=16, max_size=16),
    feedback=st.lists(st.sampled_from([None, "", " ", "ab", "c"]), min_size=16, max_size=16),
    conversational=st.booleans(),
    options=st.fixed_dictionaries(
        {
            "success_reward_threshold": st.sampled_from([0.5, 1.0]),
            "dont_reprompt_on_self_success": st.booleans(),
            "max_reprompt_len": st.sampled_from([6, 10240]),
            "include_environment_feedback": st.booleans(),
            "environment_feedback_only_without_solution": st.booleans(),
            "remove_thinking_from_demonstration": st.booleans(),
        }
    ),
    seed=st.integers(0, 1000),
    ranks=st.sampled_from([1, 2, 8]),
)
def test_every_row_has_the_teachers_prompt_of_trls_sdpo(
    made: Any,
    rewards: list[float],
    feedback: list[str | None],
    conversational: bool,
    options: dict[str, Any],
    seed: int,
    ranks: int,
) -> None:
    """The same token ids, and a hint in the same rows, on every process; a group may span two processes."""
    for name, value in (options | FEEDBACK).items():
        setattr(made.args, name, value)
    made.model.train()
    torch.manual_seed(seed)
    ids = torch.randint(3, len(tiny.SYMBOLS), (16, 5))
    ids[torch.arange(5)[None] >= torch.randint(1, 6, (16, 1))] = 0  # padding
    prompts = [f"{'abcd'[i // 4]}{'0' * (i // 4)}?" for i in range(16)]
    rows = [
        {"prompt": chat(prompt) if conversational else prompt, "privileged_context": said}
        for prompt, said in zip(prompts, feedback, strict=True)
    ]
    everything = {"rewards": torch.tensor(rewards), "completion_ids": ids, "rows": rows}
    size = 16 // ranks
    for index in range(ranks):
        mine = slice(index * size, (index + 1) * size)
        found, expected = both(made, index, mine, everything)
        assert found == expected


def both(made: Any, index: int, mine: slice, everything: dict[str, Any]) -> tuple[Any, Any]:
    """The teacher's prompts and the rows with a hint, from our trainer and from TRL's builder."""
    rows, ids = everything["rows"], everything["completion_ids"]
    batch = {"completion_ids": ids[mine], "completion_mask": (ids[mine] != 0).long()}
    own = made.args.resolved.hints
    accelerator = made.accelerator
    patch = pytest.MonkeyPatch()
    with patch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore", ComposerWarning)  # of truncated prompts
        decode = made.processing_class.decode
        patched.setattr(
            made.processing_class,
            "decode",
            lambda ids, **how: f"<think>a{decode(ids[:1], **how)}\n</think> {decode(ids, **how)}\n",
        )
        patched.setattr(hints, "gather_object", lambda _: own._texts(made, ids))
        patched.setattr(hints, "longest_input", lambda _: None)  # TRL's builder does not know it
        prompts, feedbacks = ([row[name] for row in rows] for name in ("prompt", "privileged_context"))
        patched.setattr(sdpo_trainer, "gather_object", lambda x: feedbacks if x is local else prompts)
        patched.setattr(made, "accelerator", Ranks(made, index))
        prompt_ids, has_hint = own.teacher_prompts(made, rows[mine], batch, everything["rewards"])
        patched.setattr(made, "accelerator", accelerator)
        local = feedbacks[mine]
        theirs = SuccessfulRolloutTeacherContextBuilder(sdpo(made, index, everything)).build(
            batch, prompts[mine], everything["rewards"][mine], feedbacks=local
        )
    width = theirs["teacher_input_ids"].shape[1] - ids.shape[1]
    attention = theirs["teacher_attention_mask"][:, :width].bool()
    masks = theirs["self_distillation_mask"].bool().tolist()
    given = [x[m].tolist() for x, m in zip(theirs["teacher_input_ids"][:, :width], attention, strict=True)]
    with_hint = [ids for ids, used in zip(prompt_ids, has_hint, strict=True) if used]
    return (with_hint, has_hint), ([x for x, used in zip(given, masks, strict=True) if used], masks)


def test_loss_and_gradient_equal_a_loop_over_unpadded_rows() -> None:
    """On one batch with rows without a hint, once the policy has moved away from its teacher."""
    options = {"success_reward_threshold": 0.7, "hint_params": {"beta": 0.3}, "temperature": 0.7}
    options |= {"policy_weight": 0.0, "max_steps": 2, "dtype": torch.float64}
    made = trainer(**options)
    made.train()
    inputs = tiny.batch(made)
    has_hint = inputs["hint_mask"].any(1)
    assert 0 < has_hint.sum() < len(has_hint), "the rows are all alike"
    expected = by_rows.hint(made, inputs, made._hint.teacher.model, 0.3, temperature=0.7)
    tiny.assert_computes(made, inputs, expected)
    logged = made._metrics["train"]
    assert logged["composer/hint/row_frac"][-1] == has_hint.double().mean()
    successful = (made._rewards.view(-1, 4) >= 0.7).any(1).double().mean()
    assert logged["composer/hint/success_group_frac"][-1] == successful


def test_the_options_have_the_names_and_defaults_of_sdpo() -> None:
    """Read from TRL's config: an option of reprompting that a new TRL adds or changes fails here."""
    theirs = {one.name: one.default for one in fields(SDPOConfig)}
    ours = {one.name: one.default for one in fields(ComposerGRPOConfig)}
    names = [name for name in theirs if any(part in name for part in ("reprompt", "success", "solution"))]
    names += [name for name in theirs if any(part in name for part in ("feedback", "demonstration"))]
    assert set(names) - {"use_successful_as_teacher"} == set(RolloutOptions.model_fields)
    assert {name: ours[name] for name in RolloutOptions.model_fields} == {
        name: theirs[name] for name in RolloutOptions.model_fields
    }


def test_a_reward_equal_to_the_threshold_is_a_success() -> None:
    """Rewards are float32, in which 0.7 is less than 0.7 in float64."""
    rewards = torch.full((4,), 0.7).tolist()
    made = trainer(success_reward_threshold=0.7)
    assert made._hint.source._demonstrations(made, rewards, 4) == [1, 0, 0, 0]


def test_a_rollout_func_may_return_the_feedback() -> None:
    def feedback(made: dict[str, Any]) -> dict[str, Any]:
        return {HINT: [f"f{i % 10}" if i % 2 else "" for i, _ in enumerate(made["prompt_ids"])]}

    options = {"include_environment_feedback": True, "success_reward_threshold": 2.0}
    made = tiny.with_rollout(feedback, **ROLLOUTS, **SHORT, **FEEDBACK, **options)
    inputs = tiny.batch(made)
    shown = made.processing_class.batch_decode(inputs["hint_prompt_ids"], skip_special_tokens=True)
    prompts = made.processing_class.batch_decode(inputs["prompt_ids"], skip_special_tokens=True)
    # TRL shuffles the rows of a batch after they are made.
    for prompt, text, hinted in zip(prompts, shown, inputs["hint_mask"].any(1), strict=True):
        assert text.removeprefix(prompt)[:2] == ("_f" if hinted else "")
    assert inputs["hint_mask"].any(1).sum() == 8


@pytest.mark.parametrize("make", [tiny.model, tiny.absolute_model])
def test_feedback_that_does_not_fit_the_model_is_left_out_with_a_warning(make: Any) -> None:
    """A rollout_func returns it, so it is not known before training; other rollouts keep theirs."""

    def feedback(made: dict[str, Any]) -> dict[str, Any]:
        return {HINT: ["9" * (100 if i % 2 else 3) for i, _ in enumerate(made["prompt_ids"])]}

    options = {"include_environment_feedback": True, "success_reward_threshold": 2.0, "policy_model": make()}
    made = tiny.with_rollout(feedback, **ROLLOUTS, **SHORT, **FEEDBACK, **options)
    message = r"prompt: the teacher's has 10\d tokens, and with the 5 .* exceeds the 32 .* or lower max_rep"
    with pytest.warns(ComposerWarning, match=message) as seen:
        assert tiny.logged(made, ROW_FRAC) == [0.5]
    assert sum("so this rollout has no hint" in str(one.message) for one in seen) == 1


def test_rewards_that_are_never_successful_are_a_warning() -> None:
    """A window has 32 rows where they are short, and a step here 16."""
    made = trainer(success_reward_threshold=5.0, max_steps=25, health=True)
    with pytest.warns(ComposerWarning, match="hint_weight is set, .*success_reward_threshold") as seen:
        made.train()
    assert sum("success_reward_threshold" in str(one.message) for one in seen) == 1


def test_a_prompt_that_is_cut_is_a_warning() -> None:
    made = trainer(success_reward_threshold=0.5, max_reprompt_len=4)
    with pytest.warns(ComposerWarning, match="max_reprompt_len: a teacher's .* the last 4 are kept"):
        inputs = tiny.batch(made)
    assert inputs["hint_prompt_ids"].shape[1] == 4


def test_a_row_that_no_reward_function_applies_to_is_no_demonstration() -> None:
    """TRL's SDPO counts its reward as 0, which is successful where the threshold is 0."""
    source = inspect.getsource(SDPOTrainer._prepare_training_batch)
    assert "nansum(dim=1)" in source and "isnan" not in source
    made = trainer(success_reward_threshold=0.0)
    rewards = torch.tensor([float("nan"), 0.0, float("nan"), -1.0])
    assert made._hint.source._demonstrations(made, rewards.tolist(), 4) == [1, None, 1, 1]


def test_prompts_that_trls_sdpo_reads_otherwise() -> None:
    """It joins blocks of text by a space, drops the message's other keys, and needs a last user message."""
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": "?"}]
    message = {"role": "user", "content": blocks, "name": "me"}
    assert sdpo_trainer._extract_last_user_text([message]) == "a ?"
    (mine,) = filled_prompt([message], "{prompt}{solution}", solution="!")
    assert mine == {"role": "user", "content": "a?!", "name": "me"}
    prefilled = [message, {"role": "assistant", "content": "b"}]
    with pytest.raises(ValueError, match="expects the conversation to end with a user turn"):
        sdpo_trainer._extract_last_user_text(prefilled)
    assert filled_prompt(prefilled, "{prompt}", solution="")[1] == prefilled[1]


def test_a_demonstration_has_no_padding(made: Any) -> None:
    """Also where the tokenizer does not count its padding as a special token."""
    ids = torch.tensor([[5, 6, 0, 0], [0, 7, 8, 0]])
    words = SimpleNamespace(pad_token_id=0, decode=lambda ids, **_: str(ids.tolist()))
    theirs = SimpleNamespace(processing_class=words)
    assert made.args.resolved.hints._texts(theirs, ids) == ["[5, 6]", "[7, 8]"]
