"""An A2A agent for tests, built with the official library: `python a2a_server.py FOLDER PORT [stream]`.

The first word of a message says what becomes of it: `say TEXT` (answered at once, no task) · `work TEXT` (a task that
is completed while the file `hold` is not in the folder) · `fail` · `reject` · `ask` (wants more input) · `elsewhere`
(an artifact at another origin) · `empty` (an artifact with an empty part) · `files TEXT` (an artifact of several files
that hold the text).

`card.json` in the folder, if it is there, is merged over the fields of the card.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.routes import create_jsonrpc_routes
from a2a.server.tasks import InMemoryTaskStore, TaskUpdater
from a2a.types import (
    AgentCapabilities,
    AgentCard,
    AgentInterface,
    Message,
    Part,
    Role,
    Task,
    TaskState,
    TaskStatus,
)
from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Value
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from support.peer_http import Scripted, serve

FOLDER = Path(sys.argv[1])


class Agent(AgentExecutor):
    async def execute(self, context: RequestContext, event_queue: Any) -> None:
        word, _, rest = context.get_user_input().partition(" ")
        if word == "say":
            reply = Message(message_id="reply", role=Role.ROLE_AGENT, parts=[Part(text=rest)])
            await event_queue.enqueue_event(reply)
            return
        status = TaskStatus(state=TaskState.TASK_STATE_SUBMITTED)
        task = Task(id=context.task_id, context_id=context.context_id, status=status)
        await event_queue.enqueue_event(task)
        updater = TaskUpdater(event_queue, context.task_id, context.context_id)
        await updater.start_work()
        if word == "fail":
            await updater.failed(updater.new_agent_message([Part(text="it broke")]))
        elif word == "reject":
            await updater.reject()
        elif word == "ask":
            await updater.requires_input()
        else:
            while (FOLDER / "hold").exists():
                await asyncio.sleep(0.02)
            part = Part(text=f"done: {rest}")
            if word == "elsewhere":
                part = Part(url="http://example.org/file")
            elif word == "empty":
                part = Part()
            if word == "files":
                await updater.add_artifact(files(rest), artifact_id="report")
            else:
                await updater.add_artifact([part], name="answer")
            await updater.complete()

    async def cancel(self, context: RequestContext, event_queue: Any) -> None:
        await TaskUpdater(event_queue, context.task_id, context.context_id).cancel()


def files(text: str) -> list[Part]:
    """A text with a name that would lead elsewhere, bytes, data, and a second text of the same name."""
    data = Value()
    data.struct_value.update({"lines": "three"})
    return [
        Part(text=f"# {text}", filename="../../notes.md", media_type="text/markdown"),
        Part(raw=b"\x00\x01" + text.encode() + b"\xff", filename="pixels.png", media_type="image/png"),
        Part(data=data),
        Part(text=text, filename="notes.md"),
    ]


def card(request: Request, streaming: bool) -> AgentCard:
    base = f"http://{request.url.netloc}"
    return AgentCard(
        name="worker",
        description="A test.",
        version="1",
        supported_interfaces=[AgentInterface(url=f"{base}/rpc", protocol_binding="JSONRPC", protocol_version="1.0")],
        capabilities=AgentCapabilities(streaming=streaming),
        default_input_modes=["text/plain"],
        default_output_modes=["text/plain"],
    )


if __name__ == "__main__":
    STREAMS = sys.argv[3:] == ["stream"]

    async def show(request: Request) -> JSONResponse:
        found = MessageToDict(card(request, STREAMS))
        changes = FOLDER / "card.json"
        return JSONResponse(found | (json.loads(changes.read_text()) if changes.exists() else {}))

    handler = DefaultRequestHandler(
        agent_executor=Agent(),
        task_store=InMemoryTaskStore(),
        agent_card=AgentCard(name="worker", capabilities=AgentCapabilities(streaming=STREAMS)),
    )
    routes = [*create_jsonrpc_routes(handler, "/rpc"), Route("/.well-known/agent-card.json", show)]
    serve(Scripted(Starlette(routes=routes), FOLDER), FOLDER, int(sys.argv[2]))
