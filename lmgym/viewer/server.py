"""The server of `lmgym view`: page, data, notes, and searches and questions in the background. Loopback only."""

import asyncio
import json
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import resources
from typing import Any

from lmgym.core.errors import LmgymError, describe
from lmgym.logs.formatting import json_bytes
from lmgym.viewer.addresses import UnknownAddress, run_of, tree_at
from lmgym.viewer.guard import Guard
from lmgym.viewer.notes import write_note
from lmgym.viewer.questions import Question
from lmgym.viewer.runs import RunRecords
from lmgym.viewer.search import Search

KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
LARGEST_REQUEST = 2**17  # bytes
MOST_SEARCHES = 4
LONGEST_SEARCH = 600.0  # seconds
MOST_CONNECTIONS = 100  # open at once; a browser has six
SILENT_SECONDS = 10.0  # that a new connection may take to say anything
NEEDED = "`lmgym view` needs the libraries starlette and uvicorn; pip install 'lmgym[view]'"

Tree = dict[str, Any]


def page_files() -> dict[str, bytes]:
    """The files of the page, by name. Nothing else is ever served as a file."""
    folder = resources.files("lmgym.viewer") / "page"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


class Asked:
    """What the page asks of some runs: functions of a request's path parameters and its body, which return plain trees.

    Example: Asked(runs).begin_search({}, {"run": 0, "pattern": "42"})["key"]"""

    def __init__(self, runs: Sequence[RunRecords]) -> None:
        self.runs = runs
        self.searches: dict[str, Search] = {}
        self.questions: dict[str, Question] = {}

    def data(self, path: Tree, body: Tree) -> Any:
        return tree_at(self.runs, path["address"])

    def begin_search(self, path: Tree, body: Tree) -> Tree:
        for key in list(self.searches)[: max(0, len(self.searches) - MOST_SEARCHES + 1)]:
            _cancel(self.searches.pop(key, None))
        with _said():
            filters = [(str(name), str(operator), float(value)) for name, operator, value in body.get("filters", [])]
            seconds = min(float(body.get("seconds", 60.0)), LONGEST_SEARCH)
            search = Search(run_of(self.runs, str(body["run"])), str(body.get("pattern", "")), filters, seconds)
        self.searches[search.key] = search
        return search.tree()

    def begin_question(self, path: Tree, body: Tree) -> Tree:
        with _said():
            question = Question(run_of(self.runs, str(body["run"])), body)
        for key in list(self.questions):  # one model at a time in the memory of this machine
            _cancel(self.questions.pop(key, None))
        self.questions[question.key] = question
        return question.tree()

    def begun(self, path: Tree, body: Tree) -> Tree:
        """A search or a question, as far as it has come."""
        if (one := self._begun(path)) is None:
            raise UnknownAddress("this was ended by a newer one, or was never begun")
        return one.tree()

    def end(self, path: Tree, body: Tree) -> Tree:
        if one := self._begun(path):
            one.cancel()
        return {}

    def note(self, path: Tree, body: Tree) -> Any:
        with _said():
            answered = tree_at(self.runs, f"runs/{path['run']}/answers/{body['answer']}")
            tags = [str(tag).strip() for tag in body["tags"] if str(tag).strip()]
            return write_note(run_of(self.runs, path["run"]).folder, answered, str(body["note"]).strip(), tags)

    def _begun(self, path: Tree) -> Search | Question | None:
        return self.searches.get(path["key"]) or self.questions.get(path["key"])


def _cancel(one: Search | Question | None) -> None:
    """Cancel what was taken out; None if another request, of another tab, has just done so."""
    if one is not None:
        one.cancel()


def application(runs: Sequence[RunRecords]) -> Any:
    """The Starlette application, without its guard. Raises LmgymError if Starlette is not installed."""
    try:
        from starlette.applications import Starlette
        from starlette.concurrency import run_in_threadpool
        from starlette.requests import Request
        from starlette.responses import Response
        from starlette.routing import Route
    except ImportError as error:
        raise LmgymError(NEEDED) from error
    files, asked = page_files(), Asked(runs)

    def answer(tree: Any, status: int = 200) -> Response:
        return Response(json_bytes(tree), status, media_type="application/json")

    def file_of(name: str) -> Response:
        if name not in files:
            return Response("there is no such file", 404, media_type="text/plain")
        return Response(files[name], media_type=KINDS.get("." + name.rpartition(".")[2], "text/plain"))

    def data(address: str, method: str, work: Callable[[Tree, Tree], Any]) -> Route:
        """The route of a function of `Asked`, which runs beside the others."""

        async def endpoint(request: Request) -> Response:
            try:
                body = await _body(request) if request.method == "POST" else {}
                return answer(await run_in_threadpool(work, request.path_params, body))
            except UnknownAddress as error:
                return answer({"error": str(error)}, 404)
            except LmgymError as error:
                return answer({"error": str(error)}, 400)
            except Exception as error:  # records of someone else's making; the other views must go on
                return answer({"error": f"these records cannot be made sense of: {describe(error)}"}, 500)

        return Route(f"/data/{address}", endpoint, methods=[method])

    return Starlette(
        routes=[
            Route("/", lambda request: file_of("index.html")),
            Route("/page/{name}", lambda request: file_of(request.path_params["name"])),
            data("searches", "POST", asked.begin_search),
            data("questions", "POST", asked.begin_question),
            *(data(f"{kind}/{{key}}", "GET", asked.begun) for kind in ("searches", "questions")),
            *(data(f"{kind}/{{key}}", "DELETE", asked.end) for kind in ("searches", "questions")),
            data("runs/{run}/notes", "POST", asked.note),
            data("{address:path}", "GET", asked.data),
        ]
    )


async def _body(request: Any) -> dict[str, Any]:
    """The JSON object that a request brings. Raises LmgymError for anything else."""
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > LARGEST_REQUEST:
            raise LmgymError(f"a request has at most {LARGEST_REQUEST:,} bytes")
    with suppress(ValueError, RecursionError):
        if isinstance(tree := json.loads(data), dict):
            return tree
    raise LmgymError("a request brings a JSON object")


@contextmanager
def _said() -> Iterator[None]:
    """In the body, what a request lacks, or has of another kind, becomes one sentence."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise LmgymError(f"the request lacks something: {describe(error)}") from error


def serve(runs: Sequence[RunRecords], port: int, say: Any) -> None:
    """Serve until Ctrl-C. `say` is told the address to open. With port 0, or one that is taken, the system chooses one.

    Raises LmgymError if the libraries are not installed, or no port can be had."""
    with bound(port) as listening:
        guard = Guard(application(runs), listening.getsockname()[1])
        serving = server_of(guard)
        startup = serving.startup

        async def started(sockets: Any = None) -> None:
            await startup(sockets)
            say(guard.address)  # from here on the server answers, and Ctrl-C is its own

        serving.startup = started
        serving.run(sockets=[listening])


def server_of(guard: Guard) -> Any:
    """The uvicorn server of a guarded application. Raises LmgymError if uvicorn is not installed."""
    try:
        import uvicorn
        from uvicorn.protocols.http.h11_impl import H11Protocol
    except ImportError as error:
        raise LmgymError(NEEDED) from error
    return uvicorn.Server(
        uvicorn.Config(
            guard, http=bounded(H11Protocol), ws="none", log_level="warning", access_log=False, lifespan="off",
            server_header=False,
        )
    )  # fmt: skip


def bounded(protocol: type) -> type:
    """An asyncio protocol of which at most MOST_CONNECTIONS are open: one more closes that which has said nothing for
    longest. So another user of the machine cannot use up this process's files with connections that stay silent."""
    transports = dict[Any, None]()  # the one that has said nothing for longest is the first

    class Bounded(protocol):  # type: ignore[misc]
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            transports[transport] = None
            self.waiting = asyncio.get_running_loop().call_later(SILENT_SECONDS, transport.close)
            if len(transports) > MOST_CONNECTIONS:
                silent = next(iter(transports))
                del transports[silent]
                silent.abort()

        def data_received(self, data: bytes) -> None:
            self.waiting.cancel()
            transports.pop(self.transport, None)
            transports[self.transport] = None
            super().data_received(data)

        def connection_lost(self, exc: Exception | None) -> None:
            self.waiting.cancel()
            transports.pop(self.transport, None)
            super().connection_lost(exc)

    return Bounded


def bound(port: int) -> socket.socket:
    """A socket on loopback, at this port or, if it is taken, at another one. Raises LmgymError if there is none."""
    for candidate in dict.fromkeys((port, 0)):
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", candidate))
            listening.listen()  # from here on nobody else can have the port
            return listening
        except (OSError, OverflowError) as error:
            listening.close()
            problem = error
    raise LmgymError(f"no port of 127.0.0.1 can be opened: {describe(problem)}")
