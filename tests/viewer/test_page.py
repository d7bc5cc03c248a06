"""The page in a real browser: from a curve to a token, by mouse and by keyboard, narrow and wide, live, as a file."""

import http.server
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmgym.viewer.guard import Guard
from lmgym.viewer.runs import open_runs
from lmgym.viewer.server import application, bound, server_of
from lmgym.viewer.single_file import write_file
from tests import runs
from tests.viewer.sample_runs import (
    FORMULAS,
    HOSTILE,
    add_step,
    append,
    byte_tokenizer,
    many_steps,
    sample_run,
    session_run,
    worded_run,
)

pytestmark = [pytest.mark.slow, pytest.mark.processes]

SECONDS = 30  # that a busy machine may take for a view


class Page:
    """A browser with one page open; every method waits until what it asks for is there."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.base = ""

    def open(self, address: str) -> None:
        if address != self.address:
            self.script("document.getElementById('view')?.removeAttribute('data-shown')")
        self.driver.get(self.base + address)
        self.at(address.split("?")[0])

    def script(self, text: str, *arguments: Any) -> Any:
        return self.driver.execute_script(text, *arguments)

    def until(self, holds: Callable[[], Any]) -> Any:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            if value := holds():
                return value
            time.sleep(0.03)
        raise AssertionError(f"not so after {SECONDS} s, at {self.address}: {self.text[:2000]}")

    def see(self, words: str) -> None:
        self.until(lambda: words in self.text)

    def at(self, address: str) -> None:
        self.until(lambda: self.script("return document.getElementById('view')?.dataset.shown") == address)

    @property
    def text(self) -> str:
        return str(self.script("return document.body.innerText"))

    @property
    def address(self) -> str:
        return str(self.script("return location.hash"))

    def click(self, selector: str) -> None:
        find = "return document.querySelector(arguments[0])"
        self.until(lambda: self.script(find, selector))
        self.script("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", selector)
        from selenium.common.exceptions import StaleElementReferenceException
        from selenium.webdriver.common.by import By

        def clicked() -> bool:
            try:
                self.driver.find_element(By.CSS_SELECTOR, selector).click()
                return True
            except StaleElementReferenceException:  # a list was drawn anew just then
                return False

        self.until(clicked)

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    def write(self, selector: str, text: str) -> None:
        from selenium.webdriver.common.by import By

        self.until(lambda: self.script("return document.querySelector(arguments[0])", selector))
        field = self.driver.find_element(By.CSS_SELECTOR, selector)
        field.clear()
        field.send_keys(text)

    def size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def problems(self) -> list[str]:
        """What the browser has complained of since the last call, such as a breach of the policy."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("needs Chromium and its chromedriver (Debian: apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield opened
    opened.quit()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return {
        "live": sample_run(folder / "live"),
        "hostile": sample_run(folder / "hostile", steps=2, texts=[HOSTILE, "42"]),
        "many": many_steps(folder / "many", steps=2000, answers=512),
        "formulas": sample_run(folder / "formulas", steps=1, groups=1, texts=[FORMULAS, "42"]),
        "strange": strange_run(folder / "strange"),
        "worded": worded_run(folder / "worded"),
    }


def strange_run(folder: Path) -> Path:
    """A run of someone else's making: 20,000 names, numbers that are hardly apart, names that turn the text around."""
    sample_run(folder, steps=1, groups=1)
    names = {f"name {number}": 1.0 for number in range(20_000)}
    for step, big in ((1, 1e17), (2, 1e17 + 16)):
        place = {"kind": "train", "stage": 0, "stage_name": "rl\u202e\u200b", "step": step}
        append(
            folder / "metrics.jsonl",
            place | {"big": big, "turned\u202e\u200b": 1, "constructor": 2, "small": step} | names,
        )
    return folder


@pytest.fixture(scope="session")
def server(folders: dict[str, Path]) -> Iterator[str]:
    pytest.importorskip("uvicorn", reason="needs lmgym[view]")
    with served(list(folders.values())) as address:
        yield address


@contextmanager
def served(folders: Sequence[Path]) -> Iterator[str]:
    """The address of a server of these runs, while the body runs."""
    listening = bound(0)
    guard = Guard(application(open_runs(folders)), listening.getsockname()[1])
    serving = server_of(guard)
    thread = threading.Thread(target=serving.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield guard.address
    serving.should_exit = True
    thread.join(10)


def opened(browser: Any, address: str, begins: str = "#/run/0/about") -> Page:
    """The page of a server, at its curves; it begins elsewhere."""
    page = Page(browser)
    page.size(1280, 900)
    browser.get("about:blank")  # so that the page is loaded anew
    browser.get(address)
    page.base = address.split("#")[0]
    page.at(begins)
    page.open("#/")
    page.problems()
    return page


@pytest.fixture
def page(browser: Any, server: str) -> Iterator[Page]:
    page = opened(browser, server, "#/runs")  # where a reader of several runs begins
    yield page
    assert page.problems() == []


def test_a_click_leads_from_a_curve_to_a_token_and_back_leads_back(page: Page) -> None:
    page.open("#/")
    assert "token=" not in page.driver.current_url
    # The right end of the first curve is its newest step: of the longest run, the one with a million answers.
    page.script(
        "const own = document.querySelector('.chart svg'), box = own.getBoundingClientRect();"
        "own.dispatchEvent(new MouseEvent('click', {clientX: box.right - 12, clientY: box.top + 10, bubbles: true}))"
    )
    page.until(lambda: page.address.startswith("#/run/2/step/0/19"))  # the last of 2,000 steps, about
    page.open("#/run/0/step/0/5")
    page.see("15 answers in 3 groups")
    page.click(".row:nth-child(1)")
    page.at("#/run/0/group/0/5/0")
    page.see("What is 20 + 22, asked for the 1. time?")
    # Best first; the two equal texts are one card.
    scores = page.script("return [...document.querySelectorAll('.card')].map(card => card.innerText)")
    assert len(scores) == 4 and scores[0].startswith("1") and scores[-1].startswith("0")
    assert sum("\u00d72" in card for card in scores) == 1
    page.click(".card:first-child .answer")
    page.at("#/run/0/answer/train/0/5/0")
    page.click(".token.sampled")
    page.see("By itself, it was made likelier: its advantage is 0.4")
    page.see("-min(r A, clip(r, 1 - low, 1 + high) A)")
    page.see("-0.4 \u00d7 weight 0.002 = -8e-4 of the loss")
    page.see("pushes the token by 8e-4")
    page.see("R less the mean of the group's scores")
    page.see("mean score of its group")
    assert "token=0." in page.address
    page.driver.back()
    page.at("#/run/0/group/0/5/0")
    page.driver.back()
    page.at("#/run/0/step/0/5")


def test_the_token_stays_in_the_page_of_its_port(page: Page, server: str) -> None:
    """A page of another port gets no cookie, cannot read the page's storage, and its requests are refused."""
    seen: list[str] = []

    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(str(self.headers))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>other</title>")

        def log_message(self, *words: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        page.driver.get(f"http://127.0.0.1:{other.server_port}/")
        token = server.split("token=")[1]
        assert seen and token not in "".join(seen) and page.driver.title == "other"
        assert token not in page.script("return JSON.stringify([document.cookie, {...localStorage}])")
        asked = page.driver.execute_async_script(
            "fetch(arguments[0] + 'data/runs', {credentials: 'include'})"
            ".then(() => arguments[1]('read'), () => arguments[1]('no'))",
            page.base,
        )
        assert asked == "no"
        other.shutdown()
    page.problems()  # of the refused request
    page.driver.get(f"{page.base}#/run/constructor")
    page.see("There is no run constructor")
    page.open("#/run/0/constructor")
    page.see("There is no view “constructor”")


def test_tokens_have_their_boundaries_and_colours(page: Page) -> None:
    page.open("#/run/0/answer/train/0/5/0?colour=advantages")
    assert page.script("return document.querySelectorAll('.part.said .token').length") == 50
    assert page.script("return document.querySelectorAll('.part.given .token.sampled').length") == 0
    assert page.script("return document.querySelector('.token.special').innerText") == "<|im_start|>"
    assert page.script("return document.querySelector('.fold summary').innerText") == "thought, 32 tokens"
    colours = page.script("return [...document.querySelectorAll('.token.sampled')].map(own => own.style.cssText)")
    assert set(colours) == {"--share: 55%;"}  # one advantage for all
    page.press("c")
    assert "colour=push" in page.address
    assert page.script("return document.querySelector('select').value") == "push"


def test_the_keyboard_goes_everywhere(page: Page) -> None:
    page.open("#/run/0/step/0/5")
    page.press("j", "l")
    page.at("#/run/0/group/0/5/1")
    page.see("Not trained on: its group was not chosen: all scores are equal.")
    page.press("l")
    page.at("#/run/0/answer/train/0/5/5")
    page.press("j")
    page.at("#/run/0/answer/train/0/5/6")
    page.press("l", "l")
    page.see("It did not train")
    page.press("?")
    page.see("next, previous answer of the group")
    page.press("?", "h")
    page.at("#/run/0/group/0/5/1")
    page.press("h")
    page.at("#/run/0/step/0/5")
    page.press("]")
    page.at("#/run/0/step/0/6")
    page.press("/")
    page.press("e", "q", "u", "a", "l")  # typed, and no command
    page.see("1 group of 3")
    assert "filter=equal" in page.address


def test_filters_and_shares_select_groups_and_answers(page: Page) -> None:
    page.open("#/run/0/step/0/5?list=answers&sort=-length")
    page.until(lambda: page.script("return document.querySelectorAll('.row').length") == 15)
    page.see("<tool_call>add(20, 22)</tool_call>")  # what was answered, not only what was asked
    page.click(".chip")
    page.see("3 answers of 15")
    page.see("truncated 20 %")
    page.write("input[type=search]", "score>=1 length<30")
    page.see("4 answers of 15")
    page.write("input[type=search]", "scroe>1")
    page.see("there is no “scroe”")
    page.write("input[type=search]", "score<0..5")
    page.see("“score<0..5” is no filter")


def test_a_million_answers_are_one_step_at_a_time(page: Page) -> None:
    page.script("performance.clearResourceTimings()")
    page.open("#/run/2/step/0/1500?list=answers")
    page.see("512 answers in 64 groups")
    assert page.script("return document.querySelectorAll('.row').length") < 60
    page.press("j", "j")
    page.script("document.querySelector('.list').scrollTop = 1e6")
    page.until(lambda: "511" in page.script("return [...document.querySelectorAll('.row .id')].at(-1).innerText"))
    # Nothing but this step was asked for.
    asked = page.script("return performance.getEntriesByType('resource').map(own => own.name)")
    assert {name.split("/data/")[1] for name in asked if "/data/" in name} <= {"runs", "changes", "runs/2/steps/0/1500"}


def test_a_run_is_shown_while_it_trains(page: Page, folders: dict[str, Path]) -> None:
    page.open("#/")
    newest = max(int(path.stem[-6:]) for path in (folders["live"] / "traces").iterdir())
    add_step(folders["live"], byte_tokenizer(), newest + 1)
    page.see("written")
    place = "return document.querySelector('.marks').dataset.step"
    page.until(
        lambda: page.press("j") or page.script(place) == f"0/{newest + 1}"
    )  # j goes to the last step that is there
    page.press("l")
    page.at(f"#/run/0/step/0/{newest + 1}")
    page.see("15 answers in 3 groups")


HOVER = """
    const own = [...document.querySelectorAll('.chart')].find(one => one.innerText.startsWith(arguments[0]));
    const box = own.querySelector('svg').getBoundingClientRect();
    for (const [kind, x] of arguments[1]) own.querySelector('svg').dispatchEvent(
      new PointerEvent(kind, {clientX: box.left + x * box.width, clientY: box.top + 60, bubbles: true}));
    """
READOUT = """
    return [...document.querySelectorAll('.chart')].find(one => one.innerText.startsWith(arguments[0]))
      .querySelector('.readout').innerText
    """


def test_the_pointer_tells_the_step_and_live_numbers_leave_it(page: Page, folders: dict[str, Path]) -> None:
    page.open("#/?runs=live")
    page.script(HOVER, "reward", [["pointermove", 0.99]])
    before = page.script(READOUT, "reward")
    newest = max(int(path.stem[-6:]) for path in (folders["live"] / "traces").iterdir())
    assert before.split("\n")[0] == f"step {newest + 1}"  # counted from 1, as the log does
    card = page.script("return document.querySelector('.chart')")
    add_step(folders["live"], byte_tokenizer(), newest + 1)
    page.until(
        lambda: (
            page.script(HOVER, "entropy", [["pointermove", 0.99]])
            or f"step {newest + 2}" in page.script(READOUT, "entropy")
        )
    )
    assert page.script("return document.querySelector('.chart') === arguments[0]", card)  # the same, with its readout
    page.script(HOVER, "reward", [["pointermove", 0.2]])
    early = page.script(READOUT, "reward")
    add_step(folders["live"], byte_tokenizer(), newest + 2)
    last = "return document.querySelector('.chart .line').getAttribute('d').split('L').length"
    amount = page.script(last)
    page.until(lambda: page.script(last) > amount)
    assert early.startswith("step ") and page.script(READOUT, "reward") == early


def test_steps_are_chosen_by_dragging_and_axes_are_logarithmic(page: Page) -> None:
    page.open("#/?runs=many")
    ticks = "return [...document.querySelectorAll('.chart .middle')].map(one => one.textContent)"
    assert "1500" in page.script(ticks)
    page.script(HOVER, "reward", [["pointerdown", 0.4], ["pointermove", 0.6], ["click", 0.6]])
    assert page.address.startswith("#/?runs=many&from=") and "1500" not in page.script(ticks)
    page.press("\ue00c")  # Escape
    assert page.address == "#/?runs=many" and "1500" in page.script(ticks)
    page.open("#/?runs=live&metric=entropy&log=1")
    marks = page.script("return [...document.querySelectorAll('.chart .end')].map(one => Number(one.textContent))")
    steps = [later / earlier for earlier, later in pairwise(marks)]
    assert steps and all(any(step == pytest.approx(size) for size in (2, 2.5, 5, 10)) for step in steps)


def test_many_runs_have_a_filter_and_a_mean(page: Page) -> None:
    page.open("#/?metric=entropy")
    lines = "return document.querySelectorAll('.chart > svg > svg path.line').length"
    page.until(lambda: page.script(lines) == 5)
    page.write("input[placeholder=runs]", "li")
    page.until(lambda: page.script(lines) == 1)
    page.write("input[placeholder=runs]", "")
    page.click(".bar button:nth-of-type(2)")
    assert page.script("return document.querySelectorAll('.chart .average.line').length") == 1
    assert "mean=1" in page.address
    colours = page.driver.execute_async_script(
        "import('/page/curves.js').then(({colourOf}) =>"
        "arguments[0]([...Array(50).keys()].map(place => JSON.stringify(colourOf(place)))))"
    )
    assert len(set(colours)) == 50


def test_a_run_of_someone_else_freezes_nothing_and_names_what_is_hidden(page: Page) -> None:
    page.open("#/?runs=strange")
    charts = "return document.querySelectorAll('.chart').length"
    assert page.script(charts) == 9
    page.see("more than 1,000 names")
    page.click("#view p > button")
    assert page.script(charts) == 69
    page.write("input[type=search]", "big")
    assert page.script(charts) == 1
    page.write("input[type=search]", "turned")
    page.see("turnedU+202EU+200B")
    page.write("input[type=search]", "constructor")
    assert page.script(charts) == 1
    began = time.monotonic()
    found = page.driver.execute_async_script(
        "import('/page/chart.js').then(({ticks}) => arguments[0]("
        "[[1e17, 1e17 + 16, 4], [-1e300, 1e300, 4], [0, 5e-324, 4],"
        "[1, 1, 4], [0, 40, 5]].map(one => ticks(...one))))"
    )
    assert time.monotonic() - began < 5 and found[-1] == [0, 10, 20, 30, 40] and all(len(one) <= 6 for one in found)


def test_hidden_characters_are_named_in_every_place(page: Page, folders: dict[str, Path]) -> None:
    page.open("#/run/1/answer/train/0/1/0")
    page.click(".token.sampled .hidden-character")
    page.see("U+202E")
    assert "U+202E" in page.script("return document.querySelector('.panel h2').innerText")
    found = page.driver.execute_async_script(
        "const [texts, done] = arguments;"
        "import('/page/dom.js').then(({h, plain, svg}) => done("
        "texts.map(text => [plain(text), h('b', {title: text}, text).title,"
        "h('b', {}, text).textContent, svg('text', {}, text).textContent])))",
        list(hidden := {
            "a\u200db": "aU+200Db", "\u200d": "U+200D", "\U0001f469\u200d\U0001f469": "\U0001f469\u200d\U0001f469",
            "\u2764\ufe0f 1\ufe0f\u20e3 a\ufe0f": "\u2764\ufe0f 1\ufe0f\u20e3 aU+FE0F",
            "\x1b[2J\x9b": "U+001B[2JU+009B",
            "\U000e0041\u3164\u034f": "U+E0041U+3164U+034F", "a\tb\nc": "a\tb\nc", "\ufffe": "U+FFFE",
            "\u0645\u06cc\u200c\u062e": "\u0645\u06cc\u200c\u062e",
            "\u0645\u200c\u200c\u062e": "\u0645U+200CU+200C\u062e",
        }),
    )  # fmt: skip
    assert found == [[expected] * 4 for expected in hidden.values()]


def test_a_run_is_told_on_one_page(page: Page) -> None:
    page.open("#/run/0/about")
    page.see("what the doctor says")
    page.see("algorithm: {name: grpo}")
    rows = page.script("return [...document.querySelectorAll('tbody tr')].map(row => row.innerText)")
    assert rows[0].startswith("final_answer\t0.2 [0.1, 0.3]\t") and len(rows) == 1
    page.until(lambda: "unfinished" in page.text)


def test_what_the_doctor_says_follows_a_run_that_trains(page: Page, folders: dict[str, Path]) -> None:
    page.open("#/run/0/about")
    page.see("ended early")  # the doctor has read the records
    assert "environment errors" not in page.text
    newest = max(int(path.stem[-6:]) for path in (folders["live"] / "traces").iterdir())
    add_step(folders["live"], byte_tokenizer(), newest + 1)
    record = {"kind": "train", "stage": 0, "stage_name": "rl", "step": newest + 2, "environment_errors": 0.75}
    append(folders["live"] / "metrics.jsonl", record)
    page.see("75% of a step's episodes ended because their environment failed")


def test_a_note_that_was_not_saved_is_there_when_one_comes_back(page: Page) -> None:
    page.open("#/run/1/answer/train/0/0/0")
    page.write("textarea", "half a thought")
    page.see("not saved yet")
    page.open("#/run/1/answer/train/0/0/1")
    assert page.script("return document.querySelector('textarea').value") == ""
    page.open("#/run/1/answer/train/0/0/0")
    assert page.script("return document.querySelector('textarea').value") == "half a thought"
    page.click(".notes button")
    page.see("saved in notes.jsonl")


def test_hostile_texts_stay_texts(page: Page) -> None:
    title = page.driver.title
    for address in ("group/0/1/0", "answer/train/0/1/0", "step/0/1?list=answers"):
        page.open(f"#/run/1/{address}")
        assert page.script("return document.querySelectorAll('#view script, #view img, #view b > b').length") == 0
        assert "hacked" not in page.driver.title and page.driver.title != title
    page.open("#/run/1/group/0/1/0")
    page.see("<script>document.title='hacked'</script><img src=x onerror=")
    page.see("U+202E")
    page.see("U+001B")
    page.see("&lt;b&gt; ../../etc/passwd $\\frac{1}{2}$")


def test_formulas_are_drawn_when_asked_for(page: Page) -> None:
    drawn = "return [...document.querySelectorAll('.reading .formula')].map(own => own.title)"
    tokens = "return document.querySelector('.token.sampled').getClientRects().length"
    page.open("#/run/3/answer/train/0/0/0")
    assert page.script(drawn) == [] and page.script(tokens) == 1
    page.press("m")
    assert page.address.endswith("?formulas=1") and page.script(tokens) == 0
    assert page.script(drawn) == [
        "$x^2 = 2$", "\\(\\sqrt[3]{x_1}\\)", "$$\\frac{a}{b}$$", "\\[\\sum_{k=1}^n k\\]", "\\boxed{\\frac12}",
    ]  # fmt: skip
    for name in ("msup", "mroot", "msub", "mfrac", "munderover", "math .boxed", "math[display=block]"):
        assert page.script("return document.querySelectorAll(arguments[0]).length", f".reading {name}"), name
    page.see("It costs $5 and $6")
    page.see("$\\unheardof{x}$ and `$y^2$` stay")
    page.click("button[aria-pressed=true]")
    assert "formulas" not in page.address and page.script(tokens) == 1
    page.press("m", "l")  # a token is looked at where tokens are shown
    assert page.address.endswith("?token=0.41") and page.script(tokens) == 1
    page.press("m", "j")  # the way of reading goes along
    page.at("#/run/3/answer/train/0/0/1")
    assert page.address.endswith("?formulas=1")
    page.press("?")
    page.see("formulas, or the exact tokens")
    page.press("?")


def test_the_way_of_reading_goes_from_a_group_to_its_answers(page: Page) -> None:
    page.open("#/run/3/group/0/0/0")
    page.see("$x^2 = 2$")
    page.click("button[aria-pressed=false]")
    assert page.script("return document.querySelectorAll('.card math').length") == 5
    page.press("m")
    page.see("$x^2 = 2$")
    page.press("m", "j", "l")
    page.until(lambda: page.script("return document.querySelectorAll('.reading math').length") == 5)
    assert page.address == "#/run/3/answer/train/0/0/0?formulas=1"


def test_latex_becomes_mathml_or_stays(page: Page) -> None:
    source = """
        const [sources, done] = arguments;
        const trees = (own) => [...own.children].map(tree).join(" ");
        const leaf = (own) => /^m(i|n|o|text)$/.test(own.localName);
        const tree = (own) => leaf(own) ? own.textContent : `${own.localName}(${trees(own)})`;
        import('/page/latex.js').then(({formula}) => done(sources.map((one) => {
          const drawn = formula(one, true);
          return drawn && trees(drawn);
        })))"""
    expected = {
        "12.5+x": "12.5 + x",
        "x_1^2": "msubsup(x 1 2)",
        "x^2_1": "msubsup(x 1 2)",
        "x^23": "msup(x 2) 3",
        "f''(x)": "msup(f \u2032\u2032) ( x )",
        "\\frac12": "mfrac(1 2)",
        "\\dfrac{a+b}{c}": "mfrac(mrow(a + b) c)",
        "\\binom{n}{k}": "mrow(( mfrac(n k) ))",
        "\\sqrt2": "msqrt(2)",
        "\\sqrt[n]{x}": "mroot(x n)",
        "\\sum_{i=1}^{n} i": "munderover(∑ mrow(i = 1) n) i",
        "\\int_0^1": "msubsup(∫ 0 1)",
        "\\lim_{x\\to 0}": "munder(lim mrow(x → 0))",
        "2\\cdot 3 \\neq 7 \\le \\infty": "2 ⋅ 3 ≠ 7 ≤ ∞",
        "\\left( \\frac{a}{b} \\right]": "mrow(( mfrac(a b) ])",
        "\\left. x \\right|_0": "msub(mrow(x |) 0)",
        "\\big\\{ x \\big\\}": "{ x }",
        "\\text{if $5": None,
        "\\text{for all } x": "for\u00a0all\u00a0 x",
        "\\mathbb{R} \\mathbf{v1} \\mathrm{d}": "\u211d mrow(\U0001d42f \U0001d7cf) d",
        "\\operatorname{lcm}(a,b)": "lcm ( a , b )",
        "\\vec{v} + \\hat x": "mover(v →) + mover(x ^)",
        "\\begin{pmatrix} a & b \\\\ c & d \\end{pmatrix}": "mrow(( mtable(mtr(mtd(a) mtd(b)) mtr(mtd(c) mtd(d))) ))",
        "50\\% \\$5 \\{1, 2\\}": "50 % $ 5 { 1 , 2 }",
        "a \\not= b": "a =\u0338 b",
        "\\mathbb{\u2102} \\mathcal{F}": "\u2102 \u2131",
        "{-}1 = |-1|": "\u2212 1 = | \u2212 1 |",
        "π ≤ 世": "π ≤ 世",
    }
    stays = [
        "", " ", "{", "}", "\\frac{1}", "x^", "x^1^2", "\\unheardof", "\\constructor", "a & b", "\\left( x",
        "\\right)", "\\begin{matrix} 1", "\\begin{matrix} 1 \\end{pmatrix}", "\\begin{toString}\\end{toString}", "\\",
        "$", "#", "\u202ex", "\x00", "\\text{\\input{x}}", "\\href{javascript:alert(1)}{x}", "{" * 50 + "}" * 50,
        "\\sqrt" * 50 + "1", "x" * 5000,
    ]  # fmt: skip
    found = page.driver.execute_async_script(source, [*expected, *stays])
    assert dict(zip([*expected, *stays], found, strict=True)) == {**expected, **dict.fromkeys(stays)}


def test_dollars_are_money_unless_they_enclose_a_formula(page: Page) -> None:
    cases = {
        "costs $5 and $6": [],
        "from $5-$10, or US$7": [],
        "a $ sign, and a$ b$": [],
        "\\$x$ is $y$": ["y"],
        "$x$5 and $y$.": ["y"],
        "it costs $5, so $x = 5$": ["x = 5"],
        "$34800/240=$<<34800/240=145>>145 for $x^+$": ["x^+"],
        "$5 in my left pocket, and US$": [],
        "$a\n\nb$ is no line": [],
        "$$a\n\nb$$": ["a\n\nb"],
        "```\n$x$\n``` and `$y$` are code, $z$ is not": ["z"],
        "\\\\(x\\) \\(y\\)": ["y"],
        "$\\text{if $x$ is} y$": ["\\text{if $x$ is} y"],
        "so \\boxed{\\{1\\}} and \\boxed{": ["\\boxed{\\{1\\}}"],
    }
    found = page.driver.execute_async_script(
        "const [texts, done] = arguments;"
        "import('/page/formulas.js').then(({formulasIn}) => done("
        "texts.map(text => formulasIn(text).map(own => own.source))))",
        list(cases),
    )
    assert dict(zip(cases, found, strict=True)) == cases


def test_hostile_formulas_stay_inert_and_hang_nothing(page: Page) -> None:
    page.open("#/run/3/answer/train/0/0/0?formulas=1")
    texts = [
        "$<img src=x onerror=document.title='hacked'>$", "$\\text{<script>document.title='hacked'</script>}$",
        f"${'{' * 10_000}{'}' * 10_000}$", f"$${'x^{' * 30_000}$$", f"${'x+' * 50_000}x$", "$a " * 30_000,
        "$x$" * 30_000,
        "\\(" * 50_000, "\\[" * 50_000, "$$a" * 30_000, "\\boxed{" * 14_000, "\\begin{align}" * 7_000, "`" * 99_999,
        "```a" * 25_000 + "`", "$\\text{" * 14_000, "\\boxed{a" * 5 + "b" * 90_000, "\\" * 99_999, "$" * 99_999,
    ]  # fmt: skip
    for text in texts:
        seconds, strange = page.driver.execute_async_script(
            """
            const [text, done] = arguments;
            const begin = performance.now();
            import('/page/formulas.js').then(({withFormulas}) => {
              const box = document.querySelector('.reading');
              box.replaceChildren(...withFormulas(text));
              box.getBoundingClientRect();
              const strange = box.querySelectorAll(':not(.formula, math, math *), script, img').length;
              done([(performance.now() - begin) / 1000, strange]);
            })""",
            text,
        )
        assert strange == 0 and seconds < 5, (text[:40], seconds)
        assert page.script("return document.querySelectorAll('.reading math').length") <= 2010
    assert "hacked" not in page.driver.title


def test_a_difference_holds_both_texts(page: Page) -> None:
    words = ["a", "b", "c", "12", "3.4", "é", "世界", "\n", ",", "of", "the"]
    random = np.random.default_rng(0)
    pairs = [[" ".join(random.choice(words, size)) for size in random.integers(0, 12, 2)] for _ in range(200)]
    pieces = page.driver.execute_async_script(
        "const [pairs, done] = arguments;"
        "import('/page/diff.js').then(({difference}) => done(pairs.map(([one, other]) => difference(one, other))))",
        pairs,
    )
    for (before, after), found in zip(pairs, pieces, strict=True):
        assert "".join(text for kind, text in found if kind != "new") == before
        assert "".join(text for kind, text in found if kind != "gone") == after
        assert all(one[0] != other[0] for one, other in pairwise(found))
    one, long = page.driver.execute_async_script(
        "const [done] = arguments; import('/page/diff.js').then(({difference}) => done(["
        "difference('a b c d', 'a c d e'), difference('a '.repeat(5000), 'b '.repeat(5000))]))"
    )
    assert one == [["same", "a "], ["gone", "b "], ["same", "c d"], ["new", " e"]] and long is None


@pytest.mark.parametrize("width", [360, 1400])
def test_every_view_fits_its_width(page: Page, width: int) -> None:
    page.size(width, 800)
    views = ["", "runs", "run/0/about", "run/0/step/0/5", "run/0/step/0/5?list=table", "run/5/step/0/0",
             "run/1/group/0/1/0", "run/1/answer/train/0/1/0?token=0.60", "run/0/held-out",
             "run/3/answer/train/0/0/0?formulas=1",
             "run/0/prompt/validation/sums%2Fvalidation%2F0", "run/0/search", "run/0/notes", "run/0/ask/why",
             "run/0/ask/what-if", "pair/0/1"]  # fmt: skip
    for view in views:
        page.open(f"#/{view}")
        wide = page.script("return document.documentElement.scrollWidth")
        assert wide <= width, view


def test_a_session_is_drawn_as_a_tree(browser: Any, tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="needs lmgym[view]")
    with served([session_run(tmp_path / "session")]) as address:
        page = opened(browser, address)
        page.open("#/run/0/answer/train/0/0/0")
        page.see("6 turns, 3 forks")
        page.see("asks again what turn 3 has answered")
        count = "return document.querySelectorAll(arguments[0]).length"
        assert [page.script(count, f".session .{kind}") for kind in ("dot", "lanes", "east")] == [6, 6, 3]
        # Each token is shown once: what a row repeats of another row is left out.
        places = page.script(
            "return [...document.querySelectorAll('.token')].map(t => t.dataset.row + '.' + t.dataset.place)"
        )
        assert len(places) == len(set(places))
        assert page.script("return document.querySelectorAll('.tokens')[6].innerText").startswith("<|im_start|>user")
        page.click(".session li:nth-child(5) button")
        page.until(lambda: page.script("return document.activeElement.parentElement.dataset.turn") == "4")
        page.size(360, 800)
        assert page.script("return document.documentElement.scrollWidth") <= 360
        assert page.problems() == []


def test_runs_are_a_list_and_a_key_opens_one(page: Page) -> None:
    page.open("#/runs")
    page.see("6 runs")
    rows = page.script("return [...document.querySelectorAll('.runs-table tbody tr')].map(row => row.innerText)")
    assert len(rows) == 6 and all("unfinished" in row for row in rows) and "2,000" in rows[2]
    page.press("j", "l")
    page.at("#/run/1/about")
    page.see("newest answers")
    page.see("<script>document.title='hacked'</script>")


def test_answers_as_a_table_with_columns_to_choose(page: Page) -> None:
    page.open("#/run/2/step/0/1500?list=table")
    page.until(lambda: page.script("return document.querySelectorAll('.answers-table .row').length") > 5)
    page.click(".columns-choice summary")
    names = "return [...document.querySelectorAll('.answers-table .head')].map(head => head.innerText)"
    before = page.script(names)
    page.click(".columns-choice label:last-child input")
    page.until(lambda: len(page.script(names)) == len(before) + 1)
    assert "columns=" in page.address
    page.click(".head[title='sort by length']")
    page.click(".head[title='sort by length']")
    cells = "return [...document.querySelector('.answers-table .row').children].map(cell => cell.innerText)"
    place = before.index("length")
    page.until(lambda: page.script(cells)[place] == "49")
    assert "sort=-length" in page.address
    page.press("l")  # its tokens were not kept, so its group opens
    page.until(lambda: page.address.startswith("#/run/2/group/0/1500/"))


def test_a_group_without_tokens_shows_its_texts_and_leads_nowhere(page: Page) -> None:
    page.open("#/run/5/step/0/0")
    page.until(lambda: page.script("return document.querySelectorAll('.row').length") == 2)
    assert page.script("return document.querySelectorAll('.row.no-text').length") == 1
    page.see("the last question")
    assert "a long instruction" not in page.text
    page.open("#/run/5/group/0/0/0")
    page.see("42 it is")
    assert page.script("return [...document.querySelectorAll('.card a')].length") == 0
    page.press("l")
    assert page.address == "#/run/5/group/0/0/0"
    # Only the main reward makes a score green.
    assert page.script("return [...document.querySelectorAll('.score.best')].map(own => own.innerText)") == []


def test_before_and_after_stand_side_by_side(page: Page) -> None:
    page.open("#/run/0/prompt/validation/sums%2Fvalidation%2F0?with=sides")
    boxes = page.script(
        "return [...document.querySelectorAll('.sides > .moment')].map(own => own.getBoundingClientRect().top)"
    )
    assert len(boxes) == 2 and boxes[0] == boxes[1]


def test_searches_and_notes_through_the_page(page: Page, folders: dict[str, Path]) -> None:
    page.open("#/run/0/search")
    page.write("form input", r"is \d+\.")
    page.write("form input:nth-of-type(2)", "score=1")
    page.click("form button")
    page.see("steps searched")
    page.until(lambda: page.script("return document.querySelector('form button[type=button]').hidden"))
    page.until(lambda: page.script("return document.querySelectorAll('.row mark').length") > 1)
    page.click(".row")
    page.until(lambda: page.address.startswith("#/run/0/answer/train/0/"))
    page.write("textarea", "a good one")
    page.write(".notes input", "good, short")
    page.click(".notes button")
    page.see("saved in notes.jsonl")
    note = json.loads((folders["live"] / "notes.jsonl").read_text())
    assert (note["note"], note["tags"]) == ("a good one", ["good", "short"])
    page.open("#/run/0/notes")
    page.see("a good one")


def test_a_changed_answer_leads_to_the_groups_that_moved_it(browser: Any, tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="needs lmgym[view]")
    folder = runs.run(
        tmp_path / "run", algorithm={"name": "grpo", "group_size": 4}, steps=2, checkpoint={"every": 1, "keep": 4},
        logs={"traces": "all"}, evaluation={"every": 1, "examples": 2}, optimizer={"learning_rate": 1e-3, "warmup": 0},
    )  # fmt: skip
    with served([folder]) as address:
        page = opened(browser, address)
        page.open("#/run/0/held-out")
        page.click(".row")
        page.click(".moment a[href*='/ask/why']")
        page.click("form button[type=submit]")
        page.until(lambda: "answered in" in page.text)
        page.see("by first order")
        assert page.script("return document.querySelectorAll('figure circle').length") == 3
        example = page.script("return document.querySelector('.grid tr.opens td:nth-child(3)').innerText")
        page.click(".grid tr.opens")
        page.until(lambda: page.address.startswith("#/run/0/group/0/"))
        page.see(example)
        page.open("#/run/0/step/0/1")
        page.click("h1 a[href*='/ask/what-if']")
        page.write("form input", "optimizer.learning_rate=1e-9")
        page.click("form button[type=submit]")
        page.until(lambda: "the gradient is the same, bit for bit" in page.text)
        page.open("#/")
        page.click("a[href*='/ask/bisect']")
        page.click("form button[type=submit]")
        page.see("a change needs 10 or more")
        assert page.problems() == []


def test_a_file_opens_from_disk_and_asks_for_nothing(page: Page, folders: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "runs.html"
    write_file(open_runs([folders[name] for name in ("hostile", "live", "formulas")]), path, megabytes=5)
    page.driver.get("about:blank")  # the server's page asks every two seconds for what is new
    page.driver.get_log("performance")
    page.base = path.as_uri()
    page.open("#/")
    page.see("send it only to people who may see them")
    page.open("#/run/0/group/0/1/0")
    page.see("<script>document.title='hacked'</script>")
    page.open("#/run/1/answer/train/0/0/0?token=0.60")
    page.see("-min(r A, clip(r, 1 - low, 1 + high) A)")
    page.open("#/run/2/answer/train/0/0/0?formulas=1")
    assert page.script("return document.querySelectorAll('.reading mfrac').length") > 0
    page.open("#/run/1/search")
    page.see("A file cannot search")
    page.open("#/run/1/ask/why")
    page.see("A file cannot compute")
    events = [json.loads(entry["message"])["message"] for entry in page.driver.get_log("performance")]
    asked = {event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"}
    assert {url.split("#")[0] for url in asked} <= {path.as_uri(), "data:,"}
