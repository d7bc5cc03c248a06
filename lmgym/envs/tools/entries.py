"""The entries of `env.tools`: names of tools and functions, and MCP servers."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lmgym.core.constraints import PositiveFloat
from lmgym.core.errors import LmgymError
from lmgym.core.redacted import redacted
from lmgym.core.registry import suggest
from lmgym.core.validation import Section, check_arguments
from lmgym.envs.tools.mcp import Session, ToolError
from lmgym.envs.tools.sandbox.runner import Limits, python_within
from lmgym.envs.tools.schema import Tool, ToolLost, prepare, tool

_listed: dict[str, list[dict[str, Any]]] = {}  # the tools of a server, by its key
_shared: dict[str, "Session"] = {}  # running servers, by key


@dataclass(kw_only=True)
class McpServer(Section):
    """A server, as an entry of `env.tools`.

    - `mcp`: the program and its arguments. It must be installed; nothing is downloaded.
    - `only`: names of the tools that the model gets; without it, all.
    - `seconds`: by the clock, for each answer of the server, its start included.
    - `shared`: by default each episode starts a server of its own at its first call, so that no episode sees what
      another one has left in it. For servers that keep nothing between calls: one for all episodes of a process.
    - `pictures`: show the pictures in results to the model, which must be one that sees; without it they are named, as
      "[image image/png]".
    - `variables`: names of environment variables of the training process that the server gets, such as the one with
      its key, beside HOME, LANG, LOGNAME, PATH, SHELL, TERM, TMPDIR and USER. Only the names stand in the recipe.

    Example: McpServer(mcp=["mcp-server-calculator"], shared=True)"""

    section = "env.tools"

    mcp: list[str]
    only: list[str] | None = None
    seconds: PositiveFloat = 20.0
    shared: bool = False
    pictures: bool = False
    variables: list[str] | dict[str, Any] = field(default_factory=list)  # a dictionary is refused, in words of its own

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.mcp:
            raise LmgymError("key 'env.tools': mcp is empty; write the program and its arguments, such as [my-server]")
        if isinstance(self.variables, dict):
            names = ", ".join(self.variables)
            raise LmgymError(
                f"key 'env.tools': variables names environment variables, and has no values: a recipe is written into "
                f"each run folder and published with a model; write variables: [{names}] and set {names or 'them'} "
                "where you start lmgym"
            )
        for text, shown in zip(self.mcp, redacted(self.mcp), strict=True):
            if text != shown:
                raise LmgymError(
                    f"key 'env.tools': mcp has a secret among the arguments ({shown}), and a recipe is written into "
                    "each run folder and published with a model; set an environment variable where you start lmgym, "
                    "name it in variables, and if the program reads no variable, let a shell pass it on: "
                    'mcp: [sh, -c, "exec my-server --api-key=$MY_KEY"]'
                )
        for name in self.variables:
            if name not in os.environ:
                raise LmgymError(f"key 'env.tools': variables names {name}, and no environment variable {name} is set")

    @property
    def key(self) -> str:
        """What tells servers apart."""
        return json.dumps([self.mcp, self.variables, self.seconds, self.pictures])

    def session(self) -> Session:
        return Session(self.mcp, self.seconds, list(self.variables), self.pictures)


def tools_of(
    entries: Sequence[str | Mapping[str, Any]], python: Mapping[str, Any] | None
) -> tuple[dict[str, Tool], list[Session]]:
    """The tools of `env.tools`, by the name in the model's calls, and the sessions of MCP servers that end with the
    episode. `python` holds the limits of that tool.

    Example: [*tools_of(["calculator"], None)[0]] -> ['calculator']"""
    if isinstance(entries, str):
        raise LmgymError(f"key 'env.tools' must be a list of names, such as [{entries}]")
    if python is not None and "python" not in entries:
        raise LmgymError("key 'env.python' limits the tool 'python', which is not among 'env.tools'")
    tools, sessions = dict[str, Tool](), list[Session]()
    for number, entry in enumerate(entries):
        if entry == "python":
            limits = Limits(**check_arguments(Limits, python or {}, "env.python", given=0))
            chosen = [prepare(python_within(limits))]
        elif isinstance(entry, str):
            chosen = [tool(entry)]
        else:
            server = McpServer(**check_arguments(McpServer, entry, f"env.tools.{number}", given=0))
            chosen, session = _mcp_tools(server)
            sessions += [] if server.shared else [session]
        for one in chosen:
            if one.name in tools:
                raise LmgymError(f"key 'env.tools': two tools are called '{one.name}'; the model could not choose")
            tools[one.name] = one
    return tools, sessions


def _mcp_tools(server: McpServer) -> tuple[list[Tool], Session]:
    """The tools of a server, and the session in which an episode calls them. The first time in a process, the server is
    started to list them. Raises LmgymError if that fails, or if `only` names a tool that it does not have."""
    if server.key not in _listed:
        session = server.session()
        try:
            _listed[server.key] = session.list_tools()
        except (ToolLost, ToolError) as error:
            raise LmgymError(f"key 'env.tools': the MCP server '{server.mcp[0]}' {error}") from None
        finally:
            session.close()
    described = {tool["name"]: tool for tool in _listed[server.key]}
    for name in server.only or ():
        if name not in described:
            raise LmgymError(
                f"key 'env.tools': the MCP server '{server.mcp[0]}' has no tool '{name}'; {suggest(name, described)}"
            )
    session = _shared.setdefault(server.key, server.session()) if server.shared else server.session()
    names = server.only if server.only is not None else list(described)
    return [_tool(described[name], session) for name in names], session


def _tool(described: Mapping[str, Any], session: Session) -> Tool:
    from pydantic import TypeAdapter

    name, parameters = described["name"], described.get("inputSchema") or {"type": "object", "properties": {}}
    function = {"name": name, "description": described.get("description") or name, "parameters": parameters}
    anything = TypeAdapter(Any)  # the server checks the types
    return Tool(
        name=name,
        function=partial(_call, session, name),
        schema={"type": "function", "function": function},
        validators=dict.fromkeys(parameters.get("properties") or {}, anything),
        required=tuple(parameters.get("required") or ()),
    )


def _call(session: Session, tool: str, /, **arguments: Any) -> str:
    try:
        return session.call(tool, **arguments)
    except ToolLost as error:
        raise ToolLost(f"the MCP server '{session.command[0]}' {error} (in a call of {tool})") from None
