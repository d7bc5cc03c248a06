"""The picture of docs/benchmarks.md, from its first table: how many times as fast lmgym is.

python -m benchmarks.glance
"""

from benchmarks.training import ROOT

PAGE, PICTURE = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "pictures" / "benchmarks.png"
COLOURS = {
    "W1": "#0072b2",
    "W2": "#56b4e9",
    "W3": "#009e73",
    "W6": "#d55e00",
    "W7": "#e69f00",
    "W8": "#cc79a7",
    "W9": "#999999",
}

Bars = list[tuple[str, dict[str, float]]]  # what is compared, and the ratio by workload


def bars_of(page: str) -> Bars:
    """The rows of the first table of a Markdown page.

    Example: bars_of("| beside | what | W1 | measured |\\n|---|---|---|---|\\n| TRL | a step | 3.9 | [here](x) |")
    -> [("TRL: a step", {"W1": 3.9})]
    """
    lines = [line for line in page.partition("\n| beside |")[2].partition("\n\n")[0].splitlines()]
    head, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line]
    names = head[1:-1]
    found = []
    for beside, what, *cells in rows:
        ratios = {name: float(cell) for name, cell in zip(names, cells[:-1], strict=True) if cell}
        found.append((f"{beside}: {what}", ratios))
    return found


def main() -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    bars = bars_of(PAGE.read_text(encoding="utf-8"))
    figure, axes = pyplot.subplots(figsize=(8, 4.4), layout="constrained")
    for place, (_, ratios) in enumerate(bars):
        for number, (workload, ratio) in enumerate(ratios.items()):
            height = min(0.24, 0.8 / len(ratios))
            middle = place + (number - (len(ratios) - 1) / 2) * (height + 0.02)
            axes.barh(middle, ratio, height=height, color=COLOURS[workload])
            axes.text(ratio + 0.1, middle, f"{ratio:g}", va="center", fontsize=8)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(bars)), [name for name, _ in bars])
    axes.invert_yaxis()
    axes.set(xlabel="times as fast as the other library (1: equal)", xlim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend([Patch(color=colour) for colour in COLOURS.values()], [*COLOURS], frameon=False, loc="lower right")
    figure.savefig(PICTURE, dpi=120)


if __name__ == "__main__":
    main()
