"""`lmgym serve`: talk to a model with any client of OpenAI's or Anthropic's form."""

import argparse
import signal
from collections.abc import Mapping
from contextlib import suppress

from lmgym.cli.recipes import add_model, quick_imports, read_model

PORT = 8643


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A model, a port, and fields of requests without effect."""
    add_model(parser)
    parser.add_argument("--port", type=int, default=PORT, help=f"of 127.0.0.1, or 0 for any; default: {PORT}")
    ignored = "fields of requests that shall have no effect, such as temperature; without it they are refused"
    parser.add_argument("--ignored", metavar="FIELD", nargs="+", default=[], help=ignored)


def run(given: argparse.Namespace) -> None:
    """Serve until Ctrl-C."""
    with quick_imports():
        from lmgym.experiments.serving import serve_model

    def say(variables: Mapping[str, str]) -> None:
        for name, value in variables.items():
            print(f"export {name}={value}")
        print("# Ctrl-C ends it; whoever has the key can ask", flush=True)

    named = read_model(given)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background process would ignore it
    with suppress(KeyboardInterrupt):  # Ctrl-C is how it ends
        serve_model(named, given.port, given.ignored, say)
