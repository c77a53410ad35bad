"""A small A2A agent for `a2a.yaml`. Needs `pip install 'a2a-sdk[http-server]' uvicorn`.

    python ops/examples/peers/a2a_peer.py [PORT]        # 8766; http://127.0.0.1:8766/.well-known/agent-card.json

It makes a task of each message, thinks for half a second, and answers with the message in capitals.
"""

import asyncio
import sys

import uvicorn
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.routes import create_agent_card_routes, create_jsonrpc_routes
from a2a.server.tasks import InMemoryTaskStore, TaskUpdater
from a2a.types import AgentCapabilities, AgentCard, AgentInterface, AgentSkill, Part, Task, TaskState, TaskStatus
from starlette.applications import Starlette


class Shouter(AgentExecutor):
    async def execute(self, context: RequestContext, event_queue) -> None:
        status = TaskStatus(state=TaskState.TASK_STATE_SUBMITTED)
        await event_queue.enqueue_event(Task(id=context.task_id, context_id=context.context_id, status=status))
        updater = TaskUpdater(event_queue, context.task_id, context.context_id)
        await updater.start_work()
        await asyncio.sleep(0.5)
        await updater.add_artifact([Part(text=context.get_user_input().upper())], name="answer")
        await updater.complete()

    async def cancel(self, context: RequestContext, event_queue) -> None:
        await TaskUpdater(event_queue, context.task_id, context.context_id).cancel()


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8766
    url = f"http://127.0.0.1:{port}/rpc"
    card = AgentCard(
        name="shouter",
        description="Says it in capitals.",
        version="1.0",
        supported_interfaces=[AgentInterface(url=url, protocol_binding="JSONRPC", protocol_version="1.0")],
        capabilities=AgentCapabilities(streaming=False),
        default_input_modes=["text/plain"],
        default_output_modes=["text/plain"],
        skills=[AgentSkill(id="shout", name="Shout", description="Gives a text back in capitals.", tags=["text"])],
    )
    handler = DefaultRequestHandler(agent_executor=Shouter(), task_store=InMemoryTaskStore(), agent_card=card)
    app = Starlette(routes=[*create_agent_card_routes(card), *create_jsonrpc_routes(handler, "/rpc")])
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
