"""composer_sync before a worker is started: what it refuses, in which words. verl's own config and data."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

from composer_plugins.adapters.verl_plugin.sync_trainer.dataset import check_rows
from composer_plugins.adapters.verl_plugin.sync_trainer.fields import column_values, rows_of
from composer_plugins.adapters.verl_plugin.sync_trainer.prompts import Prompts
from composer_plugins.adapters.verl_plugin.sync_trainer.trainer import ComposerTrainer
from composer_plugins.errors import ComposerError, ComposerWarning, DataError
from parity_tests.rigs.verl_trainer import LIVE, SIMPO, checked

# torchdata's loader calls it, and torch 2.13 warns.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

LOSS = "actor_rollout_ref.actor.policy_loss"
Make = Callable[..., Any]


def test_verl_keeps_it_for_a_synchronous_trainer(make: Make) -> None:
    trainer = make({})
    assert isinstance(trainer, ComposerTrainer) and trainer.trainer_mode == "sync"
    assert type(trainer.replay_buffer).__name__ == "ReplayBuffer"  # and not ReplayBufferAsync
    assert trainer.policy_only and not hasattr(checked(trainer), "columns")


def test_the_constructor_warns_once_of_a_reduction_that_is_not_the_papers(make: Make) -> None:
    problem = "loss_agg_mode: it is 'token-mean', and 'gspo' is reduced"
    sound = ("algorithm.adv_estimator=composer", "critic.enable=False")
    with pytest.warns(ComposerWarning, match=problem) as found:
        make({}, f"{LOSS}.loss_mode=composer/gspo", *sound)
    assert len(found) == 1


NOTHING: dict[str, Any] = {"privileged_context": [], "chosen": [], "rejected": []}
DOUBTFUL: dict[str, Any] = {
    "privileged_context": [None, "NaN", "None", "0+3=?", "It is 1."],
    "chosen": [None, ["1", "2"], ["same"]],
    "rejected": [None, ["0", "3<|im_end|>"], ["same"]],
}
OF_NOTHING = ["none of its 16 rows has a hint", "none of its 16 rows has a pair with a weight above 0"]
OF_DOUBTFUL = [
    "in 2 of 4 hints the text is 'NaN', first in row 1;",
    "in 1 of 4 hints the text is the prompt, first in row 3;",
    "in 1 of 3 pairs chosen equals rejected, first in row 2;",
    "in 1 of 3 pairs chosen or rejected contains '<|im_end|>', first in row 1;",
]


@pytest.mark.parametrize(("columns", "wanted"), [(NOTHING, OF_NOTHING), (DOUBTFUL, OF_DOUBTFUL)])
@pytest.mark.parametrize("workers", [1, 3])
def test_what_is_probably_a_mistake_is_warned_of_once_by_any_number_of_processes(
    make: Make, columns: dict[str, Any], wanted: list[str], workers: int
) -> None:
    with pytest.warns(ComposerWarning) as caught:
        checked(make(LIVE | SIMPO, f"data.filter_overlong_prompts_workers={workers}", **columns))
    ours = [str(one.message) for one in caught if one.category is ComposerWarning]
    for one, text in zip(ours, wanted, strict=True):
        assert one.startswith(f"training data: {text}")


def test_of_several_processes_the_error_of_the_first_row_is_raised(make: Make) -> None:
    bad = ["a"] * 9 + [" ", "x" * 600]
    with pytest.raises(DataError, match="^training data, row 9, privileged_context: it is empty"):
        checked(make(LIVE, "data.filter_overlong_prompts_workers=3", privileged_context=bad))


def test_taids_t_walks_from_its_start_to_its_end_over_the_run(make: Make) -> None:
    node = LIVE | {"hint_divergence": "taid", "hint_top_k": 4, "hint_params": "{t: 0.9}", "hint_t_start": 0.4}
    trainer = make(node)
    trainer.total_training_steps = 6
    for trainer.global_steps, wanted in enumerate((0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.9), 1):
        assert trainer.taid_t() == pytest.approx(wanted)
    trainer.total_training_steps, trainer.global_steps = 1, 1
    assert trainer.taid_t() == 0.4


def test_a_model_with_a_processor_is_refused(make: Make) -> None:
    trainer = make(LIVE)
    trainer._init_tokenizer()
    trainer.processor = object()
    with pytest.raises(DataError, match="for text alone"):
        check_rows(trainer)


def test_the_chat_templates_options_are_the_datas(make: Make) -> None:
    trainer = checked(
        make(LIVE, "+data.apply_chat_template_kwargs.chat_template='hm {{ messages[0].content }}'")
    )
    assert trainer.tokenizer.decode(Prompts(trainer).ids([{"role": "user", "content": "1+1"}])) == "hm 1+1"


MODELS = "actor_rollout_ref"
OF_BATCHES = [f"{MODELS}.actor.use_dynamic_bsz=True", f"{MODELS}.rollout.log_prob_use_dynamic_bsz=True"]
OF_BATCHES += [f"{MODELS}.actor.ppo_max_token_len_per_gpu=300"]
OF_BATCHES += [f"{MODELS}.rollout.log_prob_max_token_len_per_gpu=200"]
OF_REFERENCE = [f"{MODELS}.actor.use_kl_loss=True", f"{MODELS}.ref.log_prob_use_dynamic_bsz=True"]
OF_REFERENCE += [f"{MODELS}.ref.log_prob_max_token_len_per_gpu=200"]


@pytest.mark.parametrize(
    ("teacher", "options", "limit"),
    [
        ("live", [], 512),
        ("live", [f"+{MODELS}.model.override_config.max_position_embeddings=2048"], 2048),
        ("live", OF_BATCHES, 200),
        ("live", OF_REFERENCE, 512),  # the reference is not asked
        ("base", OF_REFERENCE, 200),
    ],
    ids=str,
)
def test_the_longest_sequence_is_one_that_each_model_takes_that_scores_it(
    make: Make, teacher: str, options: list[str], limit: int
) -> None:
    assert Prompts(checked(make(LIVE | {"hint_teacher": teacher}, *options))).limit == limit


def test_a_loss_of_external_lib_is_known(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_mine.py").write_text(
        "from verl.trainer.ppo.core_algos import register_policy_loss, POLICY_LOSS_REGISTRY\n"
        "register_policy_loss('mine')(POLICY_LOSS_REGISTRY['vanilla'])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    mine = [f"{LOSS}.loss_mode=mine", "actor_rollout_ref.model.external_lib=of_mine"]
    trainer = make({}, *mine)
    del POLICY_LOSS_REGISTRY["mine"]  # other tests look at what is in it
    assert trainer.policy_only


def test_the_rows_of_a_data_set_class_of_ones_own_are_not_judged_before_it_has_made_them(
    make: Make, tmp_path: Path
) -> None:
    (tmp_path / "of_mine.py").write_text(
        "from verl.utils.dataset.rl_dataset import RLHFDataset\n"
        "class Mine(RLHFDataset):\n"
        "    def __getitem__(self, i):\n"
        "        row = super().__getitem__(i)\n"
        "        return row | {'privileged_context': str(row['privileged_context'])}\n"
    )
    mine = [f"data.custom_cls.path={tmp_path}/of_mine.py", "data.custom_cls.name=Mine"]
    assert "privileged_context" in checked(make(LIVE, *mine, privileged_context=[7.0])).columns


def test_the_teachers_prompt_is_the_policys_with_the_hint_in_it(make: Make) -> None:
    trainer = checked(make(LIVE, privileged_context=["It is 0."]))
    made, messages = Prompts(trainer), [{"role": "user", "content": "0+0=?"}]
    policys, response = torch.tensor(made.ids(messages)), torch.tensor([65, 66])
    teachers = made.hinted(messages, "It is 0.", prompt=policys, response=response)
    texts = [trainer.tokenizer.decode(ids) for ids in (policys, teachers)]
    assert texts[1] == texts[0].replace("0+0=?", "0+0=?\n\nIt is 0.")
    with pytest.raises(DataError, match="a rollout's prompt is not its row's prompt in the chat template"):
        made.hinted(messages, "It is 0.", prompt=policys[1:], response=response)
    prompt, completion = made.completion(messages, "4", {})
    assert torch.equal(prompt, policys) and trainer.tokenizer.decode(completion) == "4<|im_end|>\n"
    with pytest.raises(ComposerError, match="role 'user'"):
        made.completion(messages, messages, {})


TEMPLATE = (
    "{% for t in tools or [] %}T:{{ t.function.name }}|{% endfor %}{% for m in messages %}"
    "{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{{ c.function.arguments['path'] }}{% endfor %}|{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_pairs_of_tool_calls_are_checked_and_rendered_with_the_tools_of_the_row(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a parquet file of recorded traces has them: arguments and tools as JSON text, and every key."""

    def call(path: str) -> list[dict[str, Any]]:
        function = {"name": "read", "arguments": f'{{"path": "{path}"}}'}
        return [{"role": "assistant", "content": None, "tool_calls": [{"function": function}]}]

    columns = {"chosen": [call("a")], "rejected": [call("b")], "tools": ['[{"function": {"name": "read"}}]']}
    trainer = make(SIMPO, n_teachers_agreeing=[2], **columns)
    trainer._init_tokenizer()
    trainer.tokenizer.chat_template = TEMPLATE
    monkeypatch.setattr(trainer, "_init_tokenizer", lambda: None)
    checked(trainer)
    row = trainer.train_dataset.dataframe[0]
    made = Prompts(trainer)
    prompt, completion = made.completion(row["prompt"], row["rejected"], row)
    texts = [trainer.tokenizer.decode(ids) for ids in (prompt, completion)]
    assert texts == ["T:read|user:0+0=?|assistant:", "readb|"]
    others = row | {"tools": '[{"function": {"name": "write"}}]'}
    prompt, _ = made.completion(row["prompt"], row["rejected"], others)
    assert trainer.tokenizer.decode(prompt) == "T:write|user:0+0=?|assistant:"


def test_columns_come_back_as_they_were() -> None:
    came = [torch.tensor(2.0), np.float64(3), None, "a", [1], np.array(["b", None], dtype=object)]
    assert column_values(came) == [2.0, 3.0, None, "a", [1], ["b", None]]
    assert [row.tolist() for row in rows_of(torch.tensor([[1, 2], [3, 4]]))] == [[1, 2], [3, 4]]
