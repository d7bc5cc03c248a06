"""The page in a real browser: from a curve to a token, by mouse and by keyboard, narrow and wide, live, as a file."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmgym.viewer.guard import Guard
from lmgym.viewer.runs import open_runs
from lmgym.viewer.server import application, bound
from lmgym.viewer.single_file import write_file
from tests.viewer.sample_runs import HOSTILE, add_step, byte_tokenizer, many_steps, sample_run

pytestmark = [pytest.mark.slow, pytest.mark.processes]

SECONDS = 30  # that a busy machine may take for a view


class Page:
    """A browser with one page open; every method waits until what it asks for is there."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.base = ""

    def open(self, address: str) -> None:
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
        from selenium.webdriver.common.by import By

        self.driver.find_element(By.CSS_SELECTOR, selector).click()

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    def write(self, selector: str, text: str) -> None:
        from selenium.webdriver.common.by import By

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
    }


@pytest.fixture(scope="session")
def server(folders: dict[str, Path]) -> Iterator[str]:
    uvicorn = pytest.importorskip("uvicorn", reason="needs lmgym[view]")
    listening = bound(0)
    guard = Guard(application(open_runs(list(folders.values()))), listening.getsockname()[1])
    serving = uvicorn.Server(uvicorn.Config(guard, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=serving.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield guard.address
    serving.should_exit = True
    thread.join(10)


@pytest.fixture
def page(browser: Any, server: str) -> Iterator[Page]:
    opened = Page(browser)
    opened.size(1280, 900)
    browser.get(server)
    opened.base = server.split("?")[0]
    opened.problems()
    yield opened
    assert opened.problems() == []


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
    page.see("-min(r · A, clip(r, 1 - low, 1 + high) · A)")
    page.see("= -min(1 · 0.4, clip(1, 1 - 0.2, 1 + 0.28) · 0.4)")
    page.see("= 1 - 0.6")
    assert "token=0." in page.address
    page.driver.back()
    page.at("#/run/0/group/0/5/0")
    page.driver.back()
    page.at("#/run/0/step/0/5")


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
    assert page.script("return document.querySelectorAll('.row').length") == 15
    page.click(".chip")
    page.see("3 answers of 15")
    page.see("truncated 20 %")
    page.write("input[type=search]", "score>=1 length<30")
    page.see("4 answers of 15")
    page.write("input[type=search]", "scroe>1")
    page.see("there is no “scroe”")


def test_a_million_answers_are_one_step_at_a_time(page: Page) -> None:
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
    page.see("updated")
    place = "return document.querySelector('.marks').dataset.step"
    page.until(
        lambda: page.press("j") or page.script(place) == f"0/{newest + 1}"
    )  # j goes to the last step that is there
    page.press("l")
    page.at(f"#/run/0/step/0/{newest + 1}")
    page.see("15 answers in 3 groups")


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
    views = ["", "run/0/step/0/5", "run/1/group/0/1/0", "run/1/answer/train/0/1/0?token=0.60", "run/0/held-out",
             "run/0/prompt/validation/sums%2Fvalidation%2F0", "run/0/search", "run/0/notes", "pair/0/1"]  # fmt: skip
    for view in views:
        page.open(f"#/{view}")
        wide = page.script("return document.documentElement.scrollWidth")
        assert wide <= width, view


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


def test_a_file_opens_from_disk_and_asks_for_nothing(page: Page, folders: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "runs.html"
    write_file(open_runs([folders["hostile"], folders["live"]]), path, megabytes=5)
    page.driver.get("about:blank")  # the server's page asks every two seconds for what is new
    page.driver.get_log("performance")
    page.base = path.as_uri()
    page.open("#/")
    page.see("send it only to people who may see them")
    page.open("#/run/0/group/0/1/0")
    page.see("<script>document.title='hacked'</script>")
    page.open("#/run/1/answer/train/0/0/0?token=0.60")
    page.see("-min(r · A, clip(r, 1 - low, 1 + high) · A)")
    page.open("#/run/1/search")
    page.see("A file cannot search")
    events = [json.loads(entry["message"])["message"] for entry in page.driver.get_log("performance")]
    asked = {event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"}
    assert {url.split("#")[0] for url in asked} <= {path.as_uri(), "data:,"}
