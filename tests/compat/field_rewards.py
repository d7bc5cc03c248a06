"""Rewards of the field's recipes in the form in which their users have them. No torch."""

import re


def accuracy(completions, solution, **kwargs):  # type: ignore[no-untyped-def]
    return [float(right in one[0]["content"]) for one, right in zip(completions, solution, strict=True)]


def think_format(completions, **kwargs):  # type: ignore[no-untyped-def]
    form = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL)
    return [1.0 if form.match(one[0]["content"]) else 0.0 for one in completions]


def correctness(prompts, completions, solution, **kwargs):  # type: ignore[no-untyped-def]
    said = [one[0]["content"].split("<answer>")[-1].split("</answer>")[0].strip() for one in completions]
    return [2.0 if a == right.split("####")[1].strip() else 0.0 for a, right in zip(said, solution, strict=True)]


def xml_count(completions, **kwargs):  # type: ignore[no-untyped-def]
    marks = ("<reasoning>\n", "\n</reasoning>\n", "\n<answer>\n", "\n</answer>")
    return [sum(0.125 for mark in marks if one[0]["content"].count(mark) == 1) for one in completions]


def equation(completions, target, nums, **kwargs):  # type: ignore[no-untyped-def]
    found = []
    for text, goal, given in zip(completions, target, nums, strict=True):
        match = re.search(r"<answer>(.*?)</answer>", text)
        used = [] if match is None else sorted(map(int, re.findall(r"\d+", match[1].split("=")[0])))
        found.append(float(used == sorted(given) and str(goal) in text))
    return found


def verl_score(data_source, solution_str, ground_truth, extra_info=None):  # type: ignore[no-untyped-def]
    match = re.search("#### (\\-?[0-9\\.\\,]+)", solution_str)
    return float(match is not None and match[1].replace(",", "") == ground_truth)


def reward_func(queries, prompts, labels):  # type: ignore[no-untyped-def]
    return [float(right in query) for query, right in zip(queries, labels, strict=True)]
