"""OpenAI's completions as JSON: the model goes on with a text that no chat template has written.

Each request begins a row of its own: its prompt is tokenized once, and what was sampled behind it trains. Source: the
types of the openai client 3.57."""

from collections.abc import Collection, Iterator
from itertools import accumulate
from typing import Any

from lmgym.gateway.chat import usage, wants_usage
from lmgym.gateway.wire import (
    MOST_CHARACTERS,
    Answer,
    ChatRequest,
    Form,
    Refused,
    Reply,
    Said,
    check,
    event,
    fields_of,
    read_choices,
    read_seed,
    read_stops,
    read_switch,
)

USUAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "logprobs": (0,),  # the sampled tokens alone
}
KNOWN = ("prompt", "stop", "n", "seed", "stream", "stream_options", "model", "user")


def read_completion(tree: Any, ignored: Collection[str] = ()) -> ChatRequest:
    """A request for a completion. `ignored`: fields that have no effect, as the environment says. Raises Refused for
    what is not supported.

    Example: read_completion({"prompt": "2+2="}).messages[0].text -> '2+2='"""
    given = fields_of(tree, ignored, KNOWN, USUAL)
    prompt = given.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str) or not prompt:
        raise Refused("'prompt' must be one text that is not empty; ask once for each of several")
    if len(prompt) > MOST_CHARACTERS:
        raise Refused(f"'prompt' has more than {MOST_CHARACTERS:,} characters", 413)
    check(prompt, "'prompt'")
    return ChatRequest(
        (Said("user", prompt),),
        stop=read_stops(given.get("stop", []), "stop"),
        choices=read_choices(given.get("n", 1)),
        stream=read_switch(given, "stream"),
        logprobs="logprobs" in given,
        usage=wants_usage(given.get("stream_options", {})),
        bare=True,
        seed=read_seed(given),
    )


def completion_body(answer: Answer, model: str) -> dict[str, Any]:
    """The reply as one object. Its id and date are the same in every run."""
    choices = [_choice(index, reply) for index, reply in enumerate(answer.replies)]
    return {**_head(answer, model), "choices": choices, "usage": usage(answer)}


def completion_events(answer: Answer, request: ChatRequest, model: str) -> Iterator[bytes]:
    """The reply as server-sent events, each answer in one piece."""
    head = {**_head(answer, model), **({"usage": None} if request.usage else {})}
    for index, reply in enumerate(answer.replies):
        yield event({**head, "choices": [_choice(index, reply)]})
    if request.usage:
        yield event({**head, "choices": [], "usage": usage(answer)})
    yield b"data: [DONE]\n\n"


COMPLETIONS = Form(read_completion, completion_body, completion_events)


def _head(answer: Answer, model: str) -> dict[str, Any]:
    return {"id": f"cmpl-{answer.number}", "object": "text_completion", "created": 0, "model": model}


def _choice(index: int, reply: Reply) -> dict[str, Any]:
    logprobs: dict[str, Any] | None = None
    if reply.tokens is not None:
        texts = [text for text, _ in reply.tokens]
        logprobs = {
            "tokens": texts,
            "token_logprobs": [logprob for _, logprob in reply.tokens],
            "text_offset": list(accumulate(map(len, texts), initial=0))[:-1],
            "top_logprobs": None,
        }
    return {"index": index, "text": reply.said.text, "logprobs": logprobs, "finish_reason": reply.finish}
