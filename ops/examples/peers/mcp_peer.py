"""A small MCP server for `mcp.yaml` and `operational-workflow.yaml`. Needs the extra `mcp`.

    python ops/examples/peers/mcp_peer.py [PORT]        # 8765; http://127.0.0.1:8765/mcp

Its one tool counts the words of a text. The same text always gets the same answer, so a call may be repeated.
"""

import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("words")


@server.tool()
def count_words(text: str) -> dict[str, int]:
    """Words and characters of a text."""
    return {"words": len(text.split()), "characters": len(text)}


if __name__ == "__main__":
    import uvicorn

    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8765
    uvicorn.run(server.streamable_http_app(json_response=True), host="127.0.0.1", port=port, log_level="warning")
