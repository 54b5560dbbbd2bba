"""Batches as files: what a loss was called with in a micro-batch, for `composer-plugins compare`.

A file is in the safetensors format. It has the inputs of a loss under their names in `losses/inputs.py`, the
ids of the tokens, and as metadata what ran (`About`).
"""

import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count, groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, JsonValue
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from composer_plugins.errors import ComposerError, ComposerWarning, ConfigError, DataError, in_a_line, writing
from composer_plugins.losses.choosing import Choice, choose
from composer_plugins.losses.inputs import INPUTS, VOCAB
from composer_plugins.losses.masks import boolean_mask
from composer_plugins.losses.row import Kind

KEY = "composer_plugins"  # of the metadata
IDS = ("ids", "prompt_ids")  # tokens of completions and of prompts, both [rows, tokens]
KNOWN = {*IDS, *(name for name, one in INPUTS.items() if one.shape[0] == "[" and one.shape != VOCAB)}
STEP = re.compile(r"^step_?(\d+)|^(\d+)_\d+\.pt$")  # in the name of a file, or of a folder of PRIME-RL
# The columns of the token export of PRIME-RL, and of the dumps of Miles.
PRIME_RL = {"ids": "token_ids", "logprobs": "trainer_logprobs", "rollout_logprobs": "inference_logprobs"}
PRIME_RL |= {"advantages": "advantages", "entropies": "entropy", "mask": "loss_mask"}
MILES = {"old_logprobs": "log_probs", "rollout_logprobs": "rollout_log_probs", "advantages": "advantages"}
MILES |= {"ref_logprobs": "ref_log_probs", "entropies": "entropy", "mask": "loss_masks"}
Counts = Literal["num_tokens", "num_sequences", "num_prompts", "num_pairs", "max_length"]

_numbers = count()


class About(BaseModel):
    """What is known of a micro-batch in addition to its tensors.

    The framework's loss is `factor` times the loss of each token, reduced by `mode` with `counts`. These are
    of the whole batch, with every rank and micro-batch. The micro-batch has its own where one is absent.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    schema_version: Literal[1] = 1
    kind: Kind = "policy"
    name: str = ""  # of the loss, with its dialect; "" where it is not known
    params: dict[str, float | int | str | bool | None] = {}
    optional: tuple[str, ...] = ()  # the optional inputs that the loss was called with
    mode: str = ""
    counts: dict[Counts, float] = {}
    factor: float = 1.0  # with which the framework multiplies: ranks, accumulated micro-batches
    loss: float | None = None  # what the framework got for this micro-batch
    framework: str = ""
    version: str = ""
    step: int = 0
    rank: int = 0
    process: int = 0
    extra: dict[str, JsonValue] = {}  # `compare --tokens` shows {"texts": {id: text}}


class Batch(NamedTuple):
    """One recorded micro-batch."""

    about: About
    tensors: dict[str, Tensor]


def save(
    folder: str | Path,
    tensors: Mapping[str, Any],
    *,
    choice: Choice | str = "",
    loss: float | Tensor | None = None,
    counts: Mapping[str, float | Tensor] | None = None,
    **about: Any,
) -> Path:
    """Write a micro-batch to a file of its own in `folder`, and return its path.

    `tensors` have the names of `losses/inputs.py`, or of `IDS`. Logits and None are left out. `choice` is the
    loss that ran, or its name; then `kind` and `params` are its own. `about` are further fields of `About`.
    Raises DataError for other names, and ConfigError for a wrong loss and for a file that cannot be written.
    """
    from safetensors.torch import save as as_bytes

    if unknown := [name for name in tensors if name not in KNOWN and name not in INPUTS]:
        raise DataError(unknown[0], "it is not an input of a loss", "take its name from losses/inputs.py")
    if isinstance(choice, str) and choice:
        kind, params = about.pop("kind", "policy"), about.pop("params", None)
        choice = choose(kind, choice, params, option="choice")
    if isinstance(choice, Choice):
        about |= {"kind": choice.loss.kind, "name": choice.name, "params": {**choice.params}}
        about |= {"optional": choice.optional, "mode": about.get("mode") or choice.mode}
    about |= {"rank": int(os.environ.get("RANK", "0")), "process": os.getpid()}
    about["counts"] = {name: float(x) for name, x in (counts or {}).items()}
    about["loss"] = None if loss is None else torch.as_tensor(loss, dtype=torch.float64).item()
    made = About(**about)
    kept = {name: x.detach() for name, x in tensors.items() if name in KNOWN and isinstance(x, Tensor)}
    kept |= {name: boolean_mask(name, x, check=True) for name, x in kept.items() if name == "mask"}
    copies = {name: x.to("cpu", copy=True).contiguous() for name, x in kept.items()}
    number = f"rank{made.rank}-process{made.process}-{next(_numbers):06d}"
    path = Path(folder, f"step{made.step:08d}-{number}.safetensors")
    part = path.with_name(f".{path.name}.part")
    with writing("record_batches", folder):
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(as_bytes(copies, {KEY: made.model_dump_json()}))
        part.replace(path)
    return path


@dataclass
class Recorder:
    """Records every `every`-th step, from the first one on. It raises nothing.

    Where the framework gives no step, each call is a step.
    """

    folder: str
    every: int
    choice: Choice | str  # "" where the framework's own loss runs
    about: Mapping[str, str]
    first: int | None = None
    calls: int = 0
    is_off: bool = False  # after a failure

    @classmethod
    def of(
        cls, folder: str | None, every: int, choice: Choice | str, *, framework: str, version: str, mode: str
    ) -> "Recorder | None":
        """Return a recorder, or None without a folder. Raises ConfigError for `every` below 1."""
        if every < 1:
            raise ConfigError("record_every", f"it is {every}", "set a number of steps of at least 1")
        about = {"framework": framework, "version": version, "mode": mode}
        return cls(folder, every, choice, about) if folder else None

    def __call__(
        self,
        tensors: Mapping[str, Any],
        *,
        loss: float | Tensor | None = None,
        counts: Mapping[str, float | Tensor] | None = None,
        factor: float = 1.0,
        step: int | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a micro-batch if its step is to be recorded. The first failure is a warning and the end."""
        if self.is_off:
            return
        try:
            now = self.calls if step is None else int(step)
            self.calls += 1
            self.first = now if self.first is None else self.first
            if (now - self.first) % self.every == 0:
                about = {**self.about, "factor": float(factor), "step": now, "extra": dict(extra or {})}
                kept = {name: x for name, x in tensors.items() if name in KNOWN}
                save(self.folder, kept, choice=self.choice, loss=loss, counts=counts, **about)
        except Exception as error:  # whatever it is, the run goes on
            self.is_off = True
            text = str(error) if isinstance(error, ComposerError) else f"record_batches: {in_a_line(error)}"
            text = f"{text}. The run goes on, and records nothing more"
            warnings.warn(text, ComposerWarning, stacklevel=2)


def load(path: str | Path, *, step: int | None = None) -> list[Batch]:
    """Return the batches of a file, or of every file in a folder; with `step`, the batches of this step.

    The token export of PRIME-RL and the dumps of Miles (`train_data/*.pt`) are read too.
    Raises DataError for what is neither of them nor written by `save`.
    """
    found = [one for at, file in _files(Path(path)) if step in (None, at) for one in _read(file)]
    if not found:
        problem = "no recorded batch is there" if step is None else f"no batch of step {step} is there"
        remedy = f"name another folder, or one of the steps that it has: {steps(path)}"
        raise DataError(str(path), problem, remedy)
    return found


def steps(path: str | Path) -> list[int]:
    """Return the steps of which a file or a folder has batches, in their order."""
    return sorted({step for step, _ in _files(Path(path))})


def _files(path: Path) -> list[tuple[int, Path]]:
    """Return each file of batches with the step in its name."""
    every = sorted(path.rglob("[!.]*")) if path.is_dir() else [path]
    kept = [one for one in every if one.suffix in READERS and one.parent.name != "rollout_data"]
    found = [(STEP.search(one.name) or STEP.search(one.parent.name), one) for one in kept]
    return [(int(match[1] or match[2]) if match else 0, one) for match, one in found]


def _read(path: Path) -> list[Batch]:
    try:
        return READERS[path.suffix](path)
    except Exception as error:  # each format has errors of its own, and pydantic too
        problem = f"it cannot be read: {in_a_line(error, most=300)}"
        remedy = "write it with composer_plugins.batches.save, or read it where safetensors is installed"
        raise DataError(str(path), problem, remedy) from None


def _of_safetensors(path: Path) -> list[Batch]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        if KEY not in (metadata := file.metadata() or {}):
            raise ValueError("it has no metadata of composer_plugins")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return [Batch(About.model_validate_json(metadata[KEY]), tensors)]


def _of_prime_rl(path: Path) -> list[Batch]:
    """Return the micro-batches of PRIME-RL's token export, in which each line is a sequence."""
    found = []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for _, group in groupby(lines, lambda line: line["micro_step"]):
        rows = [*group]
        for row in rows:  # of several losses in a batch, the mask of the RL loss
            if any("rl" in one for one in row.get("losses", ())):
                row["loss_mask"] = [one.get("rl", {}).get("mask", False) for one in row["losses"]]
        tensors = {name: _padded([row[theirs] for row in rows]) for name, theirs in PRIME_RL.items()}
        about = About(framework="prime-rl", step=rows[0]["export_step"], rank=rows[0]["rank"])
        found.append(Batch(about, tensors))
    return found


def _of_miles(path: Path) -> list[Batch]:
    """Return a rank's batch of Miles. The policy before the updates is also taken for the current one."""
    whole = torch.load(path, map_location="cpu", weights_only=True)
    columns = whole["rollout_data"]
    if columns.get("log_probs") is None:  # an earlier stage of a pipeline
        return []
    lengths = [int(n) for n in columns["response_lengths"]]
    found = {name: columns[theirs] for name, theirs in MILES.items() if columns.get(theirs) is not None}
    found["ids"] = [x[-n:] for x, n in zip(columns["tokens"], lengths, strict=True)]
    for name, column in found.items():
        if [len(x) for x in column] != lengths:
            raise ValueError(f"its {name!r} has a part of each response, as with context parallelism")
    tensors = {name: _padded(column) for name, column in found.items()}
    tensors["mask"], tensors["logprobs"] = tensors["mask"].bool(), tensors["old_logprobs"]
    return [Batch(About(framework="miles", step=whole["rollout_id"], rank=whole["rank"]), tensors)]


def _padded(rows: Iterable[Iterable[Any]]) -> Tensor:
    """Return rows of several lengths as [rows, tokens], with 0 behind the shorter ones and NaN for None."""
    made = [torch.as_tensor([torch.nan if x is None else x for x in row]) for row in rows]
    return pad_sequence(made, batch_first=True)


READERS = {".safetensors": _of_safetensors, ".jsonl": _of_prime_rl, ".pt": _of_miles}
