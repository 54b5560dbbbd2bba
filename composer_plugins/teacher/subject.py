"""`Subject`: a policy with the rows it will train on, how a prompt is encoded and a completion rewarded."""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from composer_plugins.columns import HINT, Completion, Prompt, Row, hint_of, prompt_of, template_messages
from composer_plugins.errors import ConfigError, DataError, in_a_line
from composer_plugins.losses.derived import function_of_import_path

PROBE = "composer_plugins.adapters.trl_mixin.probe"
LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
TokenIds = list[int]
Encode = Callable[[list[Prompt]], list[TokenIds]]
Rewards = Callable[[Sequence[Row], list[Completion], list[TokenIds]], list[float | None]]


@dataclass(frozen=True)
class Subject:
    """A policy, its rows, and what is drawn from it."""

    model: Any
    tokenizer: Any
    rows: Sequence[Row]  # with a prompt and a hint
    encode: Encode
    rewards: Rewards
    temperature: float = 1.0  # of the sampled completions and of the distributions that are compared
    max_new_tokens: int = 256
    samples: int = 4  # completions of each prompt
    batch_size: int = 16  # rows of a forward pass

    @classmethod
    def of_files(
        cls,
        model: str,
        data: str,
        reward: str,
        *,
        rows: int = 32,
        seed: int = 0,
        device: str = "cpu",
        **options: Any,
    ) -> "Subject":
        """A model and rows by path or by name on the hub, and a reward function by import path.

        `reward` is called as TRL calls it: by keyword with prompts, completions, completion_ids and each
        column of the rows. A prompt is encoded as TRL encodes it: messages by the chat template.
        Raises ConfigError for what cannot be loaded, DataError for rows without a hint.
        """
        function = function_of_import_path(reward, "--reward")
        transformers = _library("transformers")
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(model)
            policy = transformers.AutoModelForCausalLM.from_pretrained(model).to(device).eval()
        except Exception as error:  # files, formats and names: each has exceptions of its own
            remedy = "give a folder with a model and a tokenizer, or a name on the Hugging Face hub"
            raise ConfigError("--model", f"{model!r} cannot be loaded: {in_a_line(error)}", remedy) from error
        chosen = chosen_rows(_loaded(data), rows, seed)
        return cls(policy, tokenizer, chosen, chat_encoder(tokenizer), _called(function), **options)

    @classmethod
    def of_trainer(cls, trainer: Any, *, rows: int = 32, seed: int = 0, **options: Any) -> "Subject":
        """The policy, data, chat template, rewards and sampling of a GRPOTrainer."""
        own = import_module(PROBE).teacher_subject(trainer)
        chosen = chosen_rows(own.pop("rows"), rows, seed)
        return cls(rows=chosen, **{**own, **options})

    def completions(self, prompts: Sequence[TokenIds], *, sampled: bool) -> list[TokenIds]:
        """The token ids of a completion of each prompt, with the token that ends it."""
        made = list[TokenIds]()
        for batch in batches(prompts, self.batch_size):
            ids, mask = self._padded(batch, "left")
            choosing = {"temperature": self.temperature, "top_k": 0, "top_p": 1.0} if sampled else {}
            ends = self._ends()
            with torch.no_grad():
                whole = self.model.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    do_sample=sampled,
                    max_new_tokens=self.max_new_tokens,
                    pad_token_id=self._padding(),
                    eos_token_id=ends,
                    **choosing,
                )
            for completion in whole[:, ids.shape[1] :].tolist():
                end = next((i for i, token in enumerate(completion, start=1) if token in ends), None)
                made.append(completion[:end])
        return made

    def logits(self, prompts: Sequence[TokenIds], completions: Sequence[TokenIds]) -> tuple[Tensor, Tensor]:
        """The logits [rows, tokens, vocab] that predict the completions' tokens, and the mask of these."""
        before, seen = self._padded(prompts, "left")
        after, mask = self._padded(completions, "right")
        attention = torch.cat([seen, mask], 1)
        positions = (attention.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            found = self.model(
                input_ids=torch.cat([before, after], 1),
                attention_mask=attention,
                position_ids=positions,
                use_cache=False,
            ).logits
        return found[:, before.shape[1] - 1 : -1], mask.bool()

    def texts(self, completions: Iterable[TokenIds]) -> list[str]:
        """The completions as text, without special tokens."""
        return [self.tokenizer.decode(one, skip_special_tokens=True) for one in completions]

    def rewarded(self, rows: Sequence[Row], completions: Sequence[TokenIds]) -> list[float]:
        """The reward of each completion; NaN where the reward function says that it does not apply."""
        texts = self.texts(completions)
        said: list[Completion] = [
            text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]
            for row, text in zip(rows, texts, strict=True)
        ]
        found = self.rewards(rows, said, list(completions))
        if len(found) != len(rows):
            problem = f"it returned {len(found)} rewards for {len(rows)} completions"
            raise DataError("reward", problem, "return one for each")
        return [math.nan if one is None else float(one) for one in found]

    def _padded(self, rows: Sequence[TokenIds], side: str) -> tuple[Tensor, Tensor]:
        """Token ids [rows, width], padded on the "left" or the "right", and where they are not padding."""
        ids = [torch.tensor(row, dtype=torch.long, device=self.model.device) for row in rows]
        pad = partial(pad_sequence, batch_first=True, padding_side=side)
        return pad(ids, padding_value=self._padding()), pad([torch.ones_like(row) for row in ids])

    def _padding(self) -> int:
        own = self.tokenizer.pad_token_id
        return self._ends()[0] if own is None else int(own)

    def _ends(self) -> list[int]:
        """The tokens that end a completion: the model's, and the tokenizer's."""
        own = getattr(self.model.generation_config, "eos_token_id", None)
        own = own if isinstance(own, list) else [own]
        return list(dict.fromkeys(one for one in (*own, self.tokenizer.eos_token_id) if one is not None))


def batches(rows: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Yield the rows in batches of this size."""
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def chosen_rows(rows: Iterable[Row], number: int, seed: int) -> list[Row]:
    """Return `number` of the rows that have a hint, drawn at random; DataError if none has one."""
    hinted = [row for row in rows if prompt_of(row) and hint_of(row) is not None]
    if not hinted:
        problem = f"no row has a text in the column {HINT}"
        raise DataError(
            "data", problem, f"write what the teacher knows in addition to the prompt into {HINT}"
        )
    return random.Random(seed).sample(hinted, min(number, len(hinted)))


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise ConfigError(name, "it is not installed here", f"pip install {name}") from None


def _loaded(data: str) -> Any:
    """The rows of a file, or of the training split of a data set on the hub."""
    datasets, path = _library("datasets"), Path(data)
    loader = LOADERS.get(path.suffix)
    try:
        if loader:
            return datasets.load_dataset(loader, data_files=str(path), split="train")
        return datasets.load_dataset(data, split="train")
    except Exception as error:  # as with the model
        remedy = f"give a file ({' '.join(LOADERS)}) or the name of a data set"
        raise ConfigError("--data", f"{data!r} cannot be loaded: {in_a_line(error)}", remedy) from error


def chat_encoder(tokenizer: Any) -> Encode:
    """Encode prompts as TRL does: messages by the chat template, with the start of the reply."""

    def encode(prompts: list[Prompt]) -> list[TokenIds]:
        return [
            tokenizer(prompt)["input_ids"]
            if isinstance(prompt, str)
            else tokenizer.apply_chat_template(
                template_messages(prompt), add_generation_prompt=True, return_dict=True
            )["input_ids"]
            for prompt in prompts
        ]

    return encode


def _called(function: Callable[..., Any]) -> Rewards:
    def rewards(
        rows: Sequence[Row], completions: list[Completion], ids: list[TokenIds]
    ) -> list[float | None]:
        columns = {key: [row[key] for row in rows] for key in rows[0] if key not in ("prompt", "completion")}
        prompts = [row["prompt"] for row in rows]
        given = {"prompts": prompts, "completions": completions, "completion_ids": ids, **columns}
        return list(function(**given))

    return rewards
