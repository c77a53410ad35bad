"""The HTTP of an MCP client: every request goes through `worker.http_transport`, and what became of it is noted.

The official library reports a lost connection, an expired session and an answer of the server alike; what happened on
the wire decides whether an effect is uncertain, so it is noted here, where it is seen. The library has an HTTP client
of its own family (`httpx2`); this bridge hands its requests to the one transport that knows the policy.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import httpx2

from ..http_transport import AnswerTooLarge, AnswerUnreadable, AsyncPolicyTransport, NeverSent, RedirectRefused
from .remote import COURTESY_SECONDS


@dataclass(slots=True)
class Exchange:
    """What is known of the last request of one JSON-RPC method.

    `status` and `content_type`: the server has answered. `ended`: its answer was
    read to the end. `lost`: why the answer did not come to its end. `refused`: it is here that it was not read to its
    end (it is too large, or in a coding that nobody asked for). `unsent`: why nothing left this machine.
    """

    ended: bool = False
    status: int | None = None
    content_type: str = ""
    lost: str | None = None
    refused: bool = False
    unsent: NeverSent | None = None
    redirected: bool = False


class Bridge(httpx2.AsyncBaseTransport):
    """Carries the requests of an `httpx2` client over an `httpx` transport; notes the fate of each method."""

    def __init__(self, inner: AsyncPolicyTransport, extra_headers: Mapping[str, Mapping[str, str]]) -> None:
        """`extra_headers`: JSON-RPC method to headers that only its requests carry."""
        self._inner = inner
        self._extra = extra_headers
        self.exchanges: dict[str, Exchange] = {}
        self.session_id: str | None = None

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        body = await request.aread()
        method = _method(body) if request.method == "POST" else request.method
        exchange = self.exchanges[method] = Exchange()
        own = {name.encode(): value.encode() for name, value in self._extra.get(method, {}).items()}
        names = {name.lower() for name in own}
        headers = [*(item for item in request.headers.raw if item[0].lower() not in names), *own.items()]
        outgoing = httpx.Request(request.method, str(request.url), headers=headers, content=body)
        outgoing.extensions = {"timeout": request.extensions.get("timeout", {})}
        # A word that nobody waits for must not hold up the end of a call.
        courtesy = request.method == "DELETE" or method == "notifications/cancelled"
        async with asyncio.timeout(COURTESY_SECONDS if courtesy else None):
            answer = await self._send(outgoing, exchange)
        exchange.status = answer.status_code
        self.session_id = answer.headers.get("mcp-session-id", self.session_id)
        exchange.content_type = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
        return httpx2.Response(
            answer.status_code, headers=answer.headers.raw, stream=_Body(answer, exchange), request=request
        )

    async def _send(self, request: httpx.Request, exchange: Exchange) -> httpx.Response:
        try:
            return await self._inner.handle_async_request(request)
        except NeverSent as error:
            exchange.unsent = error
            raise httpx2.ConnectError(error.message) from error
        except RedirectRefused as error:
            exchange.status, exchange.redirected = error.status, True
            raise httpx2.RemoteProtocolError(str(error)) from error
        except httpx.TransportError as error:
            raise _lost(exchange, error) from error

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Body(httpx2.AsyncByteStream):
    def __init__(self, answer: httpx.Response, exchange: Exchange) -> None:
        self._answer = answer
        self._exchange = exchange

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for part in self._answer.stream:  # type: ignore[union-attr]
                yield part
            self._exchange.ended = True
        except httpx.TransportError as error:
            raise _lost(self._exchange, error) from error

    async def aclose(self) -> None:
        await self._answer.aclose()


def _lost(exchange: Exchange, error: httpx.TransportError) -> httpx2.ReadError:
    """Note why an answer was not read to its end."""
    exchange.lost = str(error) or "the connection was lost"
    exchange.refused = isinstance(error, AnswerTooLarge | AnswerUnreadable)
    return httpx2.ReadError(exchange.lost)


def _method(body: bytes) -> str:
    try:
        message: Any = json.loads(body)
    except ValueError:
        return ""
    return str(message.get("method", "")) if isinstance(message, dict) else ""
