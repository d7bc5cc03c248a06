"""LlamaGym's Agent: its loop on the real Blackjack-v1, what is kept and trained, what is refused."""

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lmgym.compat.llamagym import Agent, AutoModelForCausalLMWithValueHead, whole_episodes
from lmgym.compat.llamagym_settings import sampling_of, settings_of
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.envs.gymnasium import Gymnasium
from lmgym.inference.base import Completion
from lmgym.models import lora
from lmgym.models.builtin import byte_tokenizer
from lmgym.models.policy import VALUE_HEAD
from lmgym.types import Episode, Example, Turn
from tests import models, rounding, runs

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Llama 2's: the system prompt stands inside the first user message, and roles must take turns.
INSTRUCT = (
    "{% if messages[0].role == 'system' %}{% set system = '<<SYS>>' + messages[0].content + '<</SYS>>' %}"
    "{% set talk = messages[1:] %}{% else %}{% set system = '' %}{% set talk = messages %}{% endif %}"
    "{% for m in talk %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '<bos>[INST] ' + (system if loop.first else '') + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' <eos>' }}{% endif %}{% endfor %}"
)
REFUSAL = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
SHORT = {"max_new_tokens": 3}
NO_KL = {"batch_size": 4, "init_kl_coef": 0.0}


class Player(Agent):
    """LlamaGym's README's."""

    def get_system_prompt(self) -> str:
        return "Play."

    def format_observation(self, observation: Any) -> str:
        return f"You have {observation[0]}"

    def extract_action(self, response: str) -> int:
        return 0 if "stick" in response else 1


class Unparsable(Player):
    def extract_action(self, response: str) -> int:
        raise ValueError("no action in here")


def tokenizer_with(template: str | None = CHATML) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    return tokenizer


def model_for(tokenizer: Any, seed: int = 0) -> Any:
    return models.sharpen(models.llama(seed, vocab_size=len(tokenizer), max_position_embeddings=1024), 0.12, seed)


def player(kind: type[Agent] = Player, template: str | None = CHATML, **settings: Any) -> Any:
    tokenizer = tokenizer_with(template)
    ppo = settings.pop("ppo", NO_KL)
    return kind(model_for(tokenizer), tokenizer, "cpu", {**SHORT, **settings.pop("generate", {})}, ppo, **settings)


def weights(agent: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in agent.model.parameters()])


def largest_gap(agent: Any) -> float:
    """What rounding makes of the mean gap between sampler and policy, in rows of up to 512 tokens."""
    return rounding.typical_tolerance(agent.model, tokens=512)


def play(agent: Any, answers: int, rewards: Any = 1.0) -> None:
    """An episode of so many answers, not ended; rewards for each, or one for the last."""
    for number in range(answers):
        agent.act((number, 0, 0))
        agent.assign_reward(rewards[number] if isinstance(rewards, list) else rewards * (number == answers - 1))


def loop(agent: Any, episodes: int, seed: int = 0) -> list[dict[str, float]]:
    """LlamaGym's loop on Blackjack-v1; the statistics of the batches."""
    env, records = gymnasium.make("Blackjack-v1"), []
    for episode in range(episodes):
        observation, _ = env.reset(seed=seed + episode)
        over = False
        while not over:
            observation, reward, terminated, truncated, _ = env.step(agent.act(observation))
            agent.assign_reward(float(reward))
            over = terminated or truncated
        records.append(agent.terminate_episode())
    return [record for record in records if record]


# The loop


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the chat template refuses")
@pytest.mark.parametrize(
    "template", [CHATML, INSTRUCT, REFUSAL + CHATML, None], ids=["chatml", "instruct", "no-system", "none"]
)
def test_the_example_runs(
    template: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tokenizer_with(template)
    tokenizer.save_pretrained(tmp_path)
    model_for(tokenizer).save_pretrained(tmp_path)
    script = runs.ROOT / "examples" / "blackjack_agent.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--model", str(tmp_path), "--episodes", "4", "--batch-size", "2"])
    runpy.run_path(str(script), run_name="__main__")
    assert "updates " in capsys.readouterr().out  # at least one batch came together


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the chat template refuses")  # rendering says what it does instead
def test_a_system_prompt_that_the_template_refuses_stands_in_the_first_observation() -> None:
    agent = player(template=REFUSAL + CHATML)
    play(agent, 3)
    shown = [agent.tokenizer.decode(turn.prompt_ids) for turn in agent._game.episode.turns]
    assert "Play." in shown[0] and "You have 0" in shown[0]
    assert not any("Play." in later for later in shown[1:])
    agent.terminate_episode()
    assert loop(agent, 4)


@pytest.mark.parametrize("template", [CHATML, INSTRUCT], ids=["chatml", "instruct"])
def test_what_was_sampled_is_kept_and_only_what_is_new_is_rendered(template: str) -> None:
    agent = player(template=template)
    play(agent, 3)
    game = agent._game
    turns = game.episode.turns
    assert game.ids == [token for turn in turns for token in turn.prompt_ids + turn.action_ids]
    assert all(len(turn.action_ids) == len(turn.logprobs) == len(turn.kept) for turn in turns)
    assert "Play." in agent.tokenizer.decode(turns[0].prompt_ids)
    for number, turn in enumerate(turns):
        shown = agent.tokenizer.decode(turn.prompt_ids)
        assert f"You have {number}" in shown
        assert f"You have {number - 1}" not in shown
        assert turn.text == agent.current_episode_messages[2 + 2 * number]["content"]
    assert [message["role"] for message in agent.current_episode_messages] == ["system", *["user", "assistant"] * 3]


def test_an_answer_ends_once() -> None:
    """With the end of sequence, where the template would write a mark of its own behind it; as in a recipe."""
    agent = player()

    class Ends:
        def generate(self, requests: Any, sampling: Any) -> list[Completion]:
            return [Completion([agent.tokenizer.eos_token_id], [-0.5], "eos")]

    agent._learner.engine = Ends()
    agent.act((0, 0, 0))
    agent.act((1, 0, 0))
    shown = agent.tokenizer.decode(agent._game.episode.turns[1].prompt_ids)
    assert agent.tokenizer.eos_token != "<|im_end|>" and shown.startswith("\n<|im_start|>user")


def test_a_turn_reads_what_is_new_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = player(generate={"min_new_tokens": 3})
    policy, read = agent._learner.policy, []
    forward = policy.forward_hidden
    monkeypatch.setattr(policy, "forward_hidden", lambda ids, *rest: (read.append(ids.numel()), forward(ids, *rest))[1])
    play(agent, 3)
    turns = agent._game.episode.turns
    # the prompt, then each sampled token but the last, which the next turn reads with its own prompt
    expected = [[len(turns[0].prompt_ids), 1, 1], *([1 + len(turn.prompt_ids), 1, 1] for turn in turns[1:])]
    assert read == [count for turn in expected for count in turn]


@pytest.mark.slow
def test_statistics_are_finite_floats_and_the_model_moves() -> None:
    agent = player(ppo={"batch_size": 4, "learning_rate": 1e-3})
    before = weights(agent)
    records = loop(agent, 6)
    assert records
    for record in records:
        assert all(isinstance(value, float) and value == value for value in record.values())
        assert {"reward", "loss/policy", "loss/value", "kl/reference", "kl/coefficient", "ratio/mean"} <= record.keys()
        assert record["sampler_logprob_gap"] < largest_gap(agent) or record["answers/older"]
    assert not torch.equal(before, weights(agent))


@pytest.mark.slow
def test_it_learns_which_answer_is_paid() -> None:
    agent = player(
        generate={"max_new_tokens": 1, "top_p": 1.0, "temperature": 1.0},
        ppo={"batch_size": 16, "learning_rate": 1e-2, "init_kl_coef": 0.0},
    )
    means = []
    while len(means) < 16:
        agent.act((0, 0, 0))
        agent.assign_reward(float(agent._game.episode.turns[0].action_ids[0] % 2))
        record = agent.terminate_episode()
        means += [record["reward"]] if record else []
    assert sum(means[:3]) / 3 < 0.6
    assert sum(means[-3:]) / 3 > 0.9


@pytest.mark.slow
def test_two_runs_with_one_seed_are_equal_and_another_seed_is_another_run() -> None:
    agents = [player(ppo={"batch_size": 4, "learning_rate": 1e-3}) for _ in range(3)]
    agents[0].seed(7)
    agents[1] = player(ppo={"batch_size": 4, "learning_rate": 1e-3, "seed": 7})
    records = [loop(agent, 4) for agent in agents]
    assert records[0] == records[1] != records[2]
    assert torch.equal(weights(agents[0]), weights(agents[1]))
    assert not torch.equal(weights(agents[0]), weights(agents[2]))


def test_one_class_serves_a_recipe_too() -> None:
    env = Gymnasium(id="Blackjack-v1", agent="tests.contract.test_llamagym:Player")
    messages = env.reset(Example("x", ""), seed=0)
    assert [message["role"] for message in messages] == ["system", "user"]
    step = env.step("stick", "eos")
    assert step.over and step.reward in (-1.0, 0.0, 1.0)


@pytest.mark.processes
def test_importing_the_agent_loads_no_torch() -> None:
    probe = "import sys; from lmgym.compat.llamagym import Agent; Agent(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], cwd=runs.ROOT).returncode == 0


# Turns, rewards and batches


@pytest.mark.parametrize("template", [CHATML, INSTRUCT], ids=["chatml", "instruct"])
def test_an_answer_without_an_action_keeps_its_place(template: str) -> None:
    agent = player(Unparsable, template)
    assert agent.act((1, 0, 0)) is None
    agent.extract_action = lambda response: 5
    assert agent.act((2, 0, 0)) == 5
    agent.assign_reward(2.0)
    assert agent.current_episode_rewards == [0.0, 2.0]
    assert len(agent._game.episode.turns) == 2


def test_rewards_of_one_answer_add_up() -> None:
    agent = player()
    agent.act((1, 0, 0))
    agent.assign_reward(1.0)
    agent.assign_reward(-0.25)
    assert agent.current_episode_rewards == [0.75]


def test_rewards_come_after_answers() -> None:
    agent = player()
    for _ in range(2):
        with pytest.raises(LmgymError, match="comes after act"):
            agent.assign_reward(1.0)
        play(agent, 1)
        agent.terminate_episode()
    play(agent, 1)
    with pytest.raises(LmgymError, match="finite"):
        agent.assign_reward(float("nan"))


def test_train_false_throws_the_episode_away() -> None:
    agent = player(ppo={**NO_KL, "batch_size": 1})
    before = weights(agent)
    play(agent, 2)
    assert agent.terminate_episode(train=False) == {}
    assert torch.equal(before, weights(agent))
    assert not agent._learner.engine._conversations._caches  # nor is anything left of it in the sampler
    assert agent.terminate_episode() == {}  # nothing has been played since
    play(agent, 1)
    assert agent.terminate_episode()["answers"] == 1


@pytest.mark.slow
def test_a_remainder_is_kept_with_its_version_or_dropped() -> None:
    """Batches of 4: episodes of 3 and 2 answers make one of 3, and 2 are left."""
    for remainder, dropped, answers, older in (("keep", 0, 4, 0.5), ("drop", 2, 4, 0.0)):
        agent = player(remainder=remainder, ppo={**NO_KL, "learning_rate": 1e-2})
        play(agent, 3)
        assert agent.terminate_episode() == {}
        play(agent, 2)
        record = agent.terminate_episode()
        assert (record["answers"], record["answers/older"], record["answers/dropped"]) == (3, 0, dropped)
        while not (record := agent.terminate_episode()):
            play(agent, 2)
        assert (record["answers"], record["answers/older"]) == (answers, older)
        if older:  # the first step's ratio to the sampling weights is not 1, as the weights have moved
            assert record["ratio/mean"] != pytest.approx(1.0, abs=1e-6)


@pytest.mark.slow
def test_all_batches_that_are_full_train_at_once() -> None:
    agent = player()
    play(agent, 1)
    agent.terminate_episode()
    play(agent, 9)  # more than a batch for itself
    record = agent.terminate_episode()
    assert record["updates"] == 2 * 4
    assert record["answers"] == (1 + 9) / 2


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(1, 10))
def test_a_batch_is_the_oldest_whole_episodes_that_fit(lengths: list[int], size: int) -> None:
    episodes = [Episode(Example("x", ""), 0, n, [Turn([1], [2])] * length) for n, length in enumerate(lengths)]
    chosen, rest = whole_episodes(episodes, size)
    assert chosen + rest == episodes
    assert len(chosen) == 1 or sum(lengths[: len(chosen)]) <= size
    if rest:
        assert sum(lengths[: len(chosen) + 1]) > size


@pytest.mark.parametrize("credit", ["shared", "llamagym"])
def test_answers_train_one_by_one_under_llamagyms_credit(credit: Any) -> None:
    agent = player(credit=credit, ppo={**NO_KL, "batch_size": 3})
    play(agent, 3)
    record = agent.terminate_episode()
    assert record["reward"] == 1.0  # as the environment paid it
    assert record["value/mean"] == 0.0
    assert record["sampler_logprob_gap"] < largest_gap(agent)


# Evaluation and files


@pytest.mark.slow
def test_evaluation_trains_nothing_and_disturbs_nothing() -> None:
    env, settings = gymnasium.make("Blackjack-v1"), {"batch_size": 4, "learning_rate": 1e-3}
    one, other = player(ppo=settings), player(ppo=settings)
    for agent in (one, other):
        play(agent, 1)
    before = weights(other)
    found = [other.evaluate(env, 10) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0].count == 10
    assert not found[0].has_bounds or found[0].low <= found[0].mean <= found[0].high  # none if ten games ended alike
    assert other.evaluate(env, 3, greedy=False).count == 3
    assert torch.equal(before, weights(other))
    for _ in range(2):  # the episode that was under way, and the next one
        play(one, 2)
        play(other, 2)
        assert one.current_episode_messages == other.current_episode_messages
        assert one.terminate_episode() == other.terminate_episode()


def test_evaluation_counts_answers_without_an_action() -> None:
    agent = player(Unparsable)
    with pytest.warns(UserWarning, match=r"\d+ of \d+ answers were no action"):
        agent.evaluate(gymnasium.make("Blackjack-v1"), 2)


def test_saved_models_are_read_by_transformers(tmp_path: Path) -> None:
    agent = player()
    play(agent, 4)
    agent.terminate_episode()
    agent.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, tensor in agent.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    again = AutoModelForCausalLMWithValueHead.from_pretrained(str(tmp_path))
    head = load_file(tmp_path / VALUE_HEAD)["weight"]
    assert head.abs().sum() > 0
    assert torch.equal(again.v_head.weight, head)


# Models


@pytest.mark.slow
def test_adapters_alone_train_and_the_reference_is_the_model_without_them(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    tokenizer = tokenizer_with()
    tokenizer.save_pretrained(tmp_path)
    base = model_for(tokenizer)
    base.save_pretrained(tmp_path)
    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.05, bias="none", task_type="CAUSAL_LM")
    with pytest.warns(UserWarning, match="lora_dropout is not applied"):
        model = AutoModelForCausalLMWithValueHead.from_pretrained(
            pretrained_model_name_or_path=str(tmp_path), peft_config=config
        ).to("cpu")
    named = {name for name, parameter in model.pretrained_model.named_parameters() if parameter.requires_grad}
    assert {name.split(".")[-4] for name in named} == {"q_proj", "v_proj"}  # peft's own choice for a Llama
    tokenizer.add_special_tokens({"pad_token": "<extra>"})
    model.pretrained_model.resize_token_embeddings(len(tokenizer))  # as LlamaGym's example does
    agent = Player(model, tokenizer, "cpu", SHORT, {"batch_size": 4, "learning_rate": 1e-2})
    assert isinstance(agent._learner.copies["reference"], lora.AdapterDisabledPolicy)
    loop(agent, 6)
    ours = model.pretrained_model.state_dict()
    for name, tensor in base.state_dict().items():
        name = name if name in ours else name.replace("_proj.weight", "_proj.base_layer.weight")
        assert torch.equal(ours[name][: len(tensor)], tensor), name
    assert model.v_head.weight.abs().sum() > 0
    model.save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.tensor([[5, 6, 7]])
    assert rounding.near(merged, merged(ids).logits, model.pretrained_model(ids).logits)
    assert not torch.allclose(merged(ids).logits[..., : len(tokenizer) - 1], base(ids).logits, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
def test_a_packed_model_trains_its_adapters(bits: int, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    tokenizer = tokenizer_with()
    tokenizer.save_pretrained(tmp_path)
    wide = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": len(tokenizer)}
    models.llama(0, **wide, max_position_embeddings=1024).save_pretrained(tmp_path)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        str(tmp_path), peft_config=peft.LoraConfig(r=4), **{f"load_in_{bits}bit": True}
    ).to("cpu")
    agent = Player(model, tokenizer, "cpu", SHORT, {"batch_size": 4, "learning_rate": 1e-2})
    trained = [p for p in model.pretrained_model.parameters() if p.requires_grad]
    before = [parameter.clone() for parameter in trained]
    assert loop(agent, 4)
    assert any(not torch.equal(*pair) for pair in zip(before, trained, strict=True))
    agent.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / lora.CONFIG).is_file()
    with pytest.raises(LmgymError, match="packed model cannot be moved"):
        model.to("meta")


@pytest.mark.slow
def test_the_reference_is_a_frozen_copy_or_none() -> None:
    assert player()._learner.copies == {}
    agent = player(ppo={"batch_size": 2, "learning_rate": 1e-2})
    before = weights(agent)
    loop(agent, 3)
    copied = agent._learner.copies["reference"].model.parameters()
    assert torch.equal(torch.cat([parameter.flatten() for parameter in copied]), before)


@pytest.mark.slow
def test_half_precision_is_raised_where_it_trains() -> None:
    tokenizer = tokenizer_with()
    with pytest.warns(UserWarning, match="too coarse"):
        agent = Player(model_for(tokenizer).to(torch.bfloat16), tokenizer, "cpu", SHORT, NO_KL)
    assert {parameter.dtype for parameter in agent.model.parameters()} == {torch.float32}
    assert agent._learner.policy.compute == torch.bfloat16
    assert loop(agent, 4)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"trust_remote_code": True}, "cannot honour trust_remote_code"),
        ({"load_in_8bit": True}, "packed weights cannot train; add peft_config"),
        ({"device_map": {"": 0}}, "write device_map='auto'"),
        ({"torch_dtype": torch.float16}, "dtype is float32, bfloat16"),
        ({"token": "of-somebody"}, "HF_TOKEN"),
        ({"peft_config": 3}, "peft_config is a int"),
    ],
)
def test_what_from_pretrained_cannot_honour_is_named(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LmgymError, match=sentence):
        AutoModelForCausalLMWithValueHead.from_pretrained("builtin:tiny", **arguments)


@pytest.mark.slow
def test_peft_settings_that_lmgym_does_not_have_are_named() -> None:
    peft = pytest.importorskip("peft")
    with pytest.raises(LmgymError, match="use_rslora is True"):
        AutoModelForCausalLMWithValueHead.from_pretrained("builtin:tiny", peft_config=peft.LoraConfig(use_rslora=True))
    wrapped = peft.get_peft_model(model_for(tokenizer_with()), peft.LoraConfig())
    with pytest.raises(LmgymError, match="wrapped by peft"):
        AutoModelForCausalLMWithValueHead.from_pretrained(wrapped)


# Bad input


def test_without_a_model_the_calls_say_what_is_missing() -> None:
    agent: Any = Player()
    for call in (lambda: agent.act((1, 0, 0)), agent.terminate_episode, lambda: agent.evaluate(None, 1)):
        with pytest.raises(LmgymError, match=r"needs a model, and this Player has none: write Player\(model, token"):
            call()
    with pytest.raises(LmgymError, match="no tokenizer"):
        Player(model_for(tokenizer_with()))
    with pytest.raises(LmgymError, match="credit is 'fair'; valid: returns, shared, llamagym"):
        Player(credit="fair")  # type: ignore[arg-type]


def test_models_and_tokenizers_that_do_not_go_together_are_refused() -> None:
    tokenizer = tokenizer_with()
    model = model_for(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "<extra>"})
    with pytest.raises(LmgymError, match=r"has 262 tokens and the model 261; write model\.resize_token_embeddings"):
        Player(model, tokenizer)
    with pytest.raises(LmgymError, match="is a int"):
        Player(3, tokenizer)
    tokenizer.eos_token = None
    with pytest.raises(LmgymError, match="no end-of-sequence token"):
        Player(model, tokenizer)


def test_a_conversation_that_outgrows_the_model_says_so_and_can_be_ended() -> None:
    tokenizer = tokenizer_with()
    agent: Any = Player(models.llama(0, vocab_size=261, max_position_embeddings=128), tokenizer, "cpu", SHORT, NO_KL)
    with pytest.raises(LmgymError, match="reads 128 at most"):
        play(agent, 10)
    count = len(agent._game.episode.turns)
    assert count > 0 and len(agent.current_episode_messages) == 1 + 2 * count
    agent.terminate_episode()


def test_generation_keys_are_honoured_or_named() -> None:
    tokenizer = tokenizer_with()

    def of(**keys: Any) -> Any:
        return sampling_of(keys, tokenizer, (2,))

    usual = of()
    assert (usual.max_new_tokens, usual.top_p, usual.top_k, usual.temperature) == (32, 0.6, None, 0.9)
    prefixed = of(**{"generate/max_new_tokens": 8, "generate/top_p": 1.0, "generate/top_k": 40})
    assert (prefixed.max_new_tokens, prefixed.top_p, prefixed.top_k, prefixed.temperature) == (8, None, 40, 0.9)
    agreeing = of(eos_token_id=[2, 7], pad_token_id=tokenizer.pad_token_id, num_beams=1, stop_strings="\n", min_p=0.1)
    assert (agreeing.stop_ids, agreeing.stop, agreeing.min_p) == ((7,), ("\n",), 0.1)
    for keys, sentence in (
        ({"num_beams": 4}, "num_beams is 4"),
        ({"repetition_penalty": 1.2}, "repetition_penalty is 1.2"),
        ({"temprature": 1.0}, "did you mean 'temperature'"),
        ({"max_length": 20}, "write max_new_tokens"),
        ({"do_sample": False}, "greedy answers"),
        ({"pad_token_id": 77}, "pad_token_id is 77, and the tokenizer's is 0"),
        ({"eos_token_id": 7}, r"eos_token_id is 7, and the ids that end an answer of this model are \[2\]"),
    ):
        with pytest.raises(LmgymError, match=sentence):
            of(**keys)


def test_ppo_keys_are_taken_over_or_named() -> None:
    given = {"batch_size": 8, "mini_batch_size": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "seed": 3}
    settings = settings_of({**given, "adap_kl_ctrl": False, "early_stopping": True, "target_kl": 0.1})
    assert (settings.batch_size, settings.ppo.minibatches, settings.seed) == (8, 2, 3)
    assert (settings.optimizer.max_gradient_norm, settings.ppo.kl_target, settings.ppo.target_kl) == (0.5, None, 0.1)
    assert settings_of({"kl_penalty": "kl"}).ppo.kl_estimator == "k1"
    with pytest.warns(UserWarning, match="ratio_threshold is not taken over: no minibatch is skipped"):
        settings_of({"ratio_threshold": 10.0})
    for keys, sentence in (
        ({"learning_rte": 1.0}, "unknown key 'learning_rte'; did you mean 'learning_rate'"),
        ({"kl_penalty": "full"}, "kl_penalty is 'full'; lmgym has 'kl', the only one of TRL's four"),
        ({"kl_penalty": "mse"}, "kl_penalty is 'mse'; lmgym has 'kl', the only one of TRL's four"),
        ({"batch_size": 0}, "at least 1"),
        ({"gamma": 2.0}, "gamma is 2.0"),
    ):
        with pytest.raises(LmgymError, match=sentence):
            settings_of(keys)


def test_the_registry_finds_an_agent_by_module() -> None:
    assert issubclass(registry.get("agent", "lmgym.compat.llamagym:Agent"), registry.get("agent", "plain").__base__)
