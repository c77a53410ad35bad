"""An ASGI wrapper for the test servers: it counts requests, and does to a method what a test has asked for.

The folder of a server holds `requests.jsonl` (one line for each request, written before anything is done with it),
`port` and `plan.json` with the number of the plan and its `methods`: JSON-RPC method (or HTTP method) to a list of
behaviours, one for each request of it in turn; after the last one everything is normal. Behaviours:

`ok` · `hang` (never answers) · `cut` (begins an answer and closes the connection) · `die` (the process ends) ·
`garbage` (200, no JSON) · `html` · `accepted` (202) · `redirect` · `huge` (more than a policy lets in) ·
`status:N` · `error:N` (a JSON-RPC error with HTTP 200) · `result:JSON` (a JSON-RPC result) · `stray` (that of another
request) · `event:JSON` (a result as an event of a stream) · `raw:TEXT` (that text as the result, JSON or not) · `late`
(handles it, and answers never) · `change` (`ok`, and from then on the tool is another one)
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any


class Scripted:
    """Wraps an ASGI application."""

    def __init__(self, app: Any, folder: Path) -> None:
        self._app = app
        self._folder = folder
        self._seen: Counter[str] = Counter()
        self._plan = -1

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = b""
        while scope["method"] == "POST":
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        told = json.loads(body) if body else {}
        method = told.get("method") or scope["method"]
        headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            headers[name.decode()] = ", ".join(filter(None, (headers.get(name.decode()), value.decode())))
        line = {"method": method, "path": scope["path"], "params": told.get("params"), "headers": headers}
        with open(self._folder / "requests.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        behaviour = self._next(method)
        if behaviour == "change":
            (self._folder / "changed").touch()
            behaviour = "ok"
        if behaviour in ("ok", "late"):
            sent = False

            async def again() -> Any:
                nonlocal sent
                if sent or scope["method"] != "POST":
                    return await receive()
                sent = True
                return {"type": "http.request", "body": body, "more_body": False}

            async def swallow(message: Any) -> None:
                if message["type"] == "http.response.start":
                    await asyncio.sleep(3600)

            await self._app(scope, again, swallow if behaviour == "late" else send)
            return
        await self._misbehave(behaviour, told.get("id"), receive, send)

    def _next(self, method: str) -> str:
        path = self._folder / "plan.json"
        plan = json.loads(path.read_text(encoding="utf-8"))
        if plan["number"] != self._plan:
            self._plan = plan["number"]
            self._seen.clear()
        planned = plan["methods"].get(method, [])
        number = self._seen[method]
        self._seen[method] += 1
        return str(planned[number]) if number < len(planned) else "ok"

    async def _misbehave(self, behaviour: str, number: Any, receive: Any, send: Any) -> None:
        word, _, rest = behaviour.partition(":")
        if word == "die":
            os._exit(9)
        if word == "hang":
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        if word == "cut":
            await _start(send, 200, "application/json", [(b"content-length", b"1000")])
            await send({"type": "http.response.body", "body": b'{"jsonrpc"', "more_body": True})
            await asyncio.sleep(0.05)
            raise ConnectionAbortedError("the test cuts this answer")
        status, kind, body = 200, "application/json", b"not json"
        headers: list[tuple[bytes, bytes]] = []
        if word == "html":
            kind, body = "text/html", b"<p>hello</p>"
        elif word == "accepted":
            status, body = 202, b""
        elif word == "redirect":
            status, body, headers = 307, b"", [(b"location", b"/elsewhere")]
        elif word == "huge":
            body = b'"' + b"x" * 3_000_000 + b'"'
        elif word == "status":
            status, kind, body = int(rest), "text/plain", b"no"
        elif word == "error":
            body = _rpc(number, error={"code": int(rest), "message": "the test says no"})
        elif word == "stray":
            body = _rpc("of another request", result={"content": []})
        elif word == "result":
            body = _rpc(number, result=json.loads(rest))
        elif word == "event":
            kind = "text/event-stream"
            told = {"jsonrpc": "2.0", "id": number, "result": json.loads(rest)}
            body = f"data: {json.dumps(told, ensure_ascii=False)}\n\n".encode()
        elif word == "raw":
            body = f'{{"jsonrpc":"2.0","id":{json.dumps(number)},"result":{rest}}}'.encode()
        await _start(send, status, kind, headers)
        await send({"type": "http.response.body", "body": body})


async def _start(send: Any, status: int, kind: str, headers: list[tuple[bytes, bytes]]) -> None:
    head = [(b"content-type", kind.encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})


def _rpc(number: Any, **fields: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": number, **fields}).encode()


def serve(app: Any, folder: Path, port: int) -> None:
    """Serve on the loopback until the process is ended; the port is written when it can be asked."""
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            number = self.servers[0].sockets[0].getsockname()[1]
            (folder / "port.part").write_text(str(number), encoding="utf-8")
            os.replace(folder / "port.part", folder / "port")

    Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="critical", lifespan="on")).run()
