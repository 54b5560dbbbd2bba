"""`composer-plugins migrate --from prime-rl`: what is said of configs in the style of PRIME-RL's examples."""

import tomllib
from typing import Any, NamedTuple

import pytest

from composer_plugins.objective.resolve import migrate, resolve

OURS = "composer_plugins.adapters.prime_rl_plugin"
USUAL = """
max_steps = 100
seq_len = 4096
[model]
name = "Qwen/Qwen3-4B"
[wandb]
project = "p"
[trainer.model.ac]
freq = 1
[trainer.optim]
lr = 1e-6
[trainer.ckpt]
[orchestrator]
batch_size = 256
[inference.parallel]
tp = 2
[inference.server]
port = 8000
"""
ENV = '[[orchestrator.{}]]\nid = "math-env"\nname = "math"\n'
NOW = USUAL.replace("batch_size = 256", "batch_size = 256\ngroup_size = 16") + ENV.format("train.source")
CUSTOM = f'[trainer.loss]\ntype = "custom"\nimport_path = "{OURS}.loss_fn"\n'


KWARGS = NOW + CUSTOM + "[trainer.loss.kwargs]\n"
MINE = '[trainer.loss]\ntype = "custom"\nimport_path = "mine.loss"\n'
FILTER = NOW + '[[orchestrator.pre_batch_filters]]\ntype = "gibberish"\n'
SAMPLING = NOW + "[orchestrator.train.sampling{}]\n"


class Config(NamedTuple):
    """A config, and the words that its answer must have; none where PRIME-RL gets the same loss back."""

    name: str
    text: str
    named: tuple[str, ...] = ()
    version: str | None = None


CONFIGS = (
    Config("as in the examples", NOW),
    Config("ipo", NOW + '[trainer.loss]\ntype = "ipo"\n'),
    Config("dppo of ours", KWARGS + 'policy = "dppo_tv"\n'),
    Config("cispo of ours", KWARGS + 'policy = "cispo"\nold_policy = "rollout"\n'),
    Config("a loss of the user's", NOW + MINE, ("mine.loss",)),
    Config("nucleus sampling", SAMPLING.format("") + "top_p = 0.9\n", ("top_p",)),
    Config("a temperature", SAMPLING.format("") + "temperature = 0.7\n"),
    Config("echo", NOW + '[orchestrator.algo]\ntype = "echo"\n', ("echo",)),
    Config("on-policy distillation", NOW + '[orchestrator.algo]\ntype = "opd"\n', ("opd",)),
    Config("a length penalty", NOW + '[orchestrator.algo]\ntype = "grpo"\nlength_penalty = {}\n',
           ("length_",)),
    Config("a filter that counts", FILTER, (), "0.8.0"),
    Config("a filter that drops", FILTER + "enforce = true\n", ("filters",), "0.8.0"),
    Config("a group size of its own", NOW.replace('name = "math"', 'name = "math"\ngroup_size = 4')),
    Config("a misspelt option", NOW.replace("group_size", "groupsize"), ("groupsize",)),
    Config("an option of a fork", NOW + "[trainer.spo]\nrho = 0.1\n", ("trainer.spo",)),
)  # fmt: skip


def said(config: Config) -> list[str]:
    table: dict[str, Any] = tomllib.loads(config.text)
    read = resolve("prime-rl", table, config.version)
    if read.objective is None:
        return [str(one) for one in read.findings]
    found = migrate(read.objective, "prime-rl", None)
    return [*read.unread, *map(str, read.errors), *map(str, found.differences)]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_nothing_differs_only_where_nothing_does(config: Config) -> None:
    found = said(config)
    assert bool(found) == bool(config.named), found
    assert all(any(word in one for one in found) for word in config.named), found
