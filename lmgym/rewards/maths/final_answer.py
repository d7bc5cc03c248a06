"""`final_answer` and `answer_format`: find the final answer in a text, read it as an exact number, compare it."""

import re
from collections import deque
from collections.abc import Iterator, Sequence
from fractions import Fraction

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.rewards.base import linear_time
from lmgym.rewards.text.references import answers_of, reference_check
from lmgym.text.latex import boxes
from lmgym.types import Example

LONGEST = 1_000  # characters of an answer, and digits of a number; longer ones are not read
ANNOUNCEMENTS = 100  # how many announcements are tried, from the last one back, until one is followed by an answer

# A number: sign, currency, digits (with or without thousands separators), then decimals, a power of ten or a fraction.
# No pattern here can backtrack far, so a search is linear in the text. Digits are ASCII; \u2212 is the minus sign.
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
TIMES = r"x(?=\s?\$?[0-9(])"  # "2 x 3", not the letter of "2x"
SUM = rf"[0-9.,$ ()]{{1,40}}(?:[{OPERATORS}]|{TIMES})(?:[0-9.,$ (){OPERATORS}]|{TIMES}){{1,160}}"
EQUATION = re.compile(rf"(?:[A-Za-z]\s?|{SUM})=")  # "x =", "3 + 4 ="
PROSE = re.compile(r"(?:[A-Za-z]{2,}|[aAI])[ ,:]")  # "that Tom has 18", not "x + 1"
SENTENCE_END = re.compile(r"[.!?]\s+(?=[A-Z])")
ITEM = r"(?:[A-Za-z]\s?=\s?)?[-\u2212]?\$?[0-9]++(?:,[0-9]{3}(?![0-9]))*+(?:[./][0-9]++)?+%?"
LIST = re.compile(rf"{ITEM}(?:(?:\s*+,\s*+(?:(?:and|or)\s++)?+|\s++(?:and|or)\s++){ITEM})++[.!]?\s*")  # "2, 3 and 5"
WORKED = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}\s|\n")  # words: a worked solution, or an answer such as "4 out of 5"
# Signs of a worked solution: several lines, a sentence's beginning or end, an equals sign or a verb.
VERB = r"\b(?:is|are|was|were|has|have|gets?|costs?|needs?|equals?|gives?|yields?|makes?)\b"
SOLUTION = re.compile(rf"\n|^[A-Z][A-Za-z]*\s|[.!?]$|=|{VERB}")
FUNCTION = re.compile(r"\b(?:sin|cos|tan|log|ln|exp|sqrt|mod)\b")
# A word directly after a number is a unit if it is long or one of these; "3xy" is a product.
ATTACHED = r"(?:[A-Za-z]{3,}+|(?:cm|mm|km|kg|mg|m[lL]|lb|oz|ft|in|hr|am|pm|st|nd|rd|th)\b)"
# Text after a number that makes it part of a longer expression: "3x", "2^5", "3\sqrt{2}", "2:30", "2\u03c0", "10 - 4",
# "3 + x", "1,5". An operator before a word is none ("18 - that is all", "10 - a lot"), nor is the stroke of "5/h".
TERM = r"(?:\.?[0-9]|[\u221a\u03c0]|sqrt|\((?![A-Za-z]{2}))"
ALGEBRA = re.compile(
    rf"(?!{ATTACHED}|[mgshlLCF]\b)[A-Za-z]|\s?\\(?![%$)\]])|\.\\(?:overline|bar|dot)|\s?[\^_]|\(|:[0-9]|,[0-9]"
    rf"|\s?[\u00b2\u00b3\u00bc-\u00be\u03c0\u221a\u00b1]|\s?(?:pi\b|sqrt)|(?!\*\s)\s?(?:[{OPERATORS}]|{TIMES})\s?{TERM}"
    rf"|(?!\*\s)\s?[{OPERATORS}]\s?(?![aAI]\s)(?<!/)(?<!/\s)(?:[a-z]\b|[A-Z]\b(?![.)]|\s[a-z]))|\s?/\s?(?![mgshlLCF]\b)[A-Za-z]\b"
)
# Text after a number that does not change its value: "%", " dollars", " m", "cm^2", "km/h", a full stop.
UNIT = re.compile(
    rf"(?:\s{{0,4}}+(?:\\?[%$]|\^?\\circ|\u00b0|{ATTACHED})|\s{{1,4}}+(?!pi\b)[A-Za-z]{{2,}}+|\s[mgshlL]\b"
    rf"|(?:(?<=[A-Za-z])|(?<=[A-Za-z]\s))\^\{{?[23]\}}?|[./](?=[a-zA-Z])[A-Za-z]++)*+\s{{0,4}}+[.!]?"
)
# A word such as "thousand" behind a number multiplies it; POWERS: its power of ten.
MAGNITUDE = re.compile(r"[ \u00a0]{0,4}(hundred|thousand|million|billion|trillion)s?\b", re.IGNORECASE)
POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}


def extract_answer(text: str, strict: bool = False) -> str | None:
    r"""The final answer in a text, or None.

    The text after the last announcement is the answer. Announcements are "#### 18", "The answer is 18", "Answer: 18",
    "A: 18" at the start of a line, and \boxed{18} with balanced braces. Without any, the answer is the last number in
    the text; with `strict`, None. A number is returned without currency, thousands separators and unit; any other
    answer is the rest of the line. Special tokens that a tokenizer left in the text are ignored. Never raises; takes
    time linear in the text.

    Example: extract_answer("The answer is: $1,234."), extract_answer("So 3 and 4."), extract_answer("4", strict=True)
    -> ('1234', '4', None)"""
    text = _plain(text)
    # 1. The last announcement with an answer after it.
    for content, boxed in _announced(text):
        answer = _read(content, boxed)
        if answer:
            return answer
    if strict:
        return None
    # 2. Without one, the last number (the deque keeps only the last match).
    numbers = deque(NUMBER.finditer(text), maxlen=1)
    return _written(numbers[0]) if numbers else None


def normalise_number(text: str) -> Fraction | None:
    """The exact value of a text that is a single number, with or without currency and unit; else None.

    It reads "1,234.50", "-$5", "18 dollars", "18%" (as 18), ".5", "1/2", "1 1/2", "1e3" and "18 thousand". It does not
    read numbers of more than 1,000 digits, fractions with denominator 0, and "1 7/6", which is no mixed number.

    Example: normalise_number("18.0") == 18, normalise_number("0.5") == normalise_number("1/2"), normalise_number("x")
    -> (True, True, None)"""
    text = _plain(text).strip(LEADING)
    # The whole text must be a number and its unit.
    match = NUMBER.match(text)
    if match is None or match.end() > LONGEST or not UNIT.fullmatch(text, match.end()):
        return None
    # A power of more than three digits would cost time and memory; a denominator of 0 has no value.
    power = match["power"] or "0"
    if len(power.lstrip("+-0")) > 3 or (match["bottom"] and not int(match["bottom"])):
        return None
    if match["top"]:
        value = Fraction(_integer(match["top"]), int(match["bottom"]))
        if match["whole"] and value >= 1:  # "11 7/6" is no mixed number
            return None
        value += _integer(match["whole"] or "0")
    else:
        whole, _, decimals = match["decimal"].partition(".")
        value = Fraction(_integer(whole + decimals), 10 ** len(decimals)) * Fraction(10) ** (int(power) + _tens(match))
    return -value if _negative(match) else value


def same_answer(one: str, other: str) -> bool:
    """True if both are numbers of equal value, or neither is a number and the texts are equal, ignoring case, white
    space and decoration (quotes, asterisks, a full stop).

    Example: same_answer("18.0", "$18"), same_answer("Blue whale.", "blue whale"), same_answer("18", "x")
    -> (True, True, False)"""
    first, second = normalise_number(one), normalise_number(other)
    if first is None and second is None:
        return _normalise_text(one) == _normalise_text(other)
    return first == second


def reference_answer(reference: str) -> str:
    """The answer in a reference: the announced one, else the last number of a worked solution, else the whole text.

    Example: reference_answer("9 + 9 = 18"), reference_answer("Paris") -> ('18', 'Paris')"""
    # LaTeX, or a text that is no worked solution, is an answer as a whole: "x+1" must not become "1".
    bare = "\\" in reference or not is_worked(reference)
    if bare and extract_answer(reference, strict=True) is None:
        return _read(_plain(reference), boxed=True) or reference
    return extract_answer(reference) or reference


def is_worked(reference: str) -> bool:
    """True for a sentence or a longer solution, which ends with its answer; False for a bare answer.

    A phrase with one number ("he has 18") is one, but no phrase with several ("4 out of 5"), and no list.

    Example: is_worked("He has 18."), is_worked("4 out of 5"), is_worked("2 and 3") -> (True, False, False)"""
    reference = reference.strip()
    if not WORKED.search(reference) or LIST.fullmatch(reference):
        return False
    phrase = FUNCTION.search(reference) or len(NUMBER.findall(reference)) > 1
    return bool(SOLUTION.search(reference)) or not phrase


@register("reward", "final_answer")
@linear_time
def final_answer(texts: list[str], examples: list[Example], *, strict: bool = False) -> list[float]:
    """1 if the text's final answer equals that of one of the references, else 0.

    `extract_answer` finds both, so a reference may be a worked solution or the bare answer. With `strict` the text must
    announce its answer; the reference need not. Numbers are compared exactly ("18.0" equals "18", "0.5" equals "1/2").
    A reference that is neither announced nor a sentence ("Paris", "x+1", "4 out of 5") is compared as a whole.

    Raises LmgymError for an example without references, and for a reference without an answer ("", "####").

    Example: final_answer(["3 * 6 = 18, so the answer is $18."], [Example("a/0", "?", references=("#### 18",))])
    -> [1.0]"""
    values = []
    for text, right in zip(texts, _right_answers("final_answer", examples), strict=True):
        answers = [extract_answer(text, strict=True)]
        if answers == [None] and not strict:  # nothing announced: the last number or the whole text may be right
            answers = [extract_answer(text), text]
        announced = next(_announced(_plain(text)), None)  # one that repeats the right answer word for word is right
        answers += [_sentence(*announced)] if announced else []
        values.append(float(any(same_answer(one, other) for one in answers if one is not None for other in right)))
    return values


def vote_of(text: str) -> str | None:
    """What an answer votes for: its final answer, in one form for all that `same_answer` calls equal; None if it has
    none.

    Example: vote_of("The answer is $18.0."), vote_of("I think: 18"), vote_of("no idea") -> ('18', '18', None)"""
    answer = extract_answer(text)
    number = None if answer is None else normalise_number(answer)
    return answer if answer is None else _normalise_text(answer) if number is None else str(number)


def _right_answers(reward: str, examples: Sequence[Example]) -> list[list[str]]:
    """The answer in each reference of each example."""
    answers = [[reference_answer(reference) for reference in references] for references in answers_of(reward, examples)]
    for example, right in zip(examples, answers, strict=True):
        for reference, answer in zip(example.references, right, strict=True):
            if not _normalise_text(answer):
                raise LmgymError(
                    f"reward '{reward}': the reference {reference[:100]!r} of example '{example.id}' has no final "
                    "answer, so an empty answer would be right; mend it, or leave the example out"
                )
    return answers


final_answer.check = reference_check("final_answer", read=_right_answers)  # type: ignore[attr-defined]
final_answer.vote = vote_of  # type: ignore[attr-defined]  # for maj@k, see rollouts/evaluate.py


@register("reward", "answer_format")
@linear_time
def answer_format(texts: list[str], examples: list[Example]) -> list[float]:
    """1 if the text announces a final answer, right or wrong, in one of the forms that `extract_answer` knows.

    Example: answer_format(["#### 18", "18"], examples) -> [1.0, 0.0]"""
    return [float(extract_answer(text, strict=True) is not None) for text in texts]


def _plain(text: str) -> str:
    """The text without special tokens; numbers in LaTeX become plain ones ("\\frac{1}{2}" becomes "1/2")."""
    text = SPECIAL_TOKEN.sub(" ", text).replace("{,}", ",")
    if "\\" not in text:
        return text
    text = text.replace("\\!", "").replace("\\,", "").replace("\\left", "").replace("\\right", "")

    def plain(match: re.Match[str]) -> str:
        before = match["digit"] + " " if match["digit"] else ""
        return f"{before}{match['sign']}{match['top']}/{match['bottom']}"

    return FRACTION.sub(plain, TEXT_COMMAND.sub(r" \1 ", text))


def _announced(text: str) -> Iterator[tuple[str, bool]]:
    """The text of each announced answer, the last one first, and True if it was in a box."""
    spans = [*boxes(text), *((match.end(), None) for match in ANNOUNCEMENT.finditer(text))]
    for start, end in sorted(spans, key=lambda span: span[0], reverse=True)[:ANNOUNCEMENTS]:
        if end is not None:
            yield text[start:end][:LONGEST], True
        else:
            yield text[start : start + LONGEST].lstrip(LEADING).split("\n")[0], False


def _read(content: str, boxed: bool) -> str | None:
    """The answer in the text after an announcement, or in a box; None if it has none."""
    # Remove brackets and decoration around the answer, and left sides of equations: "x = 3 + 4 = 7" becomes "7".
    content = re.sub(r"^\\[(\[]\s*|\s*\\[)\]].*$", "", content.strip(LEADING)).strip(LEADING)
    content = re.sub(r"^\(([^(),]*)\)[.!]?$", r"\1", content)  # "(18)", "(B)"
    sentence = _sentence(content, boxed)
    # Several numbers ("2, 3 and 5"), unless they are one number in two forms ("3/4 or 0.75").
    if LIST.fullmatch(sentence) and len({normalise_number(one[0]) for one in NUMBER.finditer(sentence)}) > 1:
        return sentence
    while equation := EQUATION.match(content):
        content = content[equation.end() :].lstrip(LEADING)
    # The answer is the number that it begins with, or the first one in a sentence ("that Tom has 18").
    match = NUMBER.match(content)
    if match is None and not boxed and PROSE.match(content):
        match = NUMBER.search(content)
    if match is None:
        return _tidy(content) or None
    # A number that is part of an expression ("3x") is not the answer; then the whole text is.
    algebra = not UNIT.fullmatch(content, match.end()) if boxed else ALGEBRA.match(content, match.end())
    return _sentence(content, boxed) if algebra else _written(match)


def _sentence(content: str, boxed: bool) -> str:
    """The first sentence, or the whole content of a box, as `_tidy` writes it."""
    return _tidy(content if boxed else SENTENCE_END.split(content, maxsplit=1)[0])


def _tidy(text: str) -> str:
    """Single spaces, and no decoration at the end."""
    return " ".join(text.split()).rstrip(LEADING + ".!")


def _written(match: re.Match[str]) -> str:
    """The number as written, without currency and thousands separators; "18 thousand" as "18e3"."""
    digits = re.sub(r"[^0-9./eE+\- ]", "", match[0]).lstrip("+- ")
    digits += f"e{tens}" if (tens := _tens(match)) else ""
    return ("-" if _negative(match) else "") + digits


def _negative(match: re.Match[str]) -> bool:
    return "-" in match["sign"] or "\u2212" in match["sign"]


def _integer(digits: str) -> int:
    return int(digits.replace(",", ""))


def _normalise_text(text: str) -> str:
    text = re.sub(r"\s+", "", _plain(text)).casefold().strip(LEADING + ".!")
    return re.sub(r"^\((\w)\)$", r"\1", text)


def _tens(match: re.Match[str]) -> int:
    """The power of ten of the word behind a number, 3 for "18 thousand"; 0 if there is none."""
    word = MAGNITUDE.match(match.string, match.end()) if match["decimal"] and not match["power"] else None
    return 0 if word is None else POWERS[word[1].lower()]
