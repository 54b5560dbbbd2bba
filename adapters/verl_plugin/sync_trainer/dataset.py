"""Checks of the training data for the hint and replay channels, before a worker is started."""

from typing import Any

from composer_plugins.adapters.verl_plugin.requirements import missing_columns
from composer_plugins.adapters.verl_plugin.sync_trainer.prompts import Prompts
from composer_plugins.adapters.verl_plugin.upstream import Key, at
from composer_plugins.columns import hint_of, hinted_prompt, pairs_of
from composer_plugins.diagnosis import enforce
from composer_plugins.errors import DataError

DATA = "training data"


def check_rows(trainer: Any) -> frozenset[str]:
    """Return the training data's columns, after every row's hint and pairs were checked."""
    if trainer.processor is not None:
        problem = "the model comes with a processor, and the hint and replay channels are for text alone"
        raise DataError(DATA, problem, "set hint_weight=0 and replay_weight=0")
    dataset, key = trainer.train_dataset, trainer.config.data.prompt_key
    columns = frozenset(dataset[0])
    enforce(missing_columns(trainer.channels, {f"the {DATA}": columns - {"raw_prompt", "dummy_tensor"}}))
    rows = getattr(dataset, "dataframe", None)
    own_class = at(trainer.config, Key.DATASET_CLASS)  # may make its rows only when they are asked for
    if rows is not None and not own_class:
        prompts = Prompts(trainer)
        for i, row in enumerate(rows):
            try:
                _check_row(trainer, prompts, row, row[key])
            except DataError as error:
                raise error.under(f"{DATA}, row {i}", ", ") from None
            prompts.cache.clear()  # the token ids of a large data set would fill the memory
    return columns


def _check_row(trainer: Any, prompts: Prompts, row: dict[str, Any], prompt: Any) -> None:
    messages = prompt if isinstance(prompt, list) else []
    if not messages or not all(isinstance(m, dict) and {"role", "content"} <= {*m} for m in messages):
        raise DataError("prompt", f"it is {str(prompt)[:60]!r}", "write messages, each with role and content")
    if trainer.channels.hint and (hint := hint_of(row)) is not None:
        ids = prompts.ids(hinted_prompt(messages, hint, prompts.template))
        longest = len(ids) + trainer.config.data.max_response_length
        prompts.check_length(longest, "prompt + hint + data.max_response_length")
    if trainer.channels.replay:
        for pair in pairs_of(row):
            prompts.completion(messages, pair.chosen)
            prompts.completion(messages, pair.rejected)
