"""Prices of OpenRouter's models, from its list of models, for teachers with `prices: openrouter`.

An entry of the list has a price for each kind of token, in USD per token, as text: "0.000003". Overrides
change it for long prompts and for hours of the day. A teacher gets the highest price that can apply to a
request of this recipe, because the budget reserves the most that a request can cost.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import httpx2
from pydantic import BaseModel, Field, ValidationError

from composer_plugins.errors import ConfigError, in_a_line, unknown
from composer_plugins.recipes.trace_replay.states import first_problem

PRICES = "openrouter"
WRITTEN = ("usd_per_million_input", "usd_per_million_output", "usd_per_request")
BY_HAND = f"write {WRITTEN[0]} and {WRITTEN[1]} instead of `prices`"
TIMEOUT = 30.0  # seconds

Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]  # USD per token, or per request


class _Override(BaseModel):
    prompt: Price = 0.0
    completion: Price = 0.0
    request: Price = 0.0
    internal_reasoning: Price = 0.0
    input_cache_write: Price = 0.0


class _Pricing(_Override):
    prompt: Price
    completion: Price
    overrides: list[_Override] = []


def read_models(base_url: str, key: str) -> dict[str, Any]:
    """Return the entries of an endpoint's list of models, by the name of the model."""
    url = f"{base_url.rstrip('/')}/models"
    try:
        answer = httpx2.get(url, timeout=TIMEOUT, follow_redirects=True).raise_for_status().json()
        return {entry["id"]: entry for entry in answer["data"]}
    except (httpx2.HTTPError, ValueError, KeyError, TypeError) as error:
        problem = f"{url} gives no list of models ({in_a_line(error)})"
        raise ConfigError(f"{key}.prices", problem, f"run the command again later, or {BY_HAND}") from None


def prices_of(model: str, params: Mapping[str, Any], models: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the prices of a teacher's model and the teacher's `params`, as fields of the teacher.

    The request asks OpenRouter for providers of this price or below (`provider.max_price`), because the
    providers of a model have different prices.
    """
    provider = params.get("provider", {})
    if not isinstance(provider, dict) or "max_price" in provider:
        problem = f"with prices: {PRICES} the recipe writes max_price below it"
        raise ConfigError(f"{key}.params.provider", problem, "write other keys below it, or remove it")
    if model not in models:
        raise unknown(f"{key}.model", model, models, noun="model of OpenRouter")
    try:
        pricing = _Pricing.model_validate(models[model].get("pricing"))
    except ValidationError as error:
        problem = f"OpenRouter's list has no fixed price for {model} ({first_problem(error)})"
        raise ConfigError(f"{key}.model", problem, f"name another model, or {BY_HAND}") from None
    every = [pricing, *pricing.overrides]
    prompt, completion = (max(getattr(one, name) for one in every) for name in ("prompt", "completion"))
    maximum = {"prompt": prompt * 1e6, "completion": completion * 1e6}
    return {
        "params": {**params, "provider": {**provider, "max_price": maximum}},
        "usd_per_million_input": max(prompt, *(one.input_cache_write for one in every)) * 1e6,
        "usd_per_million_output": max(completion, *(one.internal_reasoning for one in every)) * 1e6,
        "usd_per_request": max(one.request for one in every),
    }
