"""The documentation site: links between pages and to source files, docstrings as Markdown, and one whole build."""

import json
import re
import subprocess
import sys
from pathlib import Path
from posixpath import normpath
from typing import Any

import nbformat
import pytest

import lmgym
from docs.site import api, docstrings, formulas, notebooks, pages, sources
from tests import runs

ADDRESS = "https://example.org/lmgym"
DOCS = runs.ROOT / "docs"


def test_links_lead_to_pages_and_to_source_files() -> None:
    linked: set[str] = set()
    text = "[a](grpo.md#state) [b](../../README.md) [c](../../lmgym/batch.py) [d](https://arxiv.org) `[e](x.md)`"
    assert pages.rewritten(text, "docs/algorithms/ppo.md", "", linked) == (
        "[a](grpo.md#state) [b](../index.md) [c](../source/lmgym/batch.py.html) [d](https://arxiv.org) `[e](x.md)`"
    )
    assert linked == {"lmgym/batch.py"}


def test_links_lead_to_the_code_host_once_the_repository_has_an_address() -> None:
    linked: set[str] = set()
    written = pages.rewritten("[b](lmgym/batch.py) [t](lmgym/tasks)", "README.md", ADDRESS, linked)
    assert written == f"[b]({ADDRESS}/blob/main/lmgym/batch.py) [t]({ADDRESS}/tree/main/lmgym/tasks)" and not linked


def test_code_keeps_what_looks_like_a_link() -> None:
    text = "Text.\n\n    tasks[0](index.md)\n\n```python\nf[1](README.md)\n```\n"
    assert pages.rewritten(text, "README.md", "", set()) == text


def test_a_broken_link_stays_for_the_strict_build_to_find() -> None:
    assert pages.rewritten("[x](gone.md)", "docs/index.md", "", set()) == "[x](gone.md)"


@pytest.mark.parametrize(
    ("nav", "sentence"),
    [
        (["a.md"], "mkdocs.yml: nav lacks the page b.md; add it to its section"),
        (["a.md", "b.md", "c.md"], "mkdocs.yml: nav names c.md, which does not exist"),
        (["a.md", "b.md", "a.md"], "mkdocs.yml: nav names a.md twice"),
    ],
)
def test_the_navigation_names_every_page_once(nav: list[str], sentence: str) -> None:
    with pytest.raises(SystemExit, match=sentence):
        pages.check_navigation(nav, {"a.md", "b.md"})


@pytest.mark.parametrize(
    ("docstring", "markdown"),
    [
        ("x[0][1] of a * b and `c[0]`.", r"x\[0\]\[1\] of a \* b and `c[0]`."),
        ("Sum.\n\nExample: f([1], 2) -> 3", "Sum.\n\nExample:\n    ```python\n    f([1], 2) -> 3\n    ```"),
        ("Example: so:\n    >>> f(1)\n    2", "Example:\n    so:\n\n    ```pycon\n    >>> f(1)\n    2\n    ```"),
        ("Example: {name: grpo}", "Example:\n    ```python\n    {name: grpo}\n    ```"),
        ("A = R - b\nloss = - A * p", "```text\nA = R - b\nloss = - A * p\n```"),
    ],
)
def test_docstrings_are_text_with_code(docstring: str, markdown: str) -> None:
    assert docstrings.as_markdown(docstring) == markdown


def test_the_notebooks_are_stored_without_outputs() -> None:
    for notebook in (runs.ROOT / "docs" / "notebooks").glob("*.ipynb"):
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells), notebook.name


def test_a_source_file_is_a_page_of_html(tmp_path: Path) -> None:
    """Coloured where its name says a language, and else as it is; what it holds is no HTML of the page."""
    (tmp_path / "a.py").write_text('"Two & <b>"\nx = 1 < 2\n')
    (tmp_path / "NOTES").write_text("a <script> here\n")
    code, notes = (sources.page(tmp_path, name) for name in ("a.py", "NOTES"))
    assert "1</span>" in code and "<b>" not in code and "a &lt;script&gt; here" in notes
    assert 'href="../source.css"' in code and sources.summary(tmp_path / "a.py") == "Two &amp; &lt;b&gt;"


def test_outputs_of_a_cell() -> None:
    printed = {"output_type": "stream", "name": "stdout", "text": "0.5\n"}
    assert notebooks.text_of(printed) == "0.5\n"
    assert notebooks.text_of(printed | {"name": "stderr"}) == ""
    assert notebooks.text_of({"output_type": "execute_result", "data": {"text/plain": "7"}}) == "7"


# What makes the runs of a notebook short. `make docs` and `make notebooks` run them as they are.
SHORT = {
    "first_run": [
        ('"stages.rl.steps=40"', '"stages.warm_start.steps=10", "stages.rl.steps=2"'),
        ("examples=128", "examples=8"),
        ("every=20", "every=2"),
    ],
    "own_algorithm": [("steps: 20", "steps: 6")],
    "own_environment": [
        ("steps: 20", "steps: 2"),
        ("steps: 60", "steps: 2"),
        ("examples: 200", "examples: 8"),
        ("every: 20", "every: 2"),
    ],
}


def in_short(notebook: Path) -> Any:
    """The cells of a notebook, with fewer steps."""
    text = notebook.read_text(encoding="utf-8")
    for long, short in SHORT[notebook.stem]:
        assert text.count(json.dumps(long)[1:-1]) == 1, long
        text = text.replace(json.dumps(long)[1:-1], json.dumps(short)[1:-1])
    return nbformat.reads(text, as_version=4)


@pytest.mark.slow
@pytest.mark.processes
def test_the_site_builds_and_holds_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Executes the notebooks too, in short. Zensical's strict mode checks the links of Markdown; here are those of the
    HTML."""
    monkeypatch.setattr(notebooks, "read", in_short)
    pages.main()
    line = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    done = subprocess.run(line, cwd=runs.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    site = runs.ROOT / "build" / "site"
    html = {path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    ids = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in html.items()}
    broken = []
    for page, text in html.items():
        for link in set(re.findall(r'\b(?:href|src)="([^"]+)"', text)):
            if re.match(r"[a-z]+:", link) or page == "404.html":
                continue
            file, _, anchor = link.partition("#")
            target = normpath((Path(page).parent / file.partition("?")[0]).as_posix()) if file else page
            target = f"{target}/index.html".removeprefix("./") if (site / target).is_dir() else target
            if not (site / target).exists() or (anchor and target in ids and anchor not in ids[target]):
                broken.append(f"{page}: {link}")
    assert not broken
    for notebook in (runs.ROOT / "docs" / "notebooks").glob("*.ipynb"):
        assert f'src="{notebook.stem}_' in html[f"notebooks/{notebook.stem}.html"], f"{notebook.name} shows no plot"
    assert not [page for page, text in html.items() if not re.search(r"<title>[^<]+</title>", text)]
    loaded = r'<(?:script|img|iframe)[^>]*\bsrc="https?:|<link[^>]*rel="(?:stylesheet|preconnect)"[^>]*href="https?:'
    assert not [page for page, text in html.items() if re.search(loaded, text)], "a page loads from another server"
    found = (site / "search.json").read_text(encoding="utf-8")
    assert "group_centred" in found and "source/lmgym" not in found
    for name, home in lmgym._HOMES.items():
        assert any(f"lmgym.{home}.{name}" in names for names in ids.values()), f"the reference lacks {name}"


def test_formulas_become_mathematics_that_a_browser_draws() -> None:
    page = formulas.with_formulas("A\n\n```math\nA = \\frac{R}{2}\n\nB < 1\n```\n\nwith $`c_V`$ and `$x$`.")
    assert page.count('<div class="formula"') == 2 and page.count("<mfrac>") == 1 and page.count("<msub>") == 1
    assert "```" not in page and "B &lt; 1" in page and "`$x$`" in page
    assert formulas.with_formulas("$`c_V`$ is a weight").startswith("<span><math ")  # <math> first would be a block
    assert pages.finished("guide.md", "text") == "text"
    assert pages.finished("log/2026-11.md", "text") == "---\nsearch:\n  exclude: true\n---\n\ntext"


@pytest.mark.parametrize("page", sorted((runs.ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_each_formula_of_the_pages_is_read_whole(page: Path) -> None:
    """What the converter does not know it leaves as TeX in the text."""
    drawn = formulas.with_formulas(page.read_text(encoding="utf-8"))
    for found in re.findall(r"<math .*?</math>", drawn, re.DOTALL):
        assert "\\" not in re.sub(r' alttext="[^"]*"', "", found), found


def test_no_page_is_longer_than_a_reader() -> None:
    """300 lines. The log is a record; docs/from_trl.md has a row for each of TRL's fields."""
    lengths = {
        page.relative_to(DOCS).as_posix(): len(page.read_text(encoding="utf-8").splitlines())
        for page in DOCS.rglob("*.md")
    }
    assert not [
        (page, length)
        for page, length in lengths.items()
        if length > 300 and page != "from_trl.md" and not page.startswith("log/")
    ]
    assert len((runs.ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_the_api_names_each_public_name_under_one_task() -> None:
    named = [name for _, names in api.TASKS.values() for name in names]
    assert sorted(named) == sorted(lmgym._HOMES)


FORM = ("When to use it", "Try it", "Hyperparameters", "What to watch", "State", "Deliberate differences")
OTHER_FORM = {"family": "a table of what the members of GRPO's family are made of"}  # pages that are no algorithm's


@pytest.mark.parametrize("page", sorted((DOCS / "algorithms").glob("*.md")), ids=lambda page: page.stem)
def test_the_page_of_an_algorithm_has_the_form_of_all(page: Path) -> None:
    """One sentence on what it is, a formula or a table of them, then all sections in one order; in "Try it" a curve."""
    if page.stem in OTHER_FORM:
        return
    text = page.read_text(encoding="utf-8")
    sentence = text.split("\n")[2]
    assert sentence.endswith(".") and len(sentence.split()) < 30
    assert "$`" in text or "```math" in text
    places = [text.find(f"\n## {head}") for head in FORM]
    assert places == sorted(places) and min(places) > 0
    tried = text[places[FORM.index("Try it")] : places[FORM.index("Hyperparameters")]]
    shown = re.findall(r"!\[[^]]+\]\((\.\./pictures/[^)]+\.png)\)", tried)
    assert shown and all((page.parent / one).is_file() for one in shown)
