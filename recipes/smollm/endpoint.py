"""A server with OpenAI's chat-completions API: each failure of it is one ConfigError."""

import uuid
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import httpx2
import openai

from composer_plugins.errors import ConfigError, in_a_line
from composer_plugins.recipes.trace_replay import asking
from composer_plugins.recipes.trace_replay.asking import Body, NoAnswer, Reply, Unusable
from composer_plugins.recipes.trace_replay.teachers import Teacher, check_teachers

SECONDS = 120.0  # in which the server may send nothing
MAX_RETRIES = 2  # of the openai client, where no connection is made, and after 429 and 5xx
REMEDIES = {
    401: "set --api-key-env to the environment variable that has the right key",
    403: "set --api-key-env to the environment variable that has the right key",
    404: "correct --model, or end --url with the path before /chat/completions, which often is /v1",
}
START = "start the server, or correct --url"
LOOK = "look at what the server printed"
OTHER_SERVER = "name a server that has OpenAI's chat-completions API"


@dataclass(frozen=True)
class Endpoint:
    """The address of the API, and the model that is asked."""

    url: str
    model: str | None = None  # None: the first that the server lists
    max_tokens: int = 48
    api_key_env: str | None = None

    @asynccontextmanager
    async def connected(self) -> AsyncIterator["Connection"]:
        """Yield the endpoint with a client and with the name of its model."""
        try:
            address = httpx2.URL(self.url)
            is_address = address.scheme in ("http", "https") and bool(address.host)
        except httpx2.InvalidURL:
            is_address = False
        if not is_address:
            raise ConfigError("--url", f"{self.url!r} is not an address", "write http://... or https://...")
        check_teachers([self.entry])
        async with asking.client_of(self.entry) as client:
            connection = Connection(self, client)
            yield connection if self.model else await connection.with_first_model()

    @cached_property
    def entry(self) -> Teacher:
        """The endpoint as trace_replay has it."""
        return Teacher(
            name=self.url,
            model=self.model or "the first one",
            base_url=self.url,
            api_key_env=self.api_key_env,
            usd_per_million_input=0.0,
            usd_per_million_output=0.0,
            max_tokens=self.max_tokens,
            timeout=SECONDS,
            max_retries=MAX_RETRIES,
        )

    def error(self, problem: str, remedy: str) -> ConfigError:
        """The error for this server."""
        return ConfigError("--url", f"{self.url} {problem}", remedy)


@dataclass(frozen=True)
class Connection:
    """A client of an endpoint."""

    endpoint: Endpoint
    client: openai.AsyncOpenAI

    async def with_first_model(self) -> "Connection":
        """Return the connection with the name of the first model that the server lists."""
        listed = await self._text(self.client.get("/models", cast_to=httpx2.Response))
        try:
            name = asking.read_json(listed)["data"][0]["id"]
        except (Unusable, LookupError, TypeError):
            problem = f"does not list its models as OpenAI's API does: {asking.shown(listed)}"
            raise self.endpoint.error(problem, f"set --model, or {OTHER_SERVER}") from None
        return replace(self, endpoint=replace(self.endpoint, model=str(name)))

    async def answer(self, messages: list[dict[str, Any]], **params: Any) -> Reply:
        """Return the message that follows, and why it ended; raise ConfigError if there is none."""
        limit = self.endpoint.entry.limit()
        body: Body = {"model": self.endpoint.model, "messages": messages, **limit, **params}
        text = await self._text(asking.post(self.client, body, uuid.uuid4().hex))
        try:
            return asking.read_reply(asking.read_json(text))
        except Unusable as error:
            raise self.endpoint.error(f"answers, but {error}", OTHER_SERVER) from None

    async def _text(self, request: Awaitable[Any]) -> str:
        """The text of the answer to a request."""
        try:
            answer = await request
        except openai.APIStatusError as error:
            said = asking.shown(error.response.text)
            problem = f"answers with the status {error.status_code}: {said}"
            raise self.endpoint.error(problem, REMEDIES.get(error.status_code, LOOK)) from None
        except NoAnswer as error:
            raise self.endpoint.error(f"has no answer: {error}", LOOK) from None
        except openai.APIConnectionError as error:
            problem = f"cannot be reached ({in_a_line(error.__cause__ or error)})"
            raise self.endpoint.error(problem, START) from None
        return answer if isinstance(answer, str) else answer.text
