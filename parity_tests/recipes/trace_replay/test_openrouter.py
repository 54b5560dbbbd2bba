"""Teachers by OpenRouter: prices from its list of models, its own account of the cost, and the budget."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from composer_plugins.errors import ConfigError
from composer_plugins.recipes.trace_replay import teachers
from composer_plugins.recipes.trace_replay.openrouter import prices_of, read_models
from composer_plugins.recipes.trace_replay.teachers import Teacher, load_teachers
from parity_tests.rigs.paths import ROOT
from parity_tests.rigs.replayed import a_state, echo, most_usd, replayed
from parity_tests.rigs.scripted_faults import FaultyTeachers

LIST = (Path(__file__).parent / "openrouter_models.json").read_bytes()
MODELS = {entry["id"]: entry for entry in json.loads(LIST)["data"]}
SONNET, LUNA, CODER = "anthropic/claude-sonnet-4.5", "openai/gpt-5.6-luna", "qwen/qwen3-coder"
ENTRY = {"name": "a", "model": CODER, "prices": "openrouter", "max_tokens": 50, "base_url": "http://x/v1"}


@pytest.fixture
def server() -> Iterator[FaultyTeachers]:
    with FaultyTeachers(echo) as started:
        started.models = LIST
        yield started


def loaded(folder: Path, *entries: dict[str, Any]) -> list[Teacher]:
    path = folder / "teachers.yaml"
    path.write_text(yaml.safe_dump({"teachers": list(entries)}))
    return load_teachers(path)


# Of each model: the highest price of its input and of its output, and what it asks OpenRouter for.
PRICES = {CODER: (0.22, 0.95, 0.22, 0.95), LUNA: (0.4, 1.8, 0.4, 1.8), SONNET: (6.0, 15.0, 6.0, 15.0)}


@pytest.mark.parametrize("model", PRICES)
def test_a_price_is_the_highest_that_can_apply(model: str) -> None:
    found = prices_of(model, {}, MODELS, "teachers[0]")
    maximum = found["params"]["provider"]["max_price"]
    prices = (found["usd_per_million_input"], found["usd_per_million_output"])
    assert (*prices, maximum["prompt"], maximum["completion"]) == pytest.approx(PRICES[model])
    assert found["usd_per_request"] == 0


def test_cache_writes_reasoning_and_requests_count_where_they_cost_more() -> None:
    pricing = {"prompt": "1e-6", "completion": "2e-6", "input_cache_write": "3e-6"}
    pricing |= {"internal_reasoning": "4e-6", "request": "0.01"}
    found = prices_of(CODER, {}, {CODER: {"pricing": pricing}}, "teachers[0]")
    assert found.pop("params")["provider"]["max_price"] == pytest.approx({"prompt": 1.0, "completion": 2.0})
    assert [*found.values()] == pytest.approx([3.0, 4.0, 0.01])


def test_the_list_is_read_once_for_all_teachers_of_an_endpoint(
    tmp_path: Path, server: FaultyTeachers
) -> None:
    entry = ENTRY | {"base_url": server.base_url, "params": {"provider": {"data_collection": "deny"}}}
    own = {"name": "c", "model": "local", "base_url": "http://localhost:1/v1", "max_tokens": 5}
    own |= {"usd_per_million_input": 0, "usd_per_million_output": 0}
    first, second, third = loaded(tmp_path, entry, entry | {"name": "b", "model": SONNET}, own)
    assert first.params["provider"] == {
        "data_collection": "deny",
        "max_price": {"prompt": pytest.approx(0.22), "completion": pytest.approx(0.95)},
    }
    assert (second.usd_per_million_output, third.params) == (pytest.approx(15.0), {})


def test_the_yaml_of_this_recipe_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENROUTER_API_KEY", "abc")
    path = ROOT / "recipes/trace_replay/openrouter.yaml"
    entries = yaml.safe_load(path.read_text())["teachers"]
    models = {entry["model"]: MODELS[CODER] for entry in entries}
    monkeypatch.setattr(teachers, "read_models", lambda url, key: models)
    for teacher in load_teachers(path):
        assert teacher.api_key() == "abc" and "max_price" in teacher.params["provider"]


def test_what_openrouter_says_that_a_request_cost_is_what_was_spent(
    tmp_path: Path, server: FaultyTeachers
) -> None:
    """Read from the cache, tokens cost less than their price."""
    server.costs = lambda usage: usage["prompt_tokens"] * 1e-9
    (teacher,) = loaded(tmp_path, ENTRY | {"base_url": server.base_url})
    states = [a_state(i) for i in range(6)]
    done = replayed(tmp_path / "j", states, [teacher])
    billed = sum(usage["cost"] for usage in server.billed.values())
    assert done.answered == 6 and done.spent_usd == pytest.approx(billed)
    for body in server.requests:
        assert body["provider"] == teacher.params["provider"]
    by_hand = teacher.model_copy(update={"prices": None, "name": "b"})
    again = replayed(tmp_path / "k", states, [by_hand])  # another endpoint's `cost` may be in another unit
    usd = sum(by_hand.usd(one["prompt_tokens"], one["completion_tokens"]) for one in server.billed.values())
    assert again.spent_usd == pytest.approx(usd / 2)


WRONG_USAGES = [{"cost": float("inf")}, {"cost": float("nan")}, {"prompt_tokens": 10**400}]


@pytest.mark.parametrize("wrong", WRONG_USAGES, ids=["inf", "nan", "huge"])
def test_a_usage_without_a_finite_cost_counts_with_the_most(
    tmp_path: Path, server: FaultyTeachers, wrong: dict[str, Any]
) -> None:
    server.costs = lambda usage: usage.update(cost=0.0) or usage.update(wrong) or usage["cost"]  # type: ignore
    (teacher,) = loaded(tmp_path, ENTRY | {"base_url": server.base_url})
    done = replayed(tmp_path / "j", [a_state(0)], [teacher])
    assert (done.answered, done.without_usage, done.spent_usd) == (1, 1, most_usd(teacher))
    assert replayed(tmp_path / "j", [a_state(0)], [teacher]).answered_before == 1


def test_a_cost_above_what_was_reserved_is_counted(tmp_path: Path, server: FaultyTeachers) -> None:
    """A plugin's, for example."""
    server.costs = lambda usage: 1.0
    (teacher,) = loaded(tmp_path, ENTRY | {"base_url": server.base_url})
    done = replayed(tmp_path / "j", [a_state(0)], [teacher])
    assert (done.above_reserved, done.spent_usd) == (1, 1.0)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"usd_per_million_input": 1.0}, "usd_per_million_input: prices is openrouter too; remove one of them"),
    ({"params": {"provider": {"max_price": {}}}}, "params.provider: with prices: openrouter the recipe wri"),
    ({"model": "qwen/qwen3-codr"}, "model: unknown model of OpenRouter 'qwen/qwen3-codr'; did you mean"),
    (
        {"model": "openrouter/auto"},
        "model: OpenRouter's list has no fixed price for openrouter/auto (prompt: Input should",
    ),
    ({"params": {"provider": "abc"}}, "params.provider: with prices: openrouter the recipe writes max_price"),
    ({"prices": "open-router"}, "prices: unknown value 'open-router'; did you mean 'openrouter'?"),
]


@pytest.mark.parametrize(("change", "problem"), WRONG)
def test_a_wrong_entry_is_one_sentence_with_its_key(
    tmp_path: Path, server: FaultyTeachers, change: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(tmp_path, ENTRY | {"base_url": server.base_url} | change)
    assert str(refused.value).startswith(f"teachers[0].{problem}") and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("pricing", "said"),
    [(None, "Input should be a valid dict.*"), ({"prompt": "0"}, "completion: Field required")],
)
def test_a_model_without_a_price(pricing: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"no fixed price for {CODER} \({said}\); name another"):
        prices_of(CODER, {}, {CODER: {"pricing": pricing}}, "teachers[0]")


@pytest.mark.parametrize("text", [b"", b"half", b"{}", b"[]"])
def test_an_endpoint_without_a_list_of_models(server: FaultyTeachers, text: bytes) -> None:
    server.models = text
    with pytest.raises(ConfigError) as refused:
        read_models(server.base_url, "teachers[0]")
    said = str(refused.value)
    assert said.startswith(f"teachers[0].prices: {server.base_url}/models gives no list of models (")
    assert said.endswith("write usd_per_million_input and usd_per_million_output instead of `prices`")
