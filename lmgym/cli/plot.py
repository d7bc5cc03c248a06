"""`lmgym plot`: one metric of several runs, for a paper or a talk."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Runs, the metric, and the file."""
    runs = "a run, or a folder of several runs of a recipe; those that differ in the seed alone are one line"
    parser.add_argument("runs", metavar="RUN", nargs="+", help=runs)
    metric = "a key of metrics.jsonl (docs/metrics.md); evaluation/NAME for a held-out one; default: reward"
    parser.add_argument("--metric", default="reward", help=metric)
    parser.add_argument("--out", metavar="FILE", default="plot.png", help="a .png or .svg file; default: plot.png")
    smooth = "running mean of so many steps of a train metric (1: none); default: a fifteenth of the run"
    parser.add_argument("--smooth", metavar="STEPS", type=_positive, help=smooth)


def run(given: argparse.Namespace) -> None:
    """Draw, and say where the picture is."""
    from lmgym.experiments.plotted_runs import plotted_runs
    from lmgym.logs.plots.metric import metric_plot

    print(f"plot: {metric_plot(plotted_runs(given.runs), given.metric, Path(given.out), given.smooth)}")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no number of steps; write 1 or more")
    return int(text)
