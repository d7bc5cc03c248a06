"""Rewards for problems with a final answer: finding it in a text, reading it exactly, comparing it."""

import re
from collections import deque
from collections.abc import Iterator
from fractions import Fraction

from lmgym.core.registry import register
from lmgym.rewards.text.references import reference_check, references_of
from lmgym.text.latex import boxes
from lmgym.types import Example

LONGEST = 1_000  # characters of an answer, and digits of a number, that are read
ANNOUNCEMENTS = 100  # how many are looked at, from the last one back, until one has something behind it

# A sign, a currency, digits (thousands in groups or not), then decimals or a power of ten or a fraction. Nothing here
# can backtrack far, so a search is linear in the text. Digits are ASCII; \u2212 is the typographic minus.
SIGN = r"(?:(?<![0-9A-Za-z)\]}.])[-\u2212+])?"
CURRENCY = r"(?:\\?\$|[\u20ac\u00a3\u00a5])"
DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]++)"
NUMBER = re.compile(
    rf"(?P<sign>{SIGN}(?:{CURRENCY}[-\u2212]?)?)"
    rf"(?:(?:(?P<whole>{DIGITS}) )?+(?P<top>{DIGITS})/(?P<bottom>[0-9]++)(?![0-9/])"
    rf"|(?P<decimal>{DIGITS}(?:\.[0-9]++)?|(?<![.0-9])\.[0-9]++)(?:[eE](?P<power>[-+]?[0-9]++))?+)"
)
ANNOUNCEMENT = re.compile(
    r"(?P<hash>####++)"
    r"|\b[Aa](?:nswer|NSWER)[*_]{0,2}\s{0,3}(?:(?:is|IS)\b(?!\s{1,3}(?:in)?(?:correct|valid)\b)|:|=)"
    r"|^[ \t*_]{0,8}A[*_]{0,2}:",
    re.MULTILINE,
)
SPECIAL_TOKEN = re.compile(r"<\|[^<>|]{1,60}\|>|</?s>")
FRACTION = re.compile(
    r"(?P<digit>[0-9])?\s?\\[dt]?frac\s?\{\s?(?P<sign>-?)(?P<top>[0-9]+)\s?\}\s?\{\s?(?P<bottom>[0-9]+)\s?\}"
)
TEXT_COMMAND = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf)\s?\{([^{}]*)\}")
LEADING = " \t\r\n*_`\"':=~\u2248$#"
OPERATORS = r"+\-*/\u00d7\u00f7\u2212"
SUM = rf"[0-9.,$ ()]{{1,40}}[{OPERATORS}][0-9.,$ (){OPERATORS}]{{1,160}}"
EQUATION = re.compile(rf"(?:[A-Za-z]\s?|{SUM})=")  # "x =", "3 + 4 ="
PROSE = re.compile(r"(?:[A-Za-z]{2,}|[aAI])[ ,:]")  # "that Tom has 18", not "x + 1"
WORKED = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}\s|\n")  # a reference that is more than a bare answer
# A word written onto a number is a unit if it is long or one of these; "3xy" is a product.
ATTACHED = r"(?:[A-Za-z]{3,}+|(?:cm|mm|km|kg|mg|m[lL]|lb|oz|ft|in|hr|am|pm|st|nd|rd|th)\b)"
# Behind a number, what makes it part of something else: "3x", "2^5", "3\sqrt{2}", "2:30".
ALGEBRA = re.compile(rf"(?!{ATTACHED}|[mgshlLCF]\b)[A-Za-z]|\s?\\(?![%$)\]])|\s?[\^_]|\(|:[0-9]")
# Behind a number, what does not change it: "%", " dollars", " m", "cm^2", "km/h", a full stop.
UNIT = re.compile(
    rf"(?:\s{{0,4}}+(?:\\?[%$]|\^?\\circ|\u00b0|{ATTACHED}|\^\{{?[23]\}}?)|\s{{1,4}}+[A-Za-z]{{2,}}+|\s[mgshlL]\b"
    rf"|[./](?=[a-zA-Z])[A-Za-z]++)*+\s{{0,4}}+[.!]?"
)


def extract_answer(text: str, strict: bool = False) -> str | None:
    r"""The final answer that a text gives, or None.

    It is what follows the last announcement: "#### 18", "The answer is 18", "Answer: 18", "A: 18" at the
    start of a line, or \boxed{18} with its braces balanced. Without one it is the last number in the text;
    with `strict`, None. An announced number loses currency, thousands separators and units; an announced text
    is the rest of its line. Special tokens that a tokenizer left in the text are ignored. Never raises, and
    takes time linear in the text.

    Example:
        >>> extract_answer("The answer is: $1,234."), extract_answer("So 3 and 4."), extract_answer("4", strict=True)
        ('1234', '4', None)
    """
    text = _plain(text)
    for content, boxed in _announced(text):
        answer = _read(content, boxed)
        if answer:
            return answer
    if strict:
        return None
    numbers = deque(NUMBER.finditer(text), maxlen=1)
    return _written(numbers[0]) if numbers else None


def normalise_number(text: str) -> Fraction | None:
    """The exact value of a text that is one number with or without currency and unit, or None.

    Read are "1,234.50", "-$5", "18 dollars", "18%" (as 18), ".5", "1/2", "1 1/2" and "1e3"; not read are
    numbers of more than 1,000 digits and denominators of 0.

    Example:
        >>> normalise_number("18.0") == 18, normalise_number("0.5") == normalise_number("1/2"), normalise_number("x")
        (True, True, None)
    """
    text = _plain(text).strip(LEADING)
    match = NUMBER.match(text)
    if match is None or match.end() > LONGEST or not UNIT.fullmatch(text, match.end()):
        return None
    power = match["power"] or "0"
    if len(power) > 4 or (match["bottom"] and not int(match["bottom"])):
        return None
    if match["top"]:
        value = Fraction(_integer(match["top"]), int(match["bottom"])) + _integer(match["whole"] or "0")
    else:
        whole, _, decimals = match["decimal"].partition(".")
        value = Fraction(_integer(whole + decimals), 10 ** len(decimals)) * Fraction(10) ** int(power)
    return -value if _negative(match) else value


def same_answer(one: str, other: str) -> bool:
    """Equal as exact numbers if both are numbers, else equal as texts but for case, white space and decoration.

    Example:
        >>> same_answer("18.0", "$18"), same_answer("Blue whale.", "blue whale"), same_answer("18", "x")
        (True, True, False)
    """
    first, second = normalise_number(one), normalise_number(other)
    if first is None and second is None:
        return _normalise_text(one) == _normalise_text(other)
    return first == second


def reference_answer(reference: str) -> str:
    """The answer of a reference: announced, or the last number of a worked solution, or all of it.

    Example:
        >>> reference_answer("9 + 9 = 18"), reference_answer("Paris")
        ('18', 'Paris')
    """
    bare = "\\" in reference or not WORKED.search(reference.strip())
    if bare and extract_answer(reference, strict=True) is None:
        return _read(_plain(reference), boxed=True) or reference
    return extract_answer(reference) or reference


@register("reward", "final_answer")
def final_answer(texts: list[str], examples: list[Example], *, strict: bool = False) -> list[float]:
    """1 if the final answer of the text is that of one of the references, else 0.

    Both are found by `extract_answer`, so a reference may be a worked solution or the bare answer; `strict`
    asks for an announced answer in the text, never in the reference. Numbers are compared exactly ("18.0" is
    "18", "0.5" is "1/2"). A reference without an announcement that is no sentence ("Paris", "x+1") is
    compared as a whole.

    Raises LmgymError for an example without references.

    Example:
        >>> final_answer(["3 * 6 = 18, so the answer is $18."], [Example("a/0", "?", references=("#### 18",))])
        [1.0]
    """
    values = []
    for text, references in zip(texts, references_of("final_answer", examples), strict=True):
        answers = [extract_answer(text, strict=True)]
        if answers == [None] and not strict:
            answers = [extract_answer(text), text]
        wanted = [reference_answer(reference) for reference in references]
        right = any(same_answer(answer, one) for answer in answers if answer is not None for one in wanted)
        values.append(float(right))
    return values


final_answer.check = reference_check("final_answer")  # type: ignore[attr-defined]


@register("reward", "answer_format")
def answer_format(texts: list[str], examples: list[Example]) -> list[float]:
    """1 if the text announces a final answer in one of the ways that `extract_answer` knows, right or wrong.

    Example:
        >>> answer_format(["#### 18", "18"], examples)
        [1.0, 0.0]
    """
    return [float(extract_answer(text, strict=True) is not None) for text in texts]


def _plain(text: str) -> str:
    """The text without special tokens and with LaTeX's ways of writing a number made plain."""
    text = SPECIAL_TOKEN.sub(" ", text).replace("{,}", ",")
    if "\\" not in text:
        return text
    text = text.replace("\\!", "").replace("\\,", "").replace("\\left", "").replace("\\right", "")

    def plain(match: re.Match[str]) -> str:
        before = match["digit"] + " " if match["digit"] else ""
        return f"{before}{match['sign']}{match['top']}/{match['bottom']}"

    return FRACTION.sub(plain, TEXT_COMMAND.sub(r" \1 ", text))


def _announced(text: str) -> Iterator[tuple[str, bool]]:
    """What follows each announcement, the last one first, and whether it stood in a box."""
    found = [*boxes(text), *((match.end(), None) for match in ANNOUNCEMENT.finditer(text))]
    for start, end in sorted(found, key=lambda span: span[0], reverse=True)[:ANNOUNCEMENTS]:
        if end is not None:
            yield text[start:end][:LONGEST], True
        else:
            yield text[start : start + LONGEST].lstrip(LEADING).split("\n")[0], False


def _read(content: str, boxed: bool) -> str | None:
    """The answer in what follows an announcement."""
    content = re.sub(r"^\\[(\[]\s*|\s*\\[)\]].*$", "", content.strip(LEADING)).strip(LEADING)
    content = re.sub(r"^\(([^(),]*)\)[.!]?$", r"\1", content)  # "(18)", "(B)"
    while equation := EQUATION.match(content):
        content = content[equation.end() :].lstrip(LEADING)
    match = NUMBER.match(content)
    if match is None and not boxed and PROSE.match(content):
        match = NUMBER.search(content)
    if match is None:
        return _tidy(content) or None
    algebra = not UNIT.fullmatch(content, match.end()) if boxed else ALGEBRA.match(content, match.end())
    return _tidy(content) if algebra else _written(match)


def _tidy(text: str) -> str:
    return " ".join(text.split()).rstrip(LEADING + ".!")


def _written(match: re.Match[str]) -> str:
    """The number as it stands, without currency and thousands separators."""
    digits = re.sub(r"[^0-9./eE+\- ]", "", match[0]).lstrip("+- ")
    return ("-" if _negative(match) else "") + digits


def _negative(match: re.Match[str]) -> bool:
    return "-" in match["sign"] or "\u2212" in match["sign"]


def _integer(digits: str) -> int:
    return int(digits.replace(",", ""))


def _normalise_text(text: str) -> str:
    text = re.sub(r"\s+", "", _plain(text)).casefold().strip(LEADING + ".!")
    return re.sub(r"^\((\w)\)$", r"\1", text)
