"""Text to ids and back: what the template writes, what the policy sampled, and nothing tokenized twice."""

import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lmgym.core.errors import LmgymError
from lmgym.envs.base import Step
from lmgym.envs.single_turn import SingleTurn
from lmgym.inference.base import Completion, Request, Sampling
from lmgym.rollouts.rollout import Actor, collect, demonstrate
from lmgym.text.chat import answer_ids, appended_ids, decode, plain_text, prompt_ids
from lmgym.text.left_out import left_out
from lmgym.text.template import merge_roles
from lmgym.types import Episode, Example, Message
from tests import models

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if mood is defined %}({{ mood }}) {% endif %}{% endif %}"
)
names = st.sampled_from(["<eos>", "<bos>", "<|im_end|>", "<|im_start|>"])  # in a text they are text
texts = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | names, max_size=4).map("".join)
# Without "<", for answers that a test tokenizes as a model would have sampled them.
sampled = st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]), max_size=40).filter(bool)
plain = models.tokenizer()


def chat_tokenizer(template: str = CHATML, eos: str = "<|im_end|>") -> Any:
    tokenizer = models.byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.eos_token = eos
    tokenizer.chat_template = template
    return tokenizer


chat = chat_tokenizer()


def ids_of(text: str, tokenizer: Any = plain) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


# One prompt, one answer


@given(texts)
def test_plain_prompts_round_trip(text: str) -> None:
    ids = prompt_ids(plain, text)
    assert ids[0] == plain.bos_token_id
    assert plain.eos_token_id not in ids
    assert decode(plain, ids) == text


@given(texts, texts.filter(bool))
def test_references_stand_behind_their_prompt(prompt: str, answer: str) -> None:
    asked = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    for tokenizer, before in ((plain, prompt), (chat, asked)):
        first, second = prompt_ids(tokenizer, prompt), answer_ids(tokenizer, prompt, answer)
        assert second.count(tokenizer.eos_token_id) == 1
        assert second[-1] == tokenizer.eos_token_id
        whole = tokenizer.decode([*first, *second[:-1]], skip_special_tokens=False).removeprefix("<bos>")
        assert whole == before + answer
        assert decode(tokenizer, second) == answer


def test_plain_text_of_messages() -> None:
    messages = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2="},
    ]
    assert plain_text(messages) == "Add.\n\n1+1=2\n\n2+2="
    assert decode(plain, prompt_ids(plain, messages)) == "Add.\n\n1+1=2\n\n2+2="
    assert decode(plain, prompt_ids(plain, "1+1=")) == "1+1="


def test_an_eos_that_the_tokenizer_adds_is_not_part_of_a_prompt() -> None:
    from tokenizers import processors

    tokenizer = models.byte_tokenizer()
    closing = processors.TemplateProcessing(single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)])
    tokenizer.backend_tokenizer.post_processor = closing
    assert tokenizer("ab")["input_ids"][-1] == 2
    assert prompt_ids(tokenizer, "ab") == [1, *ids_of("ab")]
    assert answer_ids(tokenizer, "ab", "c") == [*ids_of("c"), 2]


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Letters, and the pairs "ab" and "bc" as tokens of their own."""
    from tokenizers import Tokenizer
    from tokenizers import models as kinds

    vocabulary = {token: place for place, token in enumerate(["<eos>", "a", "b", "c", "ab", "bc"])}
    merges = [("a", "b"), ("b", "c")]
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(kinds.BPE(vocabulary, merges)), eos_token="<eos>")


def test_a_reference_never_changes_the_ids_of_its_prompt() -> None:
    """Together where that leaves the prompt alone; apart where the seam would merge, for no model could sample that."""
    tokenizer = merging_tokenizer()
    assert answer_ids(tokenizer, "ca", "c") == [3, 0]
    assert tokenizer("cab")["input_ids"] == [3, 4]
    assert answer_ids(tokenizer, "ca", "b") == [2, 0]  # not half of "ab"
    assert answer_ids(tokenizer, "a", "bcc") == [5, 3, 0]


@models.needs_shared
def test_a_reference_gets_no_space_that_its_text_has_not() -> None:
    """A sentencepiece-like tokenizer puts a space before what it is given; within a text it does not."""
    tokenizer = AutoTokenizer.from_pretrained(models.SHARED / "models" / "stories260K-hf")
    prompt, answer = "Once upon a time", ", there was"
    ids = [*prompt_ids(tokenizer, prompt), *answer_ids(tokenizer, prompt, answer)]
    assert ids[:-1] == tokenizer(prompt + answer)["input_ids"]
    assert decode(tokenizer, ids) == prompt + answer


def test_a_tokenizer_without_eos_cannot_be_trained_on_references() -> None:
    tokenizer = models.byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(LmgymError, match="no end-of-sequence token"):
        answer_ids(tokenizer, "a", "b")


# Conversations


class Quiz:
    """Three questions, asked one after the other; each answer earns its length."""

    def reset(self, example: Example, seed: int) -> str | Sequence[Message]:
        self.asked = 1
        return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{example.prompt} 1?"}]

    def step(self, text: str, stop: str) -> Step:
        self.asked += 1
        over = self.asked > 3
        messages = [] if over else [{"role": "user", "content": f"And {self.asked}? 你好"}]
        return Step(messages=messages, reward=float(len(text)), terminated=over)


class Script:
    """An engine that answers with prescribed ids: answers[episode][turn]; it keeps what it was asked."""

    context: int | None = None
    rows = 256

    def __init__(self, answers: list[list[list[int]]], ends: Sequence[int]) -> None:
        self.answers, self.ends = answers, ends
        self.asked: list[list[Request]] = []

    def generate(self, requests: Sequence[Request], sampling: Sampling, ended: Any = None) -> list[Completion]:
        turn = len(self.asked)
        self.asked.append(list(requests))
        ids = [self.answers[episode][turn] for episode in range(len(requests))]
        return [
            Completion(answer, [-0.5] * len(answer), "eos" if answer[-1] in self.ends else "length") for answer in ids
        ]

    def forget(self, conversations: Sequence[int]) -> None: ...

    def load(self, policy: Any, version: int) -> None: ...


def converse(tokenizer: Any, answers: list[list[list[int]]], **template: Any) -> tuple[list[Episode], Script]:
    engine = Script(answers, [tokenizer.eos_token_id])
    prompts = [(number, Example(f"x/{number}", f"Question {number}:")) for number in range(len(answers))]
    return collect(prompts, Actor(engine, tokenizer, template), Sampling(), (0, "test"), Quiz), engine


def all_ids(episode: Episode) -> list[int]:
    return [token for turn in episode.turns for token in turn.prompt_ids + turn.action_ids]


@given(st.lists(st.tuples(sampled, sampled, sampled), min_size=1, max_size=3))
def test_a_conversation_reads_as_the_template_writes_it(said: list[tuple[str, ...]]) -> None:
    answers = [[[*ids_of(text), chat.eos_token_id] for text in turns] for turns in said]
    episodes, engine = converse(chat, answers)
    for number, episode in enumerate(episodes):
        assert [turn.action_ids for turn in episode.turns] == answers[number]
        messages = [{"role": "system", "content": "Be brief."}]
        for place, text in enumerate(said[number]):
            question = f"Question {number}: 1?" if place == 0 else f"And {place + 1}? 你好"
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
            before = [token for turn in episode.turns[:place] for token in turn.prompt_ids + turn.action_ids]
            assert list(engine.asked[place][number].prompt_ids) == before + episode.turns[place].prompt_ids
        rendered = chat.apply_chat_template(messages, tokenize=False)
        assert chat.decode(all_ids(episode), skip_special_tokens=False) + "\n" == rendered
        assert all_ids(episode) == ids_of(rendered, chat)[:-1]  # bytes have one tokenization only
        assert [turn.reward for turn in episode.turns] == [float(len(text)) for text in said[number]]
        assert episode.terminated and not episode.truncated
        assert len(episode.rows()) == 1


def test_sampled_ids_are_kept_whatever_they_decode_to() -> None:
    """Half a character, a BOS in the middle, an answer cut off: the ids stay, in the turn and in later prompts."""
    half = ids_of("é")[:1]
    answers = [[[*half, 1, *half, chat.eos_token_id], ids_of("cut o"), [chat.eos_token_id]]]
    (episode,), engine = converse(chat, answers)
    assert [turn.action_ids for turn in episode.turns] == answers[0]
    assert episode.turns[0].text == "��"
    assert [turn.logprobs for turn in episode.turns] == [[-0.5] * len(ids) for ids in answers[0]]
    first = len(episode.turns[0].prompt_ids)
    assert list(engine.asked[2][0].prompt_ids[first : first + 4]) == answers[0][0]
    # An answer that ended by itself has its end mark; one that was cut off gets it from the environment.
    assert decode_all(episode.turns[1].prompt_ids).startswith("\n<|im_start|>user\nAnd 2?")
    assert decode_all(episode.turns[2].prompt_ids).startswith("<|im_end|>\n<|im_start|>user\nAnd 3?")
    assert all_ids(episode).count(chat.eos_token_id) == 1 + 3 + 3  # the system prompt, three questions, three answers
    assert episode.truncated


def decode_all(ids: list[int]) -> str:
    return chat.decode(ids, skip_special_tokens=False)


def test_an_end_mark_that_is_not_eos_is_not_doubled() -> None:
    """A base model: its EOS is another token, and "<|im_end|>" is one of `sampling.stop_ids`."""
    tokenizer = chat_tokenizer(eos="<eos>")
    mark = tokenizer.convert_tokens_to_ids("<|im_end|>")
    (episode,), _ = converse(tokenizer, [[[*ids_of("yes"), mark]] * 3])
    assert "<|im_end|><|im_end|>" not in decode_all(all_ids(episode))


def test_the_keyword_arguments_of_the_template_arrive() -> None:
    answer = [*ids_of("yes"), chat.eos_token_id]
    (episode,), _ = converse(chat, [[answer] * 3], mood="calm")
    for turn in episode.turns:
        assert decode_all(turn.prompt_ids).endswith("<|im_start|>assistant\n(calm) ")
    (episode,), _ = converse(chat, [[answer] * 3])
    assert decode_all(episode.turns[0].prompt_ids).endswith("<|im_start|>assistant\n")
    examples = [(0, Example("x", "2+2?", references=("4",)))]
    (shown,) = demonstrate(examples, Actor(Script([], []), chat, {"mood": "calm"}), (0,))
    assert decode_all(shown.turns[0].prompt_ids).endswith("assistant\n(calm) ")
    assert decode_all(shown.turns[0].action_ids) == "4<|im_end|>"


def test_a_conversation_without_a_template() -> None:
    answer = [*ids_of("yes"), plain.eos_token_id]
    (episode,), _ = converse(plain, [[answer, ids_of("cut"), answer]])
    text = "<bos>Be brief.\n\nQuestion 0: 1?yes<eos>\n\nAnd 2? 你好cut\n\nAnd 3? 你好yes<eos>"
    assert plain.decode(all_ids(episode), skip_special_tokens=False) == text


def test_random_keys_are_functions_of_path_episode_and_turn() -> None:
    answer = [*ids_of("yes"), chat.eos_token_id]
    _, engine = converse(chat, [[answer] * 3] * 4)
    _, again = converse(chat, [[answer] * 3] * 4)
    keys = [[request.key for request in turn] for turn in engine.asked]
    assert keys == [[request.key for request in turn] for turn in again.asked]
    assert len({key for turn in keys for key in turn}) == 12


def test_a_full_context_ends_the_conversation() -> None:
    engine = Script([[[*ids_of("yes"), chat.eos_token_id]] * 3], [chat.eos_token_id])
    engine.context = 110
    (episode,) = collect([(0, Example("x", "Question:"))], Actor(engine, chat), Sampling(), (0,), Quiz)
    assert len(episode.turns) == 2
    assert (episode.turns[-1].stop, episode.terminated, episode.truncated) == ("context", False, True)


REWRITING = (
    "{% for message in messages %}{% if message.role != 'assistant' %}<|im_start|>{{ message.content }}<|im_end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
STRICT = "{% if messages|length > 2 %}{{ raise_exception('two messages at most') }}{% endif %}" + CHATML


def test_templates_that_cannot_serve_are_named() -> None:
    answer = [*ids_of("yes"), chat.eos_token_id]
    with pytest.raises(LmgymError, match="drops or repeats an earlier answer"):
        converse(chat_tokenizer(REWRITING), [[answer] * 3])
    with pytest.raises(LmgymError, match=r"refuses the messages \(system, user, assistant, user\): two messages"):
        converse(chat_tokenizer(STRICT), [[answer] * 3])


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(LmgymError, match="prompt of example x has no token"):
        collect([(0, Example("x", ""))], Actor(Script([], []), merging_tokenizer()), Sampling(), (0,), SingleTurn)


# Templates that refuse

ALTERNATING = (
    "{{ '<s>' }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ m.content + '</s>' }}{% endif %}"
    "{% endfor %}"
)


def test_a_template_without_a_system_role_gets_it_in_the_users_first_message() -> None:
    """As Llama-2's and Mistral's first templates are; said once, and conversations go on in the same way."""
    tokenizer = models.byte_tokenizer()
    tokenizer.chat_template = ALTERNATING
    with pytest.warns(UserWarning, match="no system role.*put into the user's next ones"):
        episodes, _ = converse(tokenizer, [[[*ids_of("a"), tokenizer.eos_token_id]] * 3])
    first, second, _ = episodes[0].turns
    assert decode(tokenizer, first.prompt_ids) == "<s>[INST] Be brief.\n\nQuestion 0: 1? [/INST]"
    assert decode(tokenizer, second.prompt_ids) == "</s>[INST] And 2? 你好 [/INST]"


def test_an_end_mark_behind_a_space_is_not_written_twice() -> None:
    """Llama-2's template writes a space between an answer and its end."""
    tokenizer = models.byte_tokenizer()
    tokenizer.chat_template = ALTERNATING.replace("m.content + '</s>'", "m.content + ' <eos>'")
    with pytest.warns(UserWarning):
        episodes, _ = converse(tokenizer, [[[*ids_of("a"), tokenizer.eos_token_id]] * 3])
    for turn in episodes[0].turns[1:]:
        assert tokenizer.eos_token_id not in turn.prompt_ids


@pytest.mark.filterwarnings("ignore:the chat template refuses")
def test_messages_of_one_role_in_a_row_are_joined() -> None:
    tokenizer = models.byte_tokenizer()
    tokenizer.chat_template = ALTERNATING
    said = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert decode(tokenizer, prompt_ids(tokenizer, said)) == "<s>[INST] a\n\nb [/INST]"
    assert merge_roles([*said, {"role": "assistant", "content": "c"}])[1] == {"role": "assistant", "content": "c"}


def test_a_template_that_refuses_everything_is_named() -> None:
    tokenizer = models.byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    with pytest.raises(LmgymError, match=r"refuses the messages \(user\): never"):
        prompt_ids(tokenizer, "a")


KNOWS = (
    "{% for message in messages %}{% if message.role in ROLES %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        (["user", "assistant", "system"], "leaves out messages of the role 'tool', .*; write env.tool_role: user, or"),
        (["user", "assistant", "tool"], "leaves out messages of the role 'system', .*; put their text into the user's"),
        (["user", "assistant", "system", "tool"], ""),
    ],
)
def test_a_template_that_leaves_out_a_role_is_told_of(
    roles: list[str], said: str, recwarn: pytest.WarningsRecorder
) -> None:
    tokenizer = chat_tokenizer(KNOWS.replace("ROLES", str(roles)))
    asked = [{"role": "system", "content": "Look it up."}, {"role": "user", "content": "price?"}]
    result = [{"role": "tool", "name": "search", "content": "45"}]
    shown = decode(tokenizer, prompt_ids(tokenizer, asked))
    shown += decode(tokenizer, appended_ids(tokenizer, asked, result, tokenizer.eos_token_id, None, True))
    assert ("Look it up." in shown, "45" in shown) == ("system" in roles, "tool" in roles)
    [*told] = (str(warning.message) for warning in recwarn)
    assert len(told) == bool(said) and all(re.search(said, sentence) for sentence in told)


def test_a_system_message_behind_the_first_message_is_told_of() -> None:
    first = "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    tokenizer = chat_tokenizer(first + KNOWS.replace("ROLES", "['user', 'assistant']"))
    system, user = ({"role": role, "content": role} for role in ("system", "user"))
    assert left_out(tokenizer, [system, user], None) == ""
    assert "of the role 'system' behind the first one, so" in left_out(tokenizer, [user, system], None)
