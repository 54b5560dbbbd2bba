"""The recipes for PRIME-RL: their losses, the stamps of their environments, and PRIME-RL's own validation."""

import asyncio
import importlib
import json
import math
import os
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from composer_plugins.adapters.prime_rl_plugin.stamps import dpo_coefficient
from composer_plugins.conformance import reductions
from composer_plugins.conformance.stubs import variable
from composer_plugins.recipes.prime_rl import scoring
from parity_tests.rigs.paths import ROOT
from parity_tests.rigs.prime_rl_doubles import LossInputs
from parity_tests.rigs.prime_rl_nodes import Branch, MessageNode
from parity_tests.rigs.prime_rl_words import kwargs_of

FOLDER = ROOT / "recipes" / "prime_rl"
RECIPES = {path.stem: tomllib.loads(path.read_text()) for path in sorted(FOLDER.glob("*.toml"))}


def loss_of(name: str) -> Any:
    """The loss of a recipe, found as PRIME-RL finds it."""
    table = RECIPES[name]["trainer"]["loss"]
    assert table["type"] == "custom"
    module, _, function = table["import_path"].rpartition(".")
    fn = getattr(importlib.import_module(module), function)
    return lambda inputs: fn(inputs, **table["kwargs"])


def toy(**streams: list[float]) -> LossInputs:
    """Five tokens, of which the first is the prompt's."""
    mask = torch.tensor([False, True, True, True, True])
    given = {name: torch.tensor(values) for name, values in streams.items()}
    return LossInputs(
        trainer_logprobs=torch.tensor([-3.0, -0.5, -1.0, -0.2, -2.0]).requires_grad_(),
        inference_logprobs=torch.tensor([0.0, -0.6, -0.9, -0.2, -2.5]),
        ref_logprobs=given.get("ref_logprobs"),
        advantages=given.get("advantages", torch.full((5,), 0.5)) * mask,
        loss_mask=mask,
        loss_weights=given.get("loss_weights"),
    )


def gradient(name: str, inputs: LossInputs) -> torch.Tensor:
    loss = loss_of(name)(inputs).loss
    assert loss.isfinite()
    return torch.autograd.grad(loss, inputs.trainer_logprobs)[0]


def test_dppo_toml_is_the_default_loss_of_v0_8_with_its_numbers_written_out() -> None:
    """test_golden.py has the recorded numbers of that loss."""
    kwargs = RECIPES["dppo"]["trainer"]["loss"]["kwargs"]
    params = kwargs["policy_params"]
    assert kwargs == kwargs_of("default", {}) | {"policy_params": params}
    assert params.items() <= reductions.kernel("policy", kwargs["policy"]).keywords.items()


def test_cispo_toml_weighs_every_token_by_its_ratio_up_to_5() -> None:
    inputs = toy(advantages=[0.0, 0.5, -0.5, 1.0, 2.0])
    inputs.inference_logprobs[4] = -6.0  # a ratio of e^4
    ratios = [math.exp(0.1), math.exp(-0.1), 1.0, 5.0]
    expected = [0.0] + [-r * a for r, a in zip(ratios, [0.5, -0.5, 1.0, 2.0], strict=True)]
    torch.testing.assert_close(gradient("cispo", inputs), torch.tensor(expected))


def test_hint_sdpo_toml_adds_the_teachers_gap_at_its_weight() -> None:
    """Score estimator: weight * ratio * (log pi - log T) beside the policy's gradient, ratio at most 2."""
    reference = [0.0, -0.1, -3.0, -0.2, -0.4]
    with_hint, without = toy(ref_logprobs=reference), toy()
    added = gradient("hint_sdpo", with_hint) - gradient("hint_sdpo", without)
    p, q = with_hint.trainer_logprobs.detach(), with_hint.inference_logprobs
    expected = 0.1 * (p - q).exp().clamp(max=2.0) * (p - torch.tensor(reference)) * with_hint.loss_mask
    torch.testing.assert_close(added, expected)
    equal_rewards = toy(ref_logprobs=reference, advantages=[0.0] * 5)
    assert gradient("hint_sdpo", equal_rewards)[1:].any()  # what filter_zero_advantages would take away


def test_replay_dpo_toml_takes_a_pairs_coefficient_for_its_gradient() -> None:
    pair = toy(ref_logprobs=[0.0, 1.0, 1.0, 1.0, 1.0], loss_weights=[0.0, 0.05, 0.05, 0.05, 0.05])
    torch.testing.assert_close(gradient("replay_dpo", pair), torch.tensor([0.0] + [-0.05] * 4))
    torch.testing.assert_close(gradient("replay_dpo", toy()), gradient("dppo", toy()))


# --- the environments, on a server that is a double ---------------------------------------------------


def likely(token: int) -> float:
    return -float(token % 7) / 4 - 0.01


class Handler(BaseHTTPRequestHandler):
    """PRIME-RL's /inference/v1/generate, as its opsd asks it: prompt_logprobs by token id, as text."""

    asked: list[dict[str, Any]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body | {"path": self.path})
        entries: list[Any] = [None]
        for token in body["token_ids"][1:]:
            entries.append({"999999": {"logprob": -0.001}, str(token): {"logprob": likely(token)}})
        answer = json.dumps({"prompt_logprobs": entries}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    Handler.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def conversation(tokens: list[int], *, reward: float = 0.0, turns: int = 1) -> SimpleNamespace:
    """A prompt of two tokens and, per turn, a generation prompt of one token and what was sampled."""
    nodes = [MessageNode(token_ids=[11, 12], mask=[False, False])]
    for _ in range(turns):
        mask = [False] + [True] * len(tokens)
        nodes.append(MessageNode([13, *tokens], mask, [-0.5] * len(tokens), sampled=True))
    return SimpleNamespace(branches=[Branch(nodes)], nodes=nodes, reward=reward, ok=True)


def test_scores_are_of_the_sampled_tokens_behind_the_hint(url: str) -> None:
    trace = conversation([21, 22, 23], turns=2)
    score = scoring.server(url + "/", "teacher")
    found = asyncio.run(scoring.scores_of(trace, score, [1, 2, 3]))
    assert [node is own for (node, _), own in zip(found, trace.nodes[1:], strict=True)] == [True, True]
    assert [values for _, values in found] == [[likely(t) for t in (21, 22, 23)]] * 2
    (asked,) = Handler.asked
    assert asked["token_ids"] == [1, 2, 3, 11, 12, 13, 21, 22, 23, 13, 21, 22, 23]
    assert asked["path"] == "/inference/v1/generate" and asked["model"] == "teacher"


def test_a_node_of_two_branches_is_scored_in_the_first(url: str) -> None:
    trace = conversation([21], turns=2)
    trace.branches.append(Branch(trace.nodes[:2]))
    found = asyncio.run(scoring.scores_of(trace, scoring.server(url, "teacher")))
    assert [id(node) for node, _ in found] == [id(node) for node in trace.nodes[1:]]


class Generic:
    """Stands in for verifiers' classes, which are subscripted and given a config."""

    def __class_getitem__(cls, _: Any) -> type:
        return cls

    def __init__(self, data: Any = None, config: Any = None) -> None:
        self.data, self.config = data, config


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the recipe, found as verifiers finds it, with doubles of verifiers and reverse-text."""
    names = (
        "Task TaskConfig Taskset TasksetConfig Env EnvConfig AgentConfig State Trace Runtime Agents Episode"
    )
    vf = ModuleType("verifiers.v1")
    vars(vf).update({name: type(name, (Generic,), {}) for name in names.split()})
    rows = ModuleType("reverse_text.taskset")
    for name, base in (("Config", "TasksetConfig"), ("Data", "State"), ("Task", "Task")):
        setattr(rows, f"ReverseText{name}", type(f"ReverseText{name}", (getattr(vf, base),), {}))
    rows.ReverseTextTaskset = type(  # type: ignore[attr-defined]
        "ReverseTextTaskset", (vf.Taskset,), {"load": lambda self: [vf.Task("row", self.config.task)]}
    )
    packages = {"verifiers": ModuleType("verifiers"), "verifiers.v1": vf}
    packages["verifiers"].v1 = vf  # type: ignore[attr-defined]
    packages |= {"reverse_text": ModuleType("reverse_text"), "reverse_text.taskset": rows}
    for name, module in packages.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(str(FOLDER))

    def load(taskset: str) -> ModuleType:
        name = taskset.replace("-", "_")
        monkeypatch.delitem(sys.modules, name, raising=False)
        module = importlib.import_module(name)
        monkeypatch.delitem(sys.modules, name)
        assert all(hasattr(module, exported) for exported in module.__all__)
        return module

    return load


def test_env_hint_stamps_the_teachers_log_probabilities(
    environment: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = RECIPES["hint_sdpo"]["orchestrator"]["train"]["source"][0]["env"]["taskset"]
    module = environment(table["id"])
    monkeypatch.setattr(module, "system_tokens", lambda model, text: [len(model), len(text)])
    config = SimpleNamespace(**table["task"] | {"teacher_url": url})
    (task,) = module.HintTaskset(config=SimpleNamespace(task=config)).load()
    task.data = SimpleNamespace(answer="olleh")
    trace = conversation([21, 22])
    asyncio.run(task.finalize(trace=trace, runtime=None))
    assert trace.nodes[1].reference_logprobs == [likely(21), likely(22)]
    assert trace.nodes[0].reference_logprobs is None and trace.nodes[1].loss_weights is None
    hint = module.HINT.format(answer="olleh")
    assert Handler.asked[0]["token_ids"][:3] == [len(table["task"]["teacher_model"]), len(hint), 11]
    assert (
        RECIPES["hint_sdpo"]["model"]["name"] == table["task"]["teacher_model"] == Handler.asked[0]["model"]
    )


def test_env_hint_asks_nobody_about_an_evaluation(environment: Any) -> None:
    task = environment("env-hint").HintTask(config=SimpleNamespace(teacher_url="http://nowhere"))
    trace = SimpleNamespace(nodes=[MessageNode(token_ids=[])], branches=[])
    asyncio.run(task.finalize(trace=trace, runtime=None))
    assert trace.nodes[0].reference_logprobs is None


def test_env_hint_renders_the_hint_as_prime_rl_renders_the_policys_prompts(environment: Any) -> None:
    """A recipe whose [orchestrator.renderer] is another one would give the teacher another template."""
    source = (FOLDER / "scoring.py").read_text()
    assert "PrimeQwen3RendererConfig()" in source
    assert RECIPES["hint_sdpo"]["orchestrator"]["renderer"] == {"name": "prime-qwen3"}


def test_env_replay_stamps_the_better_completion_up_and_the_worse_one_down(
    environment: Any, url: str
) -> None:
    table = RECIPES["replay_dpo"]["orchestrator"]["train"]["source"][0]["env"]
    module = environment(table["taskset"]["id"])
    env = module.PairEnv()
    env.config = SimpleNamespace(**table | {"reference_url": url})
    bad, good = conversation([21, 22], reward=0.2), conversation([24, 25, 26], reward=0.9)
    asyncio.run(env.finalize(None, SimpleNamespace(traces=[bad, good])))
    u = [sum(-0.5 - likely(t) for t in tokens) for tokens in ((24, 25, 26), (21, 22))]
    c = dpo_coefficient(u[0] - u[1], beta=table["beta"])
    assert good.nodes[1].loss_weights == {"rl": [0.0, c, c, c]}
    assert bad.nodes[1].loss_weights == {"rl": [0.0, -c, -c]}
    assert good.nodes[1].reference_logprobs == [1.0] * 3
    assert {asked["model"] for asked in Handler.asked} == {table["reference_model"]}


@pytest.mark.parametrize("rewards", [(0.5, 0.5), (0.2, 0.9)])
def test_env_replay_makes_no_pair_of_equal_rewards_or_of_an_attempt_that_failed(
    environment: Any, rewards: tuple[float, float]
) -> None:
    env = environment("env-replay").PairEnv()
    env.config = SimpleNamespace(reference_url="http://nowhere", reference_model="", beta=0.1)
    traces = [conversation([21], reward=reward) for reward in rewards]
    traces[0].ok = rewards[0] == rewards[1]
    asyncio.run(env.finalize(None, SimpleNamespace(traces=traces)))
    assert all(trace.nodes[1].loss_weights is None for trace in traces)


def test_env_replay_plays_each_task_twice(environment: Any) -> None:
    played: list[Any] = []

    async def run(task: Any) -> None:
        played.append(task)

    agents = SimpleNamespace(agent=SimpleNamespace(run=run))
    asyncio.run(environment("env-replay").PairEnv().run("task", agents))
    assert played == ["task", "task"]


# --- PRIME-RL's own config ---------------------------------------------------------------------------

# Where verifiers and renderers are not installed, doubles stand in, and only they say what an env table is.
VALIDATE = """
import sys, tomllib
from types import ModuleType
from pydantic import BaseModel, ConfigDict

class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
class EnvConfig(Open):
    taskset: dict = {}
    @property
    def env_id(self): return self.taskset.get("id", "")
class Renderer(Open):
    name: str = "auto"

def doubles():
    vf, base = ModuleType("verifiers.v1"), ModuleType("renderers.base")
    vf.EnvConfig, vf.SingleAgentEnvConfig, vf.ServeConfig = EnvConfig, type("S", (EnvConfig,), {}), Open
    vf.resolve_env_field, vf.narrowed_env_annotation = lambda data, _: data, lambda _: None
    vf.__getattr__ = lambda name: Open
    base.MODEL_RENDERER_MAP = {}
    renderers = ModuleType("renderers")
    renderers.base = base
    renderers.RendererConfig = renderers.AutoRendererConfig = renderers.DefaultRendererConfig = Renderer
    verifiers = ModuleType("verifiers")
    verifiers.v1 = vf
    sys.modules |= {"verifiers": verifiers, "verifiers.v1": vf}
    sys.modules |= {"renderers": renderers, "renderers.base": base}

how = "with verifiers"
try:
    import renderers.base, reverse_text, verifiers.v1
except ImportError:
    how = "without verifiers"
    doubles()
from composer_plugins.adapters.prime_rl_plugin.doctor.probe import rejected
from composer_plugins.adapters.prime_rl_plugin.upstream import RL_CONFIG
from prime_rl.configs.rl import RLConfig
for path in sys.argv[1:]:
    given = tomllib.load(open(path, "rb"))
    assert rejected(*RL_CONFIG, given) == [], path
    misspelt = {**given, "trainer": {"los": given["trainer"]["loss"]}, "orchestrator": {"group_size": "x"}}
    assert {key for key, _ in rejected(*RL_CONFIG, misspelt)} == {"trainer.los", "orchestrator.group_size"}
    config = RLConfig.model_validate(tomllib.load(open(path, "rb")))
    assert config.trainer.loss.model_dump() == given["trainer"]["loss"], path
    wanted = given["orchestrator"].get("train", {}).get("filter_zero_advantages", True)
    assert config.orchestrator.train.filter_zero_advantages is wanted, path
    (source,) = config.orchestrator.train.source
    assert source.algo.type == "grpo"
    assert source.resolved_name == given["orchestrator"]["train"]["source"][0]["name"]
print("valid", how)
"""


def test_prime_rls_own_config_takes_every_recipe_and_says_what_is_misspelt() -> None:
    source = os.environ.get(variable("prime-rl"))
    if not source:
        pytest.skip(f"{variable('prime-rl')} names no checkout of PRIME-RL: nox -s prime_rl -- --source DIR")
    own = Path(source, "packages", "prime-rl-configs", "src")
    configs = own / "prime_rl" / "configs" / "orchestrator.py"
    if not configs.is_file() or "filter_zero_advantages" not in configs.read_text():
        pytest.skip(f"{source} is of v0.8.0 or before, whose rl.toml is another; the recipes are for later")
    pytest.importorskip("pydantic_config", reason="prime-pydantic-config is not installed")
    folders = [FOLDER, ROOT, own, Path(source, "src"), Path(source, "deps", "verifiers")]
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    files = [str(file) for file in sorted(FOLDER.glob("*.toml"))]
    environment = os.environ | {"PYTHONPATH": path}
    run = subprocess.run(
        [sys.executable, "-c", VALIDATE, *files], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0 and run.stdout.splitlines()[-1].startswith("valid"), run.stderr[-3000:]
