"""The pages of the documentation site, from the Markdown that a code host shows: python -m docs.site.pages

Zensical wants all pages in one folder and all links inside of it. So each page is copied to build/site_pages with its
links rewritten: to another page, or to the source file on the code host, whose address is `repo_url` in mkdocs.yml.
While there is none, the source file becomes a page of the site.
"""

import re
import shutil
import sys
from pathlib import Path, PurePosixPath
from posixpath import relpath

import yaml

from docs.site import api, notebooks, sources
from docs.site.formulas import with_formulas

ROOT = Path(__file__).parents[2]
OUT = ROOT / "build" / "site_pages"
PAGES = {
    "docs/site/start.md": "index.md",
    "docs/index.md": "contents.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmark_scripts.md",
}  # and all of docs/, under its own name
START = "README.md"  # the front page of the code host, in whose place the site has a start page of its own
UNSEARCHED = ("changelog.md", "log.md", "log/")  # long, and about the past: they would hide the guides
# Code comes first, so that a link inside of it is left alone.
CODE = r"^```.*?^```$|(?<=\n\n)(?: {4}[^\n]*\n)+|``[^\n]+?``|`[^`\n]+`"
LINK = re.compile(CODE + r"|\]\((?P<target>[^)\s]+)\)", re.M | re.S)


def page_of(path: str) -> str | None:
    """Where a file of the repository is on the site, or None if it is no page.

    Example: page_of("docs/algorithms/grpo.md") -> "algorithms/grpo.md"
    """
    if path == START:
        return "index.md"
    if path in PAGES:
        return PAGES[path]
    inside = path.removeprefix("docs/")
    if inside == path or inside.startswith("site/"):
        return None
    if path.endswith((".md", ".png", ".svg")):
        return inside
    return inside.removesuffix(".ipynb") + ".md" if path.endswith(".ipynb") else None


def rewritten(text: str, path: str, repo_url: str, linked: set[str]) -> str:
    """The page `path` with links that work on the site; adds to `linked` the files that must become pages for that.

    A link to a file that does not exist stays as it is: the strict build names it.
    """

    def link(found: re.Match[str]) -> str:
        target = found["target"]
        if target is None or re.match(r"[a-z]+:|#", target):
            return found[0]
        file, hash_, anchor = target.partition("#")
        wanted = relpath(PurePosixPath(path).parent / file)
        if not (ROOT / wanted).exists() or wanted.startswith(".."):
            return found[0]
        new = page_of(wanted)
        if new is None and repo_url:
            kind = "tree" if (ROOT / wanted).is_dir() else "blob"
            return f"]({repo_url.rstrip('/')}/{kind}/main/{wanted}{hash_}{anchor})"
        if new is None:
            linked.add(wanted)
            new = sources.place(wanted, folder=(ROOT / wanted).is_dir())
        return f"]({relpath(new, PurePosixPath(str(page_of(path))).parent)}{hash_}{anchor})"

    return LINK.sub(link, text)


def finished(page: str, text: str) -> str:
    """A page as the site generator reads it: its formulas drawn; out of the search if it is about the past."""
    text = with_formulas(text)
    return f"---\nsearch:\n  exclude: true\n---\n\n{text}" if page.startswith(UNSEARCHED) else text


def navigation(entries: list[object]) -> list[str]:
    """The pages that `nav` of mkdocs.yml names, in order."""
    found: list[str] = []
    for entry in entries:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            found += navigation(value) if isinstance(value, list) else [str(value)]
    return found


def check_navigation(nav: list[str], pages: set[str]) -> None:
    """End with one sentence for each page that the navigation lacks, names twice, or names without there being one."""
    wrong = [f"mkdocs.yml: nav lacks the page {page}; add it to its section" for page in sorted(pages - set(nav))]
    wrong += [f"mkdocs.yml: nav names {page}, which does not exist" for page in sorted(set(nav) - pages)]
    wrong += [f"mkdocs.yml: nav names {page} twice" for page in sorted({page for page in nav if nav.count(page) > 1})]
    if wrong:
        sys.exit("\n".join(wrong))


def write(page: str, text: str) -> None:
    """Write one page of the site."""
    (OUT / page).parent.mkdir(parents=True, exist_ok=True)
    (OUT / page).write_text(text, encoding="utf-8")


def main() -> None:
    """Write all pages to build/site_pages."""
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    shutil.rmtree(OUT, ignore_errors=True)
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in PAGES}
    for file in sorted((ROOT / "docs").rglob("*")):
        name = file.relative_to(ROOT).as_posix()
        if name.startswith("docs/site/") or name in texts:
            continue
        if file.suffix == ".md":
            texts[name] = file.read_text(encoding="utf-8")
        elif file.suffix == ".ipynb":
            texts[name] = notebooks.as_markdown(file, OUT / "notebooks")
        elif file.suffix in (".png", ".svg"):
            (OUT / str(page_of(name))).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, OUT / str(page_of(name)))
    texts |= api.pages()
    repo_url, linked = settings.get("repo_url", ""), set[str]()
    pages = {str(page_of(name)): rewritten(text, name, repo_url, linked) for name, text in texts.items()}
    check_navigation(navigation(settings["nav"]), set(pages))
    for path in sorted(linked):
        if (ROOT / path).is_dir():
            linked |= {f"{path}/{file.name}" for file in sources.files(ROOT / path)}
    pages = {page: finished(page, text) for page, text in pages.items()}
    pages |= {sources.place(path, (ROOT / path).is_dir()): sources.page(ROOT, path) for path in linked}
    pages["source.css"] = sources.style()
    for page, text in pages.items():
        write(page, text)
    shutil.copy(Path(__file__).parent / "style.css", OUT / "style.css")


if __name__ == "__main__":
    main()
