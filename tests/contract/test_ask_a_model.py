"""`lmgym eval` and `lmgym generate`: which models they take, what the model reads, and what they print and write."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from lmgym.cli.main import main
from lmgym.core import registry, well_known
from lmgym.core.errors import LmgymError
from lmgym.experiments.answers import answer_prompts, read_prompts
from lmgym.experiments.named_models import find_model
from lmgym.rollouts.rollout import collect
from lmgym.stats.intervals import mean_interval, pass_at_k_each
from lmgym.tasks.base import examples_from_prompts, load_task
from lmgym.training.setup import actor_of, held_out_examples, training_examples
from tests import runs
from tests.runs import complaint

PROBLEM = "Ben has 4 cups and finds 3 more. How many?"
CUPS = ["--prompt", PROBLEM]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 5 steps, with checkpoints after 4 and 5."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmgym.training.evaluation_points.training_plot", lambda metrics, plot: plot)
        rate = {"learning_rate": 0.03, "warmup": 0}
        return runs.run(
            tmp_path_factory.mktemp("asked") / "run", steps=5, evaluation={"every": 0, "examples": 8}, optimizer=rate
        )


def said(capsys: Capture, *arguments: object) -> str:
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def lines(capsys: Capture, *arguments: object) -> list[dict[str, Any]]:
    return [json.loads(line) for line in said(capsys, "generate", *arguments, "--json").splitlines()]


# ---------------------------------------------------------------- what the model reads


SECTIONS: list[dict[str, Any]] = [
    {"prompt_prefix": "Q: ", "prompt_suffix": " A:", "system_prompt": "Count."},
    {"few_shot": {"n": 2}, "prompt_suffix": "!"},
    {"style": "story"},
]


@pytest.mark.parametrize("options", SECTIONS)
def test_a_problem_of_the_task_reads_as_in_training(tmp_path: Path, options: dict[str, Any]) -> None:
    """What the user types is the problem's text; the ids are those of the task's own example, bit for bit."""
    architecture = {**runs.ARCHITECTURE, "max_position_embeddings": 512}
    policy = {"model": "builtin:tiny", "device": "cpu", "architecture": architecture}
    recipe = runs.write(tmp_path / "r.yaml", task={**runs.TINY["task"], **options}, policy=policy)
    named = find_model(str(recipe))
    assert named is not None
    trained = training_examples(named.config, named.config.stages[-1])[3]
    plain = load_task("arithmetic", "train", size=64, largest=5, style=options.get("style", "short"))[3]
    assert isinstance(plain.prompt, str)
    problem = plain.prompt.removesuffix("\nAnswer:")
    [asked] = examples_from_prompts([problem], named.config.stages[-1].task, named.config.seed)
    actor = actor_of(named.config, named.load())
    episodes = collect([(0, trained)], actor, named.config.stages[-1].sampling, (0,))
    assert actor.encode_prompt(asked.prompt) == episodes[0].turns[0].prompt_ids
    [answered], _ = answer_prompts(named, [problem])
    shown = actor.tokenizer.decode(episodes[0].turns[0].prompt_ids, clean_up_tokenization_spaces=False)
    assert answered.full_prompt == shown and problem in shown and "\nAnswer:" in shown


def test_tasks_that_write_around_a_problem() -> None:
    def asked(problem: str, **section: Any) -> Any:
        return examples_from_prompts([problem], section)[0].prompt

    for name in ("arithmetic", "topics"):
        example = load_task(name, "test")[0]
        assert isinstance(example.prompt, str)
        problem = example.meta.get("topic") or example.prompt.removesuffix("\nAnswer:")
        assert asked(problem, name=name) == example.prompt
    assert asked(PROBLEM + "\nAnswer:", name="arithmetic") == PROBLEM + "\nAnswer:"  # a whole prompt, copied
    assert asked("a storm", name="topics", template="On {topic}:") == "On a storm:"
    assert asked("One two three", name="xsum", truncate_article=2, prompt_suffix=" TL;DR:") == "One two TL;DR:"
    assert asked("dog run", name="common_gen", prefix="use: ", end=".") == "use: dog run."
    assert asked("Who?", name="narrative_qa") == "who?"
    assert asked("Hey .", name="daily_dialog") == asked("Hey . <EOU>", name="daily_dialog") == "Hey . <EOU>"
    assert asked("2+2=", name="increasing_numbers") == "2+2="
    chat = [
        {"role": "user", "content": "2+2="},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "?"},
    ]
    assert examples_from_prompts([chat], {"name": "arithmetic"})[0].prompt[-1]["content"] == "?\nAnswer:"  # type: ignore[index]


def test_a_mixture_asks_as_the_named_task_does(tmp_path: Path, capsys: Capture) -> None:
    tasks = [{"name": "arithmetic", "size": 16, "test_size": 8, "prompt_prefix": "Q: "}, {"name": "topics"}]
    recipe = runs.write(tmp_path / "r.yaml", task={"name": "mixture", "tasks": tasks, "prompt_suffix": "!"})
    assert "--task arithmetic" in complaint(capsys, "generate", recipe, *CUPS)
    [answer] = lines(capsys, recipe, *CUPS, "--task", "arithmetic")
    assert answer["full_prompt"] == f"<bos>Q: {PROBLEM}\nAnswer:!"
    assert "--task is 'topic'; did you mean 'topics'" in complaint(capsys, "generate", recipe, *CUPS, "--task", "topic")
    plain = runs.write(tmp_path / "p.yaml")
    assert "leave it out" in complaint(capsys, "generate", plain, *CUPS, "--task", "arithmetic")


def test_a_conversation_reads_as_in_training(tmp_path: Path, capsys: Capture) -> None:
    """The environment's system prompt and the user's later lines are there; the answer is the last message."""
    env = {"name": "conversation", "system_prompt": "Count.", "user": "scripted", "script": ["Sure?"]}
    recipe = runs.write(tmp_path / "r.yaml", env=env)
    [answer] = lines(capsys, recipe, *CUPS)
    assert answer["full_prompt"] == f"<bos>Count.\n\n{PROBLEM}\nAnswer:" and len(answer["answers"]) == 1
    # A model that ends its answers is asked again; the conversation has every message with its role.
    talkative = [recipe, *CUPS, "policy.architecture={}", "sampling.stop=[a]", "sampling.max_new_tokens=40"]
    [answer] = lines(capsys, *talkative, "--samples", 6)
    several = [own for own in answer["conversations"] if len(own) > 3]
    roles = ["system", "user", "assistant", "user", "assistant"]
    assert several and all([message["role"] for message in own] == roles for own in several)
    assert several[0][1]["content"] == f"{PROBLEM}\nAnswer:" and several[0][3]["content"] == "Sure?"
    shown = said(capsys, "generate", *talkative, "--samples", 6, "--verbose")
    assert "\nsystem: Count.\n" in shown and "\nuser: Sure?\n" in shown and "\nassistant: " in shown
    game = runs.write(tmp_path / "g.yaml", env="guess_number", task=None, rewards=None)
    assert "writes its own prompts" in complaint(capsys, "generate", game, *CUPS)


# ---------------------------------------------------------------- prompts and answers


def test_where_prompts_come_from(done: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.txt").write_text("one\n\ntwo\n")
    chat = [{"role": "user", "content": "three"}]
    (tmp_path / "p.jsonl").write_text(
        json.dumps({"prompt": "one", "x": 1}) + "\n" + json.dumps({"prompt": chat}) + "\n"
    )
    assert [one["prompt"] for one in lines(capsys, done, "--file", tmp_path / "p.txt", "--prompt", "zero")] == [
        "zero", "one", "two",
    ]  # fmt: skip
    found = lines(capsys, done, "--file", tmp_path / "p.jsonl")
    assert [one["prompt"] for one in found] == ["one", chat]
    assert [one["full_prompt"] for one in found] == ["<bos>one\nAnswer:", "<bos>three\nAnswer:"]
    monkeypatch.setattr("sys.stdin", (tmp_path / "p.txt").open())
    assert [one["prompt"] for one in lines(capsys, done)] == ["one", "two"]
    (tmp_path / "blank.txt").write_text("\n \n")
    (tmp_path / "latin.txt").write_bytes(b"\xff\n")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"promt": "b"}\n')
    for name, sentence in {
        "blank.txt": "holds no prompt",
        "latin.txt": "latin.txt as UTF-8 text",
        "none.txt": "No such file",
        "bad.jsonl": "bad.jsonl:2: there is no column 'prompt'; did you mean 'promt'",
    }.items():
        with pytest.raises(LmgymError, match=sentence):
            read_prompts(tmp_path / name)
    assert "prompt 2 is empty" in complaint(capsys, "generate", done, *CUPS, "--prompt", "")


def test_several_answers(done: Path, capsys: Capture) -> None:
    """They are sampled, as in training; the first of them do not depend on how many there are."""
    [four], [two] = (lines(capsys, done, *CUPS, "--samples", count) for count in (4, 2))
    assert len(set(four["answers"])) > 1 and len(four["answers"]) == len(four["stops"]) == 4
    assert two["answers"] == four["answers"][:2]
    shown = said(capsys, "generate", done, *CUPS, "--samples", 2).splitlines()
    assert shown[0] == PROBLEM and [line[:5] for line in shown[1:]] == ["  1: ", "  2: "]
    sentence = complaint(capsys, "generate", done, *CUPS, "--samples", 2, "evaluation.temperature=0")
    assert sentence.startswith("--samples 2 at temperature 0 would give 2 equal answers")
    [greedy] = lines(capsys, done, *CUPS)
    assert len(greedy["answers"]) == 1
    shown = said(capsys, "generate", done, *CUPS, "--verbose")
    assert f"reads it\n<bos>{PROBLEM}\nAnswer:\n--- the answer, ended by {greedy['stops'][0]}\n" in shown


# ---------------------------------------------------------------- which model


def test_names_of_models(done: Path, tmp_path: Path, capsys: Capture) -> None:
    """A run is its newest checkpoint; final/ and a copy of it, with a recipe, are one model; others differ."""
    shutil.copytree(done / "final", tmp_path / "copy")
    recipe = runs.write(tmp_path / "r.yaml", policy={"model": "builtin:tiny_gpt2", "device": "cpu"})
    ask = [*CUPS, "--samples", "4"]
    final, run, newest, copied, in_run, other, first = (
        lines(capsys, *model, *ask)[0]["answers"]
        for model in (
            [done / "final"],
            [done],
            [runs.newest(done)],
            [recipe, "--model", tmp_path / "copy"],
            [recipe, "--model", done],
            [recipe, "--model", "builtin:tiny"],
            [done / "checkpoints" / "stage-0-step-000004"],
        )
    )
    assert final == run == newest == copied == in_run
    assert other != final and first != final
    sentence = complaint(capsys, "eval", tmp_path / "copy")
    assert sentence.endswith(f"lmgym eval RECIPE.yaml --model {tmp_path / 'copy'}")
    assert "name the recipe of its task too" in complaint(capsys, "generate", "some/model", *CUPS)
    assert "there is no recipe" in complaint(capsys, "eval", tmp_path / "none.yaml")
    assert "there is no run, model folder or recipe" in complaint(capsys, "eval", done / "chekpoints" / "x")


def test_adapters(tmp_path: Path, capsys: Capture) -> None:
    """Adapters outside of a run belong to the recipe's model; those of another model are refused."""
    pytest.importorskip("peft")
    policy = {**runs.TINY["policy"], "lora_rank": 4}
    run = runs.run(tmp_path / "run", policy=policy, steps=2, evaluation={"every": 0, "examples": 2})
    shutil.copytree(runs.newest(run), tmp_path / "adapters")
    recipe = runs.write(tmp_path / "r.yaml")
    here = lines(capsys, recipe, "--model", tmp_path / "adapters", *CUPS, "--samples", 4)
    assert here == lines(capsys, run, *CUPS, "--samples", 4)
    wide = runs.write(tmp_path / "w.yaml", policy={"model": "builtin:tiny", "device": "cpu"})
    for other in (wide, runs.write(tmp_path / "g.yaml", policy={"model": "builtin:tiny_gpt2", "device": "cpu"})):
        sentence = complaint(capsys, "eval", other, "--model", tmp_path / "adapters")
        assert f"the adapters in {tmp_path / 'adapters'} do not fit the recipe's model" in sentence


# ---------------------------------------------------------------- evaluations


def test_an_evaluation_is_written_beside_the_run(done: Path, capsys: Capture) -> None:
    """Its numbers are those of the run's own last evaluation; a second one overwrites nothing."""
    before = {path.name for path in done.iterdir()} - {"evaluations"}
    shown = said(capsys, "eval", done)
    tree = json.loads(said(capsys, "eval", done, "--json"))
    written = [json.loads(path.read_text()) for path in (done / "evaluations").glob("*.json")]
    assert len(written) == 2 and all(one["metrics"] == tree["metrics"] for one in written) and tree in written
    last = [record for record in runs.records(done / "metrics.jsonl") if record["kind"] == "evaluation"][-1]
    for name, interval in tree["metrics"].items():
        assert [interval[key] for key in ("mean", "low", "high")] == [last[name + end] for end in ("", "/low", "/high")]
        assert f"{name} " in shown
    expected = {"model": str(done), "split": "test", "prompts": 8, "samples": 1, "task": "arithmetic", "seed": 0}
    assert {key: tree[key] for key in expected} == expected
    assert tree["weights"] == str(runs.newest(done)) and tree["decoding"]["temperature"] == 0.0
    assert {path.name for path in done.iterdir()} - {"evaluations"} == before


def test_a_result_that_cannot_be_kept_is_printed(done: Path, tmp_path: Path, capsys: Capture) -> None:
    shutil.copytree(done, tmp_path / "run", ignore=shutil.ignore_patterns("evaluations"))
    (tmp_path / "run" / "evaluations").write_text("a file is in the way")
    assert main(["eval", str(tmp_path / "run"), "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["prompts"] == 8 and "lmgym: the result is not kept: " in shown.err


def test_pass_at_k(done: Path, tmp_path: Path, capsys: Capture) -> None:
    """Of 8 sampled answers, pass@1, 2, 4, 8 by the unbiased estimate, each with its interval over prompts."""
    tree = json.loads(said(capsys, "eval", done / "final", "--samples", 8, "--json", "evaluation.split=validation"))
    names = [name for name in tree["metrics"] if name.startswith("regex/pass@")]
    assert names == [f"regex/pass@{k}" for k in (1, 2, 4, 8)]
    assert (tree["samples"], tree["decoding"]["temperature"], tree["split"]) == (8, 1.0, "validation")
    named = find_model(str(done / "final"))
    assert named is not None
    examples = held_out_examples(named.config, "validation")
    answered, _ = answer_prompts(named, [str(example.prompt) for example in examples], samples=8)
    assert len(answered) == 8  # another place of randomness than the evaluation's: only the estimate is compared
    right = [[float(any(map(str.isdigit, text))) for text in one.answers] for one in answered]
    for k in (1, 2, 4, 8):
        own, other = mean_interval(pass_at_k_each(right, k), shares=True), tree["metrics"][f"regex/pass@{k}"]
        assert other["low"] <= other["mean"] <= other["high"] and own.low <= other["high"] and other["low"] <= own.high
    best = json.loads(said(capsys, "eval", done, "--samples", 2, "--json", "evaluation.best_of=length"))
    assert "regex/best@2" in best["metrics"] and best["overrides"] == ["evaluation.best_of=length"]
    assert "samples is 1; raise it" in complaint(capsys, "eval", done, "--samples", 1, "evaluation.best_of=length")
    assert "8 equal answers" in complaint(capsys, "eval", done, "--samples", 8, "evaluation.temperature=0")
    assert "--samples is 0" in complaint(capsys, "eval", done, "--samples", 0)


# ---------------------------------------------------------------- what is said


def test_check_ends_with_what_to_do_next(done: Path, tmp_path: Path, capsys: Capture) -> None:
    """Words that a shell would take apart are quoted; what is wrong is to be mended first."""
    recipe = runs.write(tmp_path / "a recipe.yaml")
    overrides = ["task.largest=6", "sampling={min_new_tokens: 6, max_new_tokens: 6}"]
    last = said(capsys, "check", recipe, *overrides).splitlines()[-1]
    assert shlex.split(last) == ["next:", "lmgym", "train", str(recipe), *overrides]
    last = said(capsys, "check", recipe, "--memory").splitlines()[-1]
    assert shlex.split(last) == ["next:", "lmgym", "check", str(recipe)]
    last = said(capsys, "check", done, overrides[1]).splitlines()[-1]
    assert shlex.split(last) == ["next:", "lmgym", "train", str(done), overrides[1]]
    assert main(["check", str(recipe), "rewards={final_answer: 1}"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("next: mend what is marked with !, and check again: lmgym check ")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cpo", "dpo, ipo, simpo and orpo from given ones, online_dpo from sampled ones"),
        ("slic-hf", "dpo with objective: hinge"),
        ("cDPO", "dpo with label_smoothing"),
        ("bco", "as kto does"),
        ("KTO", "called kto"),
        ("rlhf", "docs/learned_rewards.md"),
        ("DPOTrainer", "called dpo"),
        ("sft", "called supervised"),
        ("grpo_trainer", "called grpo"),
        ("PPO", "called ppo"),
        ("reinforce++", "called reinforce_pp"),
        ("best-of-n", "called raft"),
        ("expert_iteration", "called raft"),
        ("gpro", "did you mean 'grpo'"),
    ],
)
def test_well_known_names_that_are_called_otherwise(name: str, words: str, tmp_path: Path, capsys: Capture) -> None:
    sentence = complaint(capsys, "train", runs.write(tmp_path / "r.yaml", algorithm=name))
    assert f"unknown algorithm '{name}'" in sentence and words in sentence, sentence


def test_what_is_said_of_well_known_names_is_true() -> None:
    """No name is one of lmgym's own, and every algorithm, reward and page that a sentence names is there."""
    own = registry.names("algorithm")
    assert not {*well_known.ALGORITHMS} & {*own}
    for sentence in well_known.ABOUT:
        for name in re.findall(r"(?:is called|algorithm:|^is) (\w+)", sentence):
            assert name in own, sentence
        for reward in re.findall(r"rewards: {(\w+):", sentence):
            assert reward in registry.names("reward")
        for page in re.findall(r"docs/\w+\.md", sentence):
            assert (runs.ROOT / page).is_file()
