"""A policy that answers programs outside of any episode. Imports no torch.

Each request stands alone, as at other servers: the chat template writes all of its messages. All requests that wait are
answered together."""

from collections.abc import Sequence
from dataclasses import replace

from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.envs.replies import reply_of, with_tools, writer
from lmgym.gateway.session import Mailbox, Tree, Waiting
from lmgym.gateway.wire import Answer, ChatRequest, Refused, Reply
from lmgym.inference.base import Completion, Request, Sampling
from lmgym.rollouts.actor import Actor
from lmgym.text.chat import decode
from lmgym.text.tokens import token_texts
from lmgym.types import BarePrompt, Prompt

MOST_KNOWN = 100_000  # answers of which the text is kept, for calls of tools that come back


class Serving:
    """Answers the requests of a mailbox with an actor. The same requests in the same order get the same answers: random
    numbers are a function of the seed, the number of the request, or its own seed, and the place of the token.

    Example: Serving(actor, Sampling(max_new_tokens=64), seed=0).run(mailbox)"""

    def __init__(self, actor: Actor, sampling: Sampling, seed: int, tool_prompt: str = "template") -> None:
        self._actor, self._sampling, self._tool_prompt = actor, sampling, tool_prompt
        self._key, self._asked, self._tree = seeds.key(seed, "serve"), 0, Tree()

    def run(self, mailbox: Mailbox[None]) -> None:
        """Answer until the mailbox ends."""
        while (first := mailbox.take().result()) is not None:
            self.answer([first, *mailbox.rest()])

    def answer(self, waiting: Sequence[Waiting]) -> None:
        """Answer these requests; one that cannot be answered is refused."""
        # 1. The prompts.
        prompts = list[tuple[Waiting, int, list[int]]]()
        for one in waiting:
            self._asked += 1
            try:
                prompts.append((one, self._asked, self._prompt_ids(one)))
            except Refused as refused:
                one.answered.set_exception(refused)
            except LmgymError as error:  # of the chat template
                one.answered.set_exception(Refused(str(error)))
        # 2. The answers, all choices of all requests at once.
        requests = [
            self._request(ids, self._key_of(one.request, number, choice), one.request.stop)
            for one, number, ids in prompts
            for choice in range(one.request.choices)
        ]
        completions = iter(self._actor.engine.generate(requests, self._sampling) if requests else [])
        # 3. The replies.
        for one, number, ids in prompts:
            replies = [self._reply(one, next(completions)) for _ in range(one.request.choices)]
            one.answered.set_result(Answer(number, replies, len(ids)))
        if self._tree.count > MOST_KNOWN:
            self._tree = Tree()

    def _key_of(self, request: ChatRequest, number: int, choice: int) -> int:
        """The key of an answer's random numbers."""
        if request.seed is None:
            return seeds.key(number, choice, parent=self._key)
        return seeds.key("seed", request.seed, choice, parent=self._key)

    def _request(self, ids: list[int], key: int, stop: tuple[str, ...]) -> Request:
        if self._actor.decoder_start:
            return Request(self._actor.decoder_ids, key, source_ids=tuple(ids), stop=stop)
        return Request(tuple(ids), key, stop=stop)

    def _reply(self, one: Waiting, completion: Completion) -> Reply:
        text = decode(self._actor.tokenizer, completion.ids)
        reply = reply_of(text, completion.stop, one.request, self._tree.count)
        self._tree.record(one.request, reply.said, text)
        count = len(completion.ids) - (completion.stop == "eos")
        texts = token_texts(self._actor.tokenizer, completion.ids)[:count] if one.request.logprobs else []
        tokens = tuple(zip(texts, completion.logprobs, strict=False)) if one.request.logprobs else None
        return replace(reply, tokens=tokens, sampled=len(completion.ids))

    def _prompt_ids(self, one: Waiting) -> list[int]:
        said = self._tree.messages(one.request, writer(self._tool_prompt))
        messages, tools = with_tools(said, one.request, self._tool_prompt)
        prompt: Prompt = BarePrompt(messages[0]["content"]) if one.request.bare else messages
        ids = self._actor.encode_prompt(prompt, {**self._actor.template, **tools})
        context = self._actor.engine.context
        if context is not None and len(ids) >= context:
            raise Refused(f"the request has {len(ids)} tokens, and the model reads {context} at most")
        return ids
