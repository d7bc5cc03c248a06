"""A resumed run names all that is not as it was: what would make it another run is refused, what may change its bits is
recorded, and what is free is said."""

import dataclasses
import importlib.metadata
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from lmgym.cli.main import main
from lmgym.config.build import section_of
from lmgym.config.schema import STAGE_KEYS, Config, Stage
from lmgym.core.validation import field_hints
from lmgym.logs.records import read_records
from lmgym.training.checkpoints import manifest
from lmgym.training.resuming.fingerprint import checksum, data_digest
from lmgym.training.resuming.verdicts import verdict_of
from lmgym.types import Example, LabelledStep, RatedAnswer
from tests import models, runs
from tests.runs import complaint

SHORT: dict[str, Any] = {"steps": 2, "evaluation": {"every": 0, "examples": 4}, "checkpoint": {"every": 1}}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmgym.training.evaluation_points.training_plot", lambda metrics, plot: plot)
        return runs.run(tmp_path_factory.mktemp("differences") / "run", **SHORT)


@pytest.fixture
def folder(done: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(done, tmp_path / "run"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def resume(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What a resumed run says, in one line."""
    capsys.readouterr()
    assert main(["train", *map(str, arguments)]) == 0
    return " ".join(capsys.readouterr().out.split())


def resumes(folder: Path) -> list[dict[str, Any]]:
    return [record for record in read_records(folder / "metrics.jsonl") if record["kind"] == "resume"]


def rewrite_fingerprint(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what the newest checkpoint says of itself, as if another machine had written it."""
    saved = runs.newest(folder)
    tree = json.loads((saved / "fingerprint.json").read_text())
    change(tree)
    (saved / "fingerprint.json").write_text(json.dumps(tree))
    (saved / "manifest.json").unlink()
    manifest.write(saved)


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    "override, named",
    [
        ("seed=1", "seed was 0 and is 1"),
        ("algorithm={name: rloo, group_size: 4}", r"algorithm\.name was grpo and is rloo"),
        ("algorithm.kl_coefficient=0.5", r"algorithm\.kl_coefficient was 0\.0 and is 0\.5"),
        ("policy.model=builtin:tiny_gpt2", r"policy\.model was builtin:tiny and is builtin:tiny_gpt2"),
        ("policy.architecture.hidden_size=32", r"policy\.architecture\.hidden_size was 16 and is 32"),
        ("policy.lora_rank=2", r"policy\.lora_rank was not there and is 2"),
        ("policy.critic=separate", r"policy\.critic was head and is separate"),
        ("prompts_per_step=8", "prompts_per_step was 4 and is 8"),
        ("optimizer.name=rmsprop", r"optimizer\.name was adamw and is rmsprop"),
        ("task.largest=7", r"the data of stage 'train' has other contents in its 64 examples"),
        ("task.size=65", r"the data of stage 'train' had 64 examples and has 65"),
        ("steps=1", "steps is 1, and 2 are taken already"),
    ],
)
def test_what_makes_it_another_run_is_refused(
    folder: Path, override: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(folder)
    overrides = ["steps=4", override] if not override.startswith("steps") else [override]
    said = complaint(capsys, "train", folder, *overrides)
    assert said.startswith(f"{folder} cannot go on from stage-0-step-000002: ") and len(said) < 1000
    assert re.search(named, said), said
    assert "out=ANOTHER" in said and contents(folder) == before


def test_all_differences_are_named_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = complaint(capsys, "train", folder, "seed=3", "policy.lora_rank=2", "prompts_per_step=5")
    assert all(word in said for word in ("seed was 0", "policy.lora_rank", "prompts_per_step was 4 and is 5")), said
    fields = "surrogate: {low: 0.1, high: 0.1, dual: 4}, epochs: 3, minibatches: 3"
    names = ("surrogate.low", "surrogate.high", "surrogate.dual", "epochs", "minibatches")
    said = complaint(capsys, "train", folder, "seed=3", f"algorithm={{name: grpo, group_size: 4, {fields}}}")
    assert all(f"algorithm.{name}" in said for name in names)
    said = complaint(capsys, "train", folder, f"policy.model={'x' * 5000}", f"policy.eos_token={'y' * 5000}")
    assert len(said) < 1000, said


ROWS = [{"id": f"row {number}", "prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]


def rows(path: Path, rows: list[dict[str, str]]) -> Path:
    path.mkdir(exist_ok=True)
    for split, chosen in (("train", rows), ("test", [{"id": "t", "prompt": "90+1=", "answer": "91"}])):
        (path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    return path


@pytest.mark.parametrize(
    "changed, named",
    [
        (ROWS[1:] + ROWS[:1], r"has its 8 examples in another order"),
        ([*ROWS[:7], {**ROWS[7], "answer": "9"}], r"has other contents in its 8 examples"),
        (ROWS[:7], r"had 8 examples and has 7"),
    ],
    ids=["shuffled", "an answer", "one fewer"],
)
def test_data_counts_by_its_contents(
    changed: list[dict[str, str]], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = rows(tmp_path / "data", ROWS)
    task = {"name": "jsonl", "path": f"{data}/{{split}}.jsonl", "references": "answer", "id": "id"}
    folder = runs.run(tmp_path / "run", task=task, **SHORT)
    rows(tmp_path / "data", changed)
    said = complaint(capsys, "train", folder, "steps=4")
    assert f"the data of stage 'train' {named}" in said, said
    # The same data in another place is the same data.
    moved = rows(tmp_path / "moved", ROWS)
    said = resume(capsys, folder, "steps=3", f"task.path={moved}/{{split}}.jsonl")
    assert "resuming" in said and not resumes(folder)
    # What is evaluated on counts as well.
    (moved / "test.jsonl").write_text(json.dumps({"id": "t", "prompt": "92+1=", "answer": "93"}) + "\n")
    said = complaint(capsys, "train", folder, "steps=4")
    assert "the data of the evaluation on 'test' has other contents" in said, said


def test_a_stage_that_is_over_stays_and_one_that_has_not_begun_is_free(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = [{"name": name, "steps": 2} for name in ("one", "two", "three")]
    folder = runs.run(tmp_path / "run", **{**SHORT, "stages": stages[:2]})
    said = complaint(capsys, "train", folder, "stages.one.steps=5")
    assert "stages.one.steps was 2 and is 5, but this stage is over" in said
    recipe = runs.write(tmp_path / "longer.yaml", **{**SHORT, "stages": stages})
    tree = recipe.read_text()
    (folder / "recipe.yaml").write_text(tree)
    said = resume(capsys, folder)
    assert "stage 'three', which has not begun, is another" in said and "stage 3/3: three" in said
    assert runs.newest(folder).name == "stage-2-step-000002"


@pytest.mark.slow
def test_another_base_below_the_adapters_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    base = tmp_path / "base"
    model = models.llama()
    model.save_pretrained(base)
    models.tokenizer().save_pretrained(base)
    policy = {"model": str(base), "device": "cpu", "lora_rank": 2}
    folder = runs.run(tmp_path / "run", policy=policy, **SHORT)
    assert "no longer" not in resume(capsys, folder, "steps=3")
    words = json.loads((base / "tokenizer.json").read_text())
    (base / "tokenizer.json").write_text(json.dumps({**words, "normalizer": {"type": "Lowercase"}}))
    said = complaint(capsys, "train", folder, "steps=4")
    assert f"what policy.model names ({base}) has other contents in tokenizer.json" in said
    models.tokenizer().save_pretrained(base)
    with torch.no_grad():
        next(model.parameters())[0, 0] += 2**-10
    model.save_pretrained(base)
    before = contents(folder)
    assert "cannot go on from stage-0-step-000003: base weights was" in complaint(capsys, "train", folder, "steps=4")
    assert contents(folder) == before


def test_a_teacher_with_other_weights_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    teacher = tmp_path / "teacher"
    model = models.llama()
    model.save_pretrained(teacher)
    models.tokenizer().save_pretrained(teacher)
    algorithm = {"name": "distill", "teacher": str(teacher)}
    policy = {"model": str(teacher), "device": "cpu"}
    folder = runs.run(tmp_path / "run", algorithm=algorithm, policy=policy, rewards=None, **SHORT)
    assert "no longer" not in resume(capsys, folder, "steps=3")
    with torch.no_grad():
        next(model.parameters())[0, 0] += 2**-10
    model.save_pretrained(teacher)
    said = complaint(capsys, "train", folder, "steps=4")
    assert f"algorithm.teacher '{teacher}' has other weights than it had" in said, said


def test_a_fingerprint_that_is_none_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite_fingerprint(folder, lambda tree: tree.pop("data"))
    assert "fingerprint.json is no fingerprint of a run (KeyError('data'))" in complaint(capsys, "train", folder)


def test_an_environment_without_data_stands_on_its_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The examples are numbers; what is asked comes from the environment's arguments, and from files that it names."""
    folder = runs.run(tmp_path / "run", task=None, rewards=None, env={"name": "guess_number"}, **SHORT)
    said = complaint(capsys, "train", folder, "env.guesses=3", "steps=3")
    assert "env.guesses was not there and is 3" in said
    assert "resuming" in resume(capsys, folder, "env.workers=1", "env.seconds=30", "steps=3")


# ---------------------------------------------------------------- recorded


def test_another_machine_is_reported_and_recorded(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def elsewhere(tree: dict[str, Any]) -> None:
        tree["versions"]["torch"] = "1.0.0"
        tree["machine"]["device"] = "an abacus"

    rewrite_fingerprint(folder, elsewhere)
    said = resume(capsys, folder, "steps=3")
    assert "no longer bit for bit" in said and "device was an abacus and is" in said, said
    assert f"torch was 1.0.0 and is {importlib.metadata.version('torch')}" in said
    (record,) = resumes(folder)
    assert (record["stage"], record["step"], record["missing"]) == (0, 2, [])
    assert [sentence.split(" was ")[0] for sentence in record["changed"]] == ["torch", "device"]
    # It stays in the records, and is said once.
    assert "no longer" not in resume(capsys, folder, "steps=4")
    assert resumes(folder) == [record]


def test_threads_and_settings_are_recorded(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    try:
        said = resume(capsys, folder, "steps=3", "threads=2", "optimizer.learning_rate=0.001", "checkpoint.keep=3")
    finally:
        torch.set_num_threads(before)
    (record,) = resumes(folder)
    assert record["changed"] == ["optimizer.learning_rate was 0.003 and is 0.001", "threads was 1 and is 2"]
    assert "since the checkpoint checkpoint.keep was 2 and is 3; threads was 1 and is 2; steps was 2 and is 3" in said


def test_a_longer_curve_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    optimizer = {"learning_rate": 0.003, "schedule": "linear"}
    folder = runs.run(tmp_path / "run", optimizer=optimizer, **SHORT)
    resume(capsys, folder, "steps=3")
    assert [record["changed"] for record in resumes(folder)] == [["steps was 2 and is 3"]]


def test_missing_records_are_named_and_recorded(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "metrics.jsonl"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if '"step": 0' not in line))
    said = resume(capsys, folder, "steps=3")
    sentence = (
        "metrics.jsonl lacks 2 of the 4 records that the checkpoint counts (train records of stage 1 step 1); the run "
        "goes on without them"
    )
    assert f"warning: {sentence}" in said, said
    assert [record["missing"] for record in resumes(folder)] == [[sentence]]


def test_odd_names_and_an_empty_manifest_on_the_command_line(
    done: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs.newest(folder), folder / "checkpoints" / "stage-0-step-000002 (copy)")
    (runs.newest(folder).parent / "stage-0-step-000002" / "manifest.json").write_text("{}")
    said = resume(capsys, folder)
    assert "stage-0-step-000002 (copy) is no checkpoint of this run and is ignored" in said
    assert "is damaged (manifest.json names no files); falling back" in said and "in stage 1, after step 1" in said
    shutil.rmtree(folder / "checkpoints" / "stage-0-step-000002 (copy)")
    runs.assert_equal_runs(done, folder)


# ---------------------------------------------------------------- free


def test_what_is_free_is_said_and_changes_nothing(
    done: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = Path(shutil.copytree(done, tmp_path / "plain"))
    resume(capsys, plain, "steps=4")
    said = resume(capsys, folder, "steps=4", "logs.samples=1", "checkpoint.every=2", "evaluation.every=1")
    assert "logs.samples was 2 and is 1" in said and "evaluation.every was 0 and is 1" in said
    assert not resumes(folder)
    final = "final/model.safetensors"
    assert (folder / final).read_bytes() == (plain / final).read_bytes()


def test_a_folder_without_a_fingerprint_resumes_with_a_warning(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = runs.newest(folder)
    state = json.loads((saved / "state.json").read_text())
    (saved / "state.json").write_text(json.dumps({**state, "format": 2}))
    for name in ("fingerprint.json", "manifest.json"):
        (saved / name).unlink()
    manifest.write(saved)
    assert "the checkpoint is of an older version" in resume(capsys, folder, "steps=3")
    assert "older version" not in resume(capsys, folder, "steps=4")


def test_a_newer_format_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = runs.newest(folder)
    state = json.loads((saved / "state.json").read_text())
    (saved / "state.json").write_text(json.dumps({**state, "format": 4}))
    (saved / "manifest.json").unlink()
    manifest.write(saved)
    before = contents(folder)
    assert "has format 4, and this lmgym reads formats 2 and 3; a newer lmgym wrote it" in complaint(
        capsys, "train", folder
    )
    assert contents(folder) == before


# ---------------------------------------------------------------- the table


def keys_of(cls: Any, where: str = "") -> set[str]:
    """The dotted keys of a section and of those below it."""
    found = set()
    for field in dataclasses.fields(cls):
        key = f"{where}{field.name}"
        found.add(key)
        section = section_of(field_hints(cls).get(field.name, Any))
        if section is not None:
            found |= keys_of(section, key + ".")
    return found


def test_every_key_that_may_change_is_documented() -> None:
    known = {key for key in keys_of(Config) if not key.startswith("stages")} | {
        key for key in keys_of(Stage) if key.split(".")[0] in STAGE_KEYS
    }
    known |= {"env.seconds", "env.workers"}
    may_change = {key for key in known if verdict_of(key) != verdict_of(key.rpartition(".")[0])}
    assert {"threads", "engine.workers", "env.seconds", "optimizer.name", "policy.path"} <= may_change
    page = (runs.ROOT / "docs" / "run_folder.md").read_text()
    section = page[page.index("## What may change") :]
    assert not [key for key in may_change if f"`{key}`" not in section]


# ---------------------------------------------------------------- digests

texts = some.text(max_size=5)
examples = some.lists(
    some.builds(Example, id=texts, prompt=texts, references=some.tuples(texts), meta=some.dictionaries(texts, texts)),
    min_size=2,
    max_size=6,
    unique_by=lambda example: example.id,
)


@given(examples, some.data())
def test_the_digest_of_data_tells_order_and_contents(drawn: list[Example], data: some.DataObject) -> None:
    digest = data_digest(drawn)
    assert data_digest(iter(drawn)) == digest and digest["examples"] == len(drawn)
    shuffled = data.draw(some.permutations(drawn))
    other = data_digest(shuffled)
    assert other["in any order"] == digest["in any order"]
    assert (other["sha256"] == digest["sha256"]) == (shuffled == drawn)
    index = data.draw(some.integers(0, len(drawn) - 1))
    changed = [*drawn]
    changed[index] = dataclasses.replace(drawn[index], prompt=str(drawn[index].prompt) + "x")
    assert data_digest(changed)["in any order"] != digest["in any order"]


def test_ratings_and_labels_are_data() -> None:
    """An exchanged pair, and a step whose label was changed, are other data; without them the digest is what it was."""
    pairs = [(RatedAnswer("4", one), RatedAnswer("5", 1 - one)) for one in (0.0, 1.0)]
    steps = [(LabelledStep("2+2=4", right),) for right in (False, True)]
    examples = [Example("a", "b", rated=own) for own in pairs] + [Example("a", "b", steps=own) for own in steps]
    assert len({data_digest([one])["sha256"] for one in [Example("a", "b"), *examples]}) == 5


def test_meta_that_json_lacks_counts_by_its_type() -> None:
    class Thing:
        pass

    one, other = (data_digest([Example("a", "b", meta={"x": Thing(), "y": {3, 1, 2}, 5: "z"})]) for _ in range(2))
    assert one == other
    assert data_digest([Example("a", "b", meta={"x": 1.0})]) != data_digest([Example("a", "b", meta={"x": 2.0})])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64])
def test_a_checksum_of_weights_tells_bits_and_places(dtype: torch.dtype) -> None:
    tensors = [torch.arange(35).reshape(5, 7).to(dtype), torch.ones(3, dtype=dtype)]
    first = checksum(tensors)
    assert checksum([tensor.clone() for tensor in tensors]) == first
    swapped = [tensors[0].clone(), tensors[1]]
    swapped[0][0, 0], swapped[0][4, 6] = tensors[0][4, 6], tensors[0][0, 0]
    assert checksum(swapped) != first and checksum(tensors[::-1]) != first
    assert checksum([tensors[0], torch.ones(4, dtype=dtype)]) != first
    view = torch.zeros(40, dtype=dtype)[1:36].view(5, 7)  # at an odd address
    view.copy_(tensors[0])
    assert checksum([view, tensors[1]]) == first
