"""A teacher's log-probabilities of the observed actions, from an endpoint that gives them (vLLM).

For a teacher with `logprobs: prompt` each observed action is scored with two more requests:

    POST {base_url}/chat/completions   {"messages": state, "return_token_ids": true}
    POST {base_url}/chat/completions   {"messages": state + action, "add_generation_prompt": false,
                                        "return_token_ids": true, "prompt_logprobs": 1}

The second answer has a log-probability for each token of the conversation, and the first one says where the
action begins. Both let the teacher write one token, which is not used.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from composer_plugins.columns import after_prompt
from composer_plugins.errors import ConfigError, DataError
from composer_plugins.recipes.prime_rl.scoring import token_logprobs
from composer_plugins.recipes.shared import replace_file
from composer_plugins.recipes.trace_replay.asking import Body, Unusable, chat_body
from composer_plugins.recipes.trace_replay.journal import Score
from composer_plugins.recipes.trace_replay.states import State, state_id
from composer_plugins.recipes.trace_replay.teachers import LIMITS, Teacher

SCORES = "scores.parquet"
SCORE_COLUMNS = ("state", "source", "teacher", "prompt_token_ids", "token_ids", "logprobs")


def scored_id(state: State) -> str:
    """The id under which the journal has the log-probabilities of the observed action of a state."""
    return state_id([*state.messages, state.observed], state.tools)


def score_bodies(state: State, teacher: Teacher) -> list[Body]:
    """The two requests that score the observed action of a state."""
    body = {name: value for name, value in chat_body(state, teacher).items() if name not in LIMITS}
    before = body | {"max_tokens": 1, "return_token_ids": True}
    messages = [*state.messages, state.observed]
    return [before, before | {"messages": messages, "add_generation_prompt": False, "prompt_logprobs": 1}]


def read_score(before: Mapping[str, Any], whole: Mapping[str, Any], teacher: Teacher) -> dict[str, Any]:
    """The fields of a Score from the answers to both requests."""
    prompt, token_ids = before.get("prompt_token_ids"), whole.get("prompt_token_ids")
    entries = whole.get("prompt_logprobs")
    if not (isinstance(prompt, list) and isinstance(token_ids, list) and isinstance(entries, list)):
        problem = "the endpoint gives no log-probabilities of a prompt (prompt_token_ids, prompt_logprobs)"
        raise ConfigError(f"teacher {teacher.name!r}, logprobs", problem, "remove it, or use a vLLM server")
    try:
        action = after_prompt(token_ids, prompt)
        values = token_logprobs(token_ids, entries)
    except DataError as error:
        raise Unusable(f"the action was not scored: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        problem = "the action was not scored: prompt_logprobs has no log-probability for a token"
        raise Unusable(f"{problem} ({type(error).__name__}: {error})") from None
    if not all(map(math.isfinite, values)):
        raise Unusable("the action was not scored: a log-probability is not a finite number")
    return {"token_ids": token_ids, "logprobs": values, "start": len(token_ids) - len(action)}


def write_scores(scores: Iterable[Score], states: Iterable[State], path: Path) -> int:
    """Write a parquet file with a row for each scored action and teacher; return the number of rows.

    `logprobs` and `token_ids` are those of the action, and `prompt_token_ids` what stands before it.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    sources = {scored_id(state): state for state in states}
    rows = [
        {
            "state": sources[score.state].id,
            "source": sources[score.state].source,
            "teacher": score.teacher,
            "prompt_token_ids": score.token_ids[: score.start],
            "token_ids": score.token_ids[score.start :],
            "logprobs": score.logprobs[score.start :],
        }
        for score in scores
        if score.state in sources
    ]
    tokens = pa.list_(pa.int64())
    types = [pa.string(), pa.string(), pa.string(), tokens, tokens, pa.list_(pa.float64())]
    schema = pa.schema(list(zip(SCORE_COLUMNS, types, strict=True)))
    replace_file(path, lambda partial: pq.write_table(pa.Table.from_pylist(rows, schema=schema), partial))
    return len(rows)


def write_references(scores: Iterable[Score], path: Path, *, last_token: int | None = None) -> int:
    """Write scores of one teacher into a store, as references of the hint channel; return their number.

    PRIME-RL's `stored_stamps` finds a reference by the token ids of a whole branch. The teacher must
    therefore have the policy's tokenizer and chat template. `last_token` is the id with which the policy
    ends its turn. What a template writes after it is left out, because the policy does not sample it.
    """
    from composer_plugins.recipes.prime_rl.store import StoreWriter  # its package loads torch

    names, number = set[str](), 0
    with StoreWriter(path) as writer:
        for score in scores:
            names.add(score.teacher)
            if len(names) > 1:
                problem = f"there are scores of {' and '.join(sorted(names))}, and a token has one reference"
                raise DataError("scores", problem, "pass the scores of one teacher")
            end = len(score.token_ids)
            if last_token is not None:
                if last_token not in score.token_ids[score.start :]:
                    problem = f"an action has no token {last_token}"
                    raise DataError("last_token", problem, "pass the id with which the policy ends its turn")
                end -= score.token_ids[::-1].index(last_token)
            writer.put(score.token_ids[:end], score.logprobs[:end], "reference")
            number += 1
        writer.flush()
    return number
