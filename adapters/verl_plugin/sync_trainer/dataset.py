"""Checks of the training data for the hint and replay channels, before a worker is started."""

import json
import warnings
from collections.abc import Mapping
from typing import Any

from composer_plugins import columns
from composer_plugins.adapters.verl_plugin.options import Channels
from composer_plugins.adapters.verl_plugin.sync_trainer.prompts import Prompts
from composer_plugins.columns import AGREEING, CHOSEN, HINT, REJECTED, TOOLS, hint_of, hinted_prompt, pairs_of
from composer_plugins.config import at
from composer_plugins.errors import ComposerWarning, ConfigError, DataError
from composer_plugins.frameworks.verl import Key

DATA = "training data"


def check_rows(trainer: Any) -> frozenset[str]:
    """Return the training data's columns, after every row's hint and pairs were checked."""
    if trainer.processor is not None:
        problem = "the model comes with a processor, and the hint and replay channels are for text alone"
        raise DataError(DATA, problem, "set hint_weight=0 and replay_weight=0")
    dataset = trainer.train_dataset
    names = frozenset(dataset[0])
    for column, weight in wanted_columns(trainer.channels).items():
        if column not in names:
            has = ", ".join(sorted(names - {"raw_prompt", "dummy_tensor"}))
            problem = f"{weight} > 0 needs the column {column!r}, and the {DATA} has {has}"
            remedy = f"add the column (None in rows without one), or set {weight}=0"
            raise ConfigError(Key.TRAIN_FILES, problem, remedy)
    own_class = at(trainer.config, Key.DATASET_CLASS)  # may make its rows only when they are asked for
    if getattr(dataset, "dataframe", None) is not None and not own_class:
        _check(dataset, RowCheck(trainer))
    return names


def wanted_columns(channels: Channels) -> dict[str, str]:
    """Return the data set's columns that the channels need, each with the weight that needs it."""
    hint = {HINT: "hint_weight"} if channels.hint else {}
    return hint | (dict.fromkeys((CHOSEN, REJECTED), "replay_weight") if channels.replay else {})


def _check(dataset: Any, check: "RowCheck") -> None:
    """Raise the first row's DataError, and warn of what is probably a mistake.

    verl's data is a `datasets.Dataset`, whose `map` has a progress bar and several processes.
    """
    rows, workers = dataset.dataframe, dataset.num_workers or 1  # data.filter_overlong_prompts_workers
    rows = rows.select_columns([name for name in check.columns if name in rows.column_names])
    checked = rows.map(
        check,
        remove_columns=rows.column_names,
        num_proc=workers if workers > 1 else None,
        load_from_cache_file=False,  # the cache's key has neither our code nor all settings
        desc=f"Checking the {' and '.join(check.channels)} of the {DATA}",
    )
    found = [json.loads(text) for text in checked["found"]]
    for i, row in enumerate(found):
        if row["error"]:
            raise DataError(*row["error"]).under(f"{DATA}, row {i}", ", ")
    for channel in check.channels:
        for warning in columns.warnings_of([row[channel] for row in found], channel, DATA):
            warnings.warn(warning, ComposerWarning, stacklevel=2)


class RowCheck:
    """The check of one row."""

    def __init__(self, trainer: Any) -> None:
        self.key, self.prompts = trainer.config.data.prompt_key, Prompts(trainer)
        self.max_response_length = trainer.config.data.max_response_length
        self.channels = [name for name in columns.UNITS if getattr(trainer.channels, name)]
        self.special_tokens = columns.special_tokens(trainer.tokenizer)
        self.columns = (self.key, HINT, CHOSEN, REJECTED, AGREEING, TOOLS)

    def __call__(self, row: Mapping[str, Any]) -> dict[str, str]:
        """Return the error of a row, or null, and its notes for each channel, as JSON."""
        found: dict[str, Any] = {"error": None}
        try:
            self._check(row, row.get(self.key), found)
        except DataError as error:
            found["error"] = (error.key, error.problem, error.remedy)
        self.prompts.cache.clear()  # the token ids of a large data set would fill the memory
        return {"found": json.dumps(found)}

    def _check(self, row: Mapping[str, Any], prompt: Any, found: dict[str, Any]) -> None:
        messages = prompt if isinstance(prompt, list) else []
        if not messages or not all(isinstance(m, dict) and {"role", "content"} <= {*m} for m in messages):
            problem = f"it is {str(prompt)[:60]!r}"
            raise DataError("prompt", problem, "write messages, each with role and content")
        if "hint" in self.channels:
            found["hint"] = columns.hint_notes(row, messages)
            if (hint := hint_of(row)) is not None:
                ids = self.prompts.ids(hinted_prompt(messages, hint, self.prompts.template))
                longest = len(ids) + self.max_response_length
                self.prompts.check_length(longest, "prompt + hint + data.max_response_length")
                found["hint"] += ["same"] if ids == self.prompts.ids(messages) else []
        if "replay" in self.channels:
            for pair in (pairs := pairs_of(row)):
                self.prompts.completion(messages, pair.chosen, row)
                self.prompts.completion(messages, pair.rejected, row)
            found["replay"] = columns.pair_notes(pairs, messages, self.special_tokens)
