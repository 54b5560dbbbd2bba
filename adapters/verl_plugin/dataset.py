"""What the hint and replay channels ask of the data, checked before a worker is started."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pyarrow.parquet

from composer_plugins.adapters.verl_parts.run import at, missing_column
from composer_plugins.adapters.verl_plugin.prompts import Prompts
from composer_plugins.columns import hint_of, hinted_prompt, pairs_of
from composer_plugins.errors import DataError


def check_files(trainer: Any) -> None:
    """Raise ConfigError for a local parquet file without a column that a channel wants."""
    if own_class(trainer):
        return  # it may make its columns
    files = trainer.config.data.train_files
    for file in [files] if isinstance(files, str) else files:
        if Path(file).suffix == ".parquet" and Path(file).is_file():
            _check_columns(trainer, str(file), pyarrow.parquet.read_schema(file).names)


def check_rows(trainer: Any) -> frozenset[str]:
    """The training data's columns, once every row's hint and pairs are known to be sound and to fit."""
    if trainer.processor is not None:
        raise DataError("hint and replay are for text, and this model comes with a processor for more")
    dataset = trainer.train_dataset
    columns = frozenset(dataset[0])
    _check_columns(trainer, "the training data", columns - {"raw_prompt", "dummy_tensor"})
    rows, key = getattr(dataset, "dataframe", None), trainer.config.data.prompt_key
    if rows is not None and not own_class(trainer):  # another class's rows are checked when they come
        made = Prompts(trainer)
        for i, row in enumerate(rows):
            try:
                _check_row(trainer, made, row, row[key])
            except DataError as error:
                raise DataError(f"training data, row {i}: {error}") from None
            made.known.clear()  # of a large data set they would fill the memory
    return columns


def own_class(trainer: Any) -> bool:
    """Whether the data set's class is the user's."""
    return bool(at(trainer.config, "data.custom_cls.path"))


def _check_row(trainer: Any, made: Prompts, row: dict[str, Any], prompt: Any) -> None:
    messages = prompt if isinstance(prompt, list) else []
    if not messages or not all(isinstance(m, dict) and {"role", "content"} <= {*m} for m in messages):
        raise DataError(f"the prompt is {str(prompt)[:60]!r}; wanted messages, each with role and content")
    if trainer.channels.hint and (hint := hint_of(row)) is not None:
        ids = made.ids(hinted_prompt(messages, hint, made.template))
        made.check(
            len(ids) + trainer.config.data.max_response_length, "prompt + hint + data.max_response_length"
        )
    if trainer.channels.replay:
        for pair in pairs_of(row):
            made.completion(messages, pair.chosen)
            made.completion(messages, pair.rejected)


def _check_columns(trainer: Any, file: str, columns: Collection[str]) -> None:
    if fault := missing_column(file, columns, trainer.channels):
        raise fault.error()
