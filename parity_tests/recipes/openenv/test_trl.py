"""TRL's tool loop on the environment: rewards, hints, and where their gradient is."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from datasets import Dataset

from composer_plugins.adapters.trl_mixin import ComposerGRPOTrainer
from composer_plugins.errors import DataError
from composer_plugins.recipes.openenv import policy, train
from composer_plugins.recipes.openenv.server import serving
from composer_plugins.recipes.openenv.tasks import EXPRESSIONS, Task, function_source, make_tasks
from composer_plugins.recipes.openenv.trl_tools import FINISHED, DeletedFunctionTools, environments

pytestmark = pytest.mark.filterwarnings("ignore:You are using 'environment_factory'")

TASKS = make_tasks(0)


def wrong(task: Task) -> str:
    """A function that fails the first test."""
    others = [one for one in EXPRESSIONS if function_source(task.function, one) != task.solution]
    return function_source(task.function, others[0])


@pytest.fixture
def tools(url: str) -> Iterator[DeletedFunctionTools]:
    with environments(url) as factory:
        yield factory()


def test_the_first_failing_test_is_the_hint_of_the_first_turn(tools: DeletedFunctionTools) -> None:
    assert tools.reset(seed=0, task=4, prompt=[], another_column=1) == TASKS[4].prompt
    assert (tools.privileged_context, tools.hint_turn, tools.get_reward()) == (None, None, 0.0)
    said = tools.write_function(wrong(TASKS[4]))
    assert said == tools.privileged_context and "should be" in said
    assert tools.hint_turn == 0
    tools.write_function(TASKS[4].solution)
    assert tools.get_reward() == 0.5 and tools.privileged_context == said
    assert tools.write_function(TASKS[4].solution) == FINISHED and tools.get_reward() == 0.5
    tools.reset(seed=0, task=4)
    tools.write_function(TASKS[4].solution)
    assert (tools.privileged_context, tools.hint_turn, tools.get_reward()) == (None, None, 1.0)


def test_a_server_that_is_killed_ends_the_training() -> None:
    """TRL turns the exception of the tool into text for the model, so the reward and the reset raise it."""
    others = set(psutil.Process().children())
    with serving(1) as address, environments(address) as factory:
        (server,) = set(psutil.Process().children()) - others
        tools = factory()
        tools.reset(seed=0, task=4)
        server.kill()
        server.wait()
        with pytest.raises(Exception, match="close frame|[Cc]onnect") as first:
            tools.write_function(TASKS[4].solution)
        said = rf"server: {address} does not answer as it should \({type(first.value).__name__}: "
        with pytest.raises(DataError, match=said):
            tools.get_reward()
        with pytest.raises(DataError, match=f"server: {address} does not answer as it should"):
            tools.reset(seed=0, task=4)


def test_a_server_that_was_started_again_ends_the_training(url: str) -> None:
    """It has no episode for this connection, and would reward every attempt with 0."""
    with environments(url) as factory:
        tools = factory()
        with pytest.raises(ConnectionError, match="it was started again"):
            tools.write_function(TASKS[4].solution)
        with pytest.raises(DataError, match="ConnectionError: it was started again"):
            tools.get_reward()


def call(source: str) -> str:
    arguments = json.dumps({"name": "write_function", "arguments": {"source": source}})
    return f"<tool_call>\n{arguments}\n</tool_call>"


def make_trainer(factory: Any, folder: Path, batch: int) -> Any:
    tokenizer = policy.make_tokenizer()
    torch.manual_seed(0)
    config = train.trainer_config(1.0, 1, 0, str(folder))
    config.per_device_train_batch_size = config.num_generations = config.generation_batch_size = batch
    rows = [{"prompt": [{"role": "user", "content": ""}], "seed": 0, "task": 4}] * batch
    return ComposerGRPOTrainer(
        model=policy.make_model(tokenizer),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        environment_factory=factory,
    )


def batch_of(trainer: Any, turns: list[list[str]]) -> dict[str, Any]:
    """The batch, before it is shuffled, of a policy whose row i says its turns one after the other."""
    left = [list(of_row) for of_row in turns]

    def generate(*_: Any, **__: Any) -> tuple[list[list[int]], None]:
        """All rows speak at first, then those that have called a tool, in their order."""
        texts = [of_row.pop(0) + policy.END for of_row in left if of_row]
        return [trainer._tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts], None

    trainer._generate_single_turn = generate
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer._generate_and_score_completions([dict(row) for row in trainer.train_dataset])


def test_only_the_failed_turn_carries_the_hint_and_tool_tokens_are_masked(url: str, tmp_path: Path) -> None:
    """adapters/trl_mixin/test_environment_hints.py looks at the gradient of such a batch."""
    task = TASKS[4]
    turns = [
        [call(wrong(task)), call(task.solution), "done"],  # fails, then passes
        [call(task.solution), "done"],  # passes: no hint
        [call(wrong(task)), call(wrong(task)), "done"],  # fails twice
        ["no call at all"],
    ]
    with environments(url) as factory:
        trainer = make_trainer(factory, tmp_path, len(turns))
        inputs = batch_of(trainer, turns)
        assert [env.get_reward() for env in trainer.environments] == [0.5, 1.0, 0.0, 0.0]
    tokens, tool_mask, hint_mask = (inputs[name] for name in ("completion_ids", "tool_mask", "hint_mask"))
    tokenizer, own = trainer._tokenizer, (tool_mask * inputs["completion_mask"]).bool()
    for row, said in enumerate(turns):
        assert tokenizer.decode(tokens[row][own[row]]) == "".join(text + policy.END for text in said)
        hinted = tokenizer.decode(tokens[row][hint_mask[row].bool()])
        assert hinted == (said[0] + policy.END if row in (0, 2) else "")
    # The teacher's prompt ends with the failing test, the student's has none.
    teacher, student = (
        [tokenizer.decode(ids[ids != tokenizer.pad_token_id]) for ids in inputs[name]]
        for name in ("hint_prompt_ids", "prompt_ids")
    )
    assert "should be" in teacher[0] and "should be" in teacher[2] and "should be" not in student[0]
    assert teacher[1] == student[1]
    assert teacher[0].startswith(student[0].split(policy.END + "\n<|im_start|>a")[0])


def test_prompts_hints_and_completions_fit_the_model() -> None:
    """No text of the task is unknown to the tokenizer, and none is cut off."""
    tokenizer = policy.make_tokenizer()
    for task in (one for seed in range(20) for one in make_tasks(seed)):
        for guess in EXPRESSIONS:
            hinted = f"{task.prompt}\n\n{policy.failure(task, guess)}"
            messages = [{"role": "user", "content": hinted}, policy.attempt(task.function, guess)]
            ids = tokenizer.apply_chat_template(messages, tools=policy.TOOLS, return_dict=True)["input_ids"]
            text = tokenizer.apply_chat_template(messages, tools=policy.TOOLS, tokenize=False)
            assert tokenizer.decode(ids) == text and len(ids) < 100 < policy.LONGEST


def test_the_warm_up_says_nothing_about_a_task() -> None:
    """Given a name, every expression is as likely."""
    draw = random.Random(0)
    right: dict[str, list[str]] = {}
    for _ in range(4000):
        messages = policy.conversation(draw, hinted=True)
        source = messages[1]["tool_calls"][0]["function"]["arguments"]["source"]
        name = source.removeprefix("def ").split("(")[0]
        right.setdefault(name, []).append(source)
    for sources in right.values():
        counts = [sources.count(one) for one in sorted(set(sources))]
        assert len(counts) == len(EXPRESSIONS) and max(counts) < 2 * min(counts)
