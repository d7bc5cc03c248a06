"""A small MCP server by stdio, for test_mcp.py: the protocol's messages, and ways to misbehave. No packages."""

import json
import sys
import time

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
NOTHING = {"type": "object", "properties": {}}
PAGES = {
    None: ({"name": "add", "description": "Adds two numbers.", "inputSchema": NUMBERS}, "more"),
    "more": ({"name": "count", "description": "How often it was called.", "inputSchema": NOTHING}, "last"),
    "last": ({"name": "mischief", "inputSchema": {**NOTHING, "properties": {"kind": {"type": "string"}}}}, None),
}
counted = 0


def send(**message: object) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def call(name: str, arguments: dict[str, object]) -> dict[str, object]:
    global counted
    if name == "add":
        if not all(isinstance(value, int) for value in arguments.values()):
            return {"content": [{"type": "text", "text": "a and b must be whole numbers"}], "isError": True}
        return {"content": [{"type": "text", "text": str(arguments["a"] + arguments["b"])}]}  # type: ignore[operator]
    if name == "count":
        counted += 1
        return {"content": [], "structuredContent": {"count": counted}}
    return mischief(str(arguments.get("kind")))


def mischief(kind: str) -> dict[str, object]:
    if kind == "sleep":
        time.sleep(3600)
    if kind == "die":
        print("Traceback: the disk is full", file=sys.stderr)
        sys.exit(3)
    if kind == "chatter":  # a log line on the wrong stream
        print("INFO: called", flush=True)
    if kind in ("bare", "strings"):
        return {"content": "text" if kind == "bare" else ["text"]}
    if kind == "noise":
        for _ in range(300):
            sys.stderr.write("x" * 10_000)
        print("the last line", file=sys.stderr, flush=True)
    if kind == "ask":  # a notification, then a request; the client must answer before the result comes
        send(method="notifications/message", params={"level": "info", "data": "working"})
        send(id="from-the-server", method="ping")
        answer = json.loads(sys.stdin.readline())
        return {"content": [{"type": "text", "text": json.dumps(answer)}]}
    if kind.startswith("show "):
        data = kind.removeprefix("show ")
        files = [{"uri": "file:///a", "mimeType": type, "blob": data} for type in ("image/png", "audio/wav")]
        content = [{"type": "image", "data": data, "mimeType": "image/png"}]
        return {"content": [*content, *({"type": "resource", "resource": file} for file in files)]}
    picture = {"type": "image", "data": "AAAA", "mimeType": "image/png"}
    file = {"type": "resource", "resource": {"uri": "file:///a.txt", "text": "in the file"}}
    return {"content": [picture, file]}


HOSTILE = {  # answers to tools/list, by the word after --list
    "null": '{"tools": null}', "text": '{"tools": "add"}', "none": "{}", "array": "[]", "number": '{"tools": [3]}',
    "schema": '{"tools": [{"name": "add", "inputSchema": "object"}]}',
    "properties": '{"tools": [{"name": "add", "inputSchema": {"properties": [1]}}]}',
    "required": '{"tools": [{"name": "add", "inputSchema": {"required": 3}}]}',
    "description": '{"tools": [{"name": "add", "description": {}}]}',
    "deep": "[" * 100_000 + "]" * 100_000,
    "slow": '{"tools": [], "nextCursor": "again"}',
}  # fmt: skip
VERSION = "2020-01-01" if "--old" in sys.argv else "2025-06-18"
for line in sys.stdin:
    request = json.loads(line)
    method, given = request["method"], request.get("params", {})
    if method == "initialize":
        assert given["protocolVersion"] and given["clientInfo"]["name"]
        server = {"name": "test", "version": "1"}
        send(id=request["id"], result={"protocolVersion": VERSION, "capabilities": {"tools": {}}, "serverInfo": server})
    elif method == "tools/list" and "--list" in sys.argv:
        kind = sys.argv[sys.argv.index("--list") + 1]
        time.sleep(0.4 if kind == "slow" else 0)
        print(f'{{"jsonrpc": "2.0", "id": {request["id"]}, "result": {HOSTILE[kind]}}}', flush=True)
    elif method == "tools/list":
        tool, cursor = PAGES[given.get("cursor")]
        send(id=request["id"], result={"tools": [tool], **({"nextCursor": cursor} if cursor else {})})
    elif method == "tools/call":
        send(id=request["id"], result=call(given["name"], given["arguments"]))
