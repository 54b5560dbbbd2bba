"""One request to a teacher: its body, the most that it can cost, and what is accepted as an answer."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import httpx2
import openai
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from composer_plugins.errors import in_a_line
from composer_plugins.recipes.shared import cut
from composer_plugins.recipes.trace_replay.formats.common import assistant, tool_call
from composer_plugins.recipes.trace_replay.states import (
    CUT_OFF,
    Message,
    State,
    ToolCall,
    first_problem,
    json_object,
)
from composer_plugins.recipes.trace_replay.teachers import LIMITS, Teacher

# The tokens that a chat template may add to those of the messages and tools: its instructions for tool calls.
# What it writes around a message is shorter than the quotes and keys of that message in JSON.
TEMPLATE_TOKENS = 1024
REFUSED, ERROR = "refusal", "error"  # values of finish_reason
MAX_SHOWN = 300  # characters of an endpoint's own words

Body = dict[str, Any]


class NoAnswer(openai.OpenAIError):
    """A request was sent, and no whole answer came: the endpoint may have billed it."""


class Unusable(Exception):
    """An endpoint's answer that is no action."""


class Client(httpx2.AsyncClient):
    """An HTTP client for openai's, which does not send again what an endpoint may already have billed.

    openai's client tries again after a refusal (429, 5xx), and where no connection was made. It also would
    after a timeout or a lost connection, but not after an OpenAIError.
    """

    def __init__(self) -> None:
        unlimited = httpx2.Limits(max_connections=None, max_keepalive_connections=None)  # see --concurrency
        super().__init__(limits=unlimited, follow_redirects=True)

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request and read its whole answer."""
        try:
            return await super().send(request, **options)
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout):
            raise
        except httpx2.TimeoutException:
            seconds = request.extensions["timeout"]["read"]
            raise NoAnswer(f"the endpoint sent nothing for {seconds:g} seconds") from None
        except httpx2.HTTPError as error:
            raise NoAnswer(f"the connection was lost ({in_a_line(error)})") from None


def client_of(teacher: Teacher, http: Client) -> openai.AsyncOpenAI:
    """The openai client of a teacher's endpoint."""
    return openai.AsyncOpenAI(
        base_url=teacher.base_url,
        api_key=teacher.api_key(),
        timeout=teacher.timeout,
        max_retries=teacher.max_retries,
        http_client=http,
    )


def chat_body(state: State, teacher: Teacher) -> Body:
    """The request for a teacher's action in a state."""
    tools = {"tools": state.tools} if state.tools else {}
    return {"model": teacher.model, "messages": state.messages, **tools, **teacher.limit(), **teacher.params}


def most_usd(teacher: Teacher, body: Body) -> float:
    """The most that a request can cost: a token of its prompt is at least one byte of its text."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    tokens = len(text.encode()) + TEMPLATE_TOKENS
    return teacher.usd(tokens, next(body[name] for name in LIMITS if name in body))


async def post(client: openai.AsyncOpenAI, body: Body, key: str) -> str:
    """The text of an endpoint's answer to a request."""
    response = await client.post(
        "/chat/completions", cast_to=httpx2.Response, body=body, options={"headers": {"Idempotency-Key": key}}
    )
    return response.text


Tokens = Annotated[int, Field(ge=0, lt=2**53)]  # so many can be multiplied by a price


class Usage(BaseModel):
    """What an endpoint says a request took."""

    prompt_tokens: Tokens
    completion_tokens: Tokens
    cost: Annotated[float | None, Field(ge=0, allow_inf_nan=False, exclude=True)] = None  # in USD


class _Message(BaseModel):
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str
    error: Any = None  # OpenRouter's


class _Completion(BaseModel):
    model_config = ConfigDict(strict=True)
    choices: Annotated[list[_Choice], Field(min_length=1)]


class Reply(NamedTuple):
    """An endpoint's answer: a message in the form of State.observed, and why it ended."""

    message: Message
    finish_reason: str


def read_answer(text: str) -> dict[str, Any]:
    """An endpoint's answer as JSON; raises Unusable for other text."""
    data = json_object(text)
    if data is None:
        raise Unusable(f"the answer is not a JSON object, or is cut off: {shown(text)}")
    return data


def read_usage(data: Mapping[str, Any]) -> Usage | None:
    """The `usage` of an endpoint's answer, where it has one."""
    try:
        return Usage.model_validate(data.get("usage"), strict=True)
    except ValidationError:
        return None


def read_reply(data: Mapping[str, Any]) -> Reply:
    """The message of an endpoint's answer; raises Unusable for one that is no action."""
    if data.get("error"):
        raise _failure(data["error"])
    try:
        choice = _Completion.model_validate(data, strict=True).choices[0]
    except ValidationError as error:
        raise Unusable(f"the answer is no chat completion: {first_problem(error)}") from None
    given, finish = choice.message, choice.finish_reason
    if choice.error or finish == ERROR:
        raise _failure(choice.error or {"finish_reason": finish})
    if given.refusal:
        return Reply(assistant(given.refusal, []), REFUSED)
    calls = []
    for call in given.tool_calls or ():
        arguments = call.function.arguments or "{}"  # some servers write nothing for no arguments
        if json_object(arguments) is not None:
            calls.append(tool_call(call.id, call.function.name, arguments))
        elif finish != CUT_OFF:  # the call that an answer is cut off in is left out, and the rest is kept
            raise Unusable(f"the arguments of a tool call are not a JSON object: {shown(arguments)}")
    if not (given.content or "").strip() and not calls and finish not in (CUT_OFF, "content_filter"):
        raise Unusable("the answer has neither content nor tool calls")
    return Reply(assistant(given.content or "", calls), finish)


def _failure(words: Any) -> Unusable:
    return Unusable(f"the endpoint says that there was an error: {shown(json.dumps(words))}")


def shown(text: str) -> str:
    """An endpoint's own words in one line, the first of them if they are long."""
    return repr(cut(" ".join(text.split()), MAX_SHOWN))
