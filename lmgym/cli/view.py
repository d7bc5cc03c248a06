"""`lmgym view`: a page over runs: curves, steps, groups, answers with their tokens; as one file; or in a terminal."""

import argparse
import os
import webbrowser
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

PORT = 8642


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Run folders, and where the page is: on a port of this machine, or in a file."""
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run folder, or a folder of runs")
    parser.add_argument("--port", type=int, default=PORT, help=f"of 127.0.0.1; default: {PORT}, or if taken any other")
    parser.add_argument("--open", action="store_true", help="open the page in the browser too")
    parser.add_argument("--text", action="store_true", help="show it in this terminal instead, for a machine over ssh")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the page as one file instead, to be sent")
    limit = "the largest size of that file; default: 20 MB"
    parser.add_argument("--limit", type=float, default=20.0, metavar="MB", help=limit)


def run(given: argparse.Namespace) -> None:
    """Serve the page until Ctrl-C, write the file, or show the runs in this terminal."""
    from lmgym.viewer.runs import open_runs

    runs = open_runs(given.runs)
    if given.html:
        from lmgym.viewer.single_file import write_file

        for sentence in write_file(runs, given.html, given.limit):
            print(sentence)
        return
    if given.text:
        from lmgym.viewer.terminal import show

        with suppress(KeyboardInterrupt):
            show(runs)
        return
    from lmgym.viewer.server import serve

    with ExitStack() as until_the_end, suppress(KeyboardInterrupt):  # Ctrl-C is how it ends

        def say(address: str) -> None:
            print(f"{address}\nCtrl-C ends it; whoever has this address can read the runs", flush=True)
            if given.open:
                folder = until_the_end.enter_context(TemporaryDirectory(prefix="lmgym-view-"))
                webbrowser.open(write_redirection(Path(folder), address).as_uri())

        serve(runs, given.port, say)


def write_redirection(folder: Path, address: str) -> Path:
    """Write a page that leads to an address, which only this user can read. All users of a machine can read the command
    line with which a browser is started, so the address itself, which holds the token, must not be in it."""
    path = folder / "open.html"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={address}"><title>lmgym view</title>')
    return path
