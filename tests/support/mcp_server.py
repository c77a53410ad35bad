"""An MCP server for tests, built with the official library: `python mcp_server.py FOLDER PORT [json|sse]`.

Tools: `add` (two numbers, structured), `fail` (reports an error), `slow` (sleeps), `leak` (gives back the header
`authorization`), `long` (a text of that size). While the file `changed` is in the folder, `add` has another input
schema.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mcp import types
from mcp.server.lowlevel import Server

from support.peer_http import Scripted, serve

FOLDER = Path(sys.argv[1])


def _tool(name: str, properties: dict[str, Any], **more: Any) -> types.Tool:
    schema = {"type": "object", "properties": properties, "required": sorted(properties)}
    return types.Tool(name=name, input_schema=schema, **more)


async def list_tools(ctx: Any, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
    numbers = {"a": {"type": "integer"}, "b": {"type": "integer"}}
    if (FOLDER / "changed").exists():
        numbers["c"] = {"type": "integer"}
    output = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    first = [
        _tool("fail", {}, annotations=types.ToolAnnotations(read_only_hint=True)),
        _tool("slow", {"seconds": {"type": "number"}}),
    ]
    if params is None or params.cursor is None:
        return types.ListToolsResult(tools=first, next_cursor="more")
    return types.ListToolsResult(
        tools=[
            _tool("add", numbers, output_schema=output),
            _tool("leak", {}),
            _tool("long", {"size": {"type": "integer"}}),
        ]
    )


async def call_tool(ctx: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
    given = params.arguments or {}
    if params.name == "fail":
        return types.CallToolResult(content=[types.TextContent(type="text", text="it broke")], is_error=True)
    if params.name == "slow":
        await asyncio.sleep(given["seconds"])
    if params.name == "leak":
        text = ctx.request.headers.get("authorization", "")
        return types.CallToolResult(content=[types.TextContent(type="text", text=f"you are {text}")])
    if params.name == "long":
        return types.CallToolResult(content=[types.TextContent(type="text", text="x" * given["size"])])
    total = given.get("a", 0) + given.get("b", 0)
    return types.CallToolResult(
        content=[types.TextContent(type="text", text=str(total))], structured_content={"sum": total}
    )


if __name__ == "__main__":
    server: Server[Any] = Server("numbers", version="1.0", on_list_tools=list_tools, on_call_tool=call_tool)
    app = server.streamable_http_app(json_response=sys.argv[3:] != ["sse"])
    serve(Scripted(app, FOLDER), FOLDER, int(sys.argv[2]))
