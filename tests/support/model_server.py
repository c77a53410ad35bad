"""A model service on the loopback interface that speaks four dialects and does as it is told.

It is a real server on a real socket. Each request takes the next `Play` (the last one stays), is counted when its body
has arrived whole, and is kept for the test to look at. An answer that has to be late waits for a gate that the test
opens, or for the client to go away; only where nothing but the load matters does one take its time (`delay`).
"""

from __future__ import annotations

import json
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from support.scale import time_factor


@dataclass(frozen=True)
class Play:
    """What is answered to one request. Without anything: a short complete text.

    `calls` are (id, name, arguments as text). `gate`: wait for it (or for the client's end) before the answer.
    `gate_in_body`: the same after the first half of it. `cut`: leave out the second half and close. `drop`: close
    without a word. `body`: these bytes instead of an answer. `events`: these data lines instead of a stream. `delay`:
    seconds that the answer takes.
    """

    text: str = "fine"
    calls: Sequence[tuple[str, str, str]] = ()
    finish: str | None = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    error: str = "refused by the test"
    body: bytes | None = None
    events: Sequence[Any] | None = None
    gate: threading.Event | None = None
    gate_in_body: threading.Event | None = None
    cut: bool = False
    drop: bool = False
    usage: Mapping[str, Any] | None = None
    no_usage: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    echo: str | None = None
    delay: float = 0.0


@dataclass(frozen=True)
class Seen:
    """A request as it arrived."""

    path: str
    headers: Mapping[str, str]
    body: Any
    at: float


class ModelServer:
    """The server and what it has seen. `url` is the address alone."""

    def __init__(self, *, tls: ssl.SSLContext | None = None, port: int = 0) -> None:
        self.seen: list[Seen] = []
        self.gone = threading.Event()
        """Set as soon as a client has closed its connection while it was made to wait."""
        self.arrived = threading.Condition()
        self._plays: list[Play] = [Play()]
        self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self._server.daemon_threads = True
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._scheme = "http" if tls is None else "https"

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}"

    @property
    def count(self) -> int:
        """How many requests have arrived whole."""
        return len(self.seen)

    def plays(self, *plays: Play) -> None:
        """Answer the next requests like this, and all later ones like the last."""
        self._plays = list(plays)

    def wait_for(self, count: int) -> None:
        """Return when that many requests have arrived."""
        with self.arrived:
            assert self.arrived.wait_for(lambda: self.count >= count, timeout=30 * time_factor())

    def take(self, seen: Seen) -> Play:
        """Note a request and give the play for it."""
        with self.arrived:
            self.seen.append(seen)
            play = self._plays.pop(0) if len(self._plays) > 1 else self._plays[0]
            self.arrived.notify_all()
        return play

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def model_server(**options: Any) -> Iterator[ModelServer]:
    """A running server."""
    server = ModelServer(**options)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def closed_port() -> int:
    """A port of the loopback interface on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _handler(server: ModelServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_POST(self) -> None:
            now = time.monotonic()
            body = self.rfile.read(int(self.headers.get("content-length", "0")))
            headers = {name.lower(): ", ".join(self.headers.get_all(name, ())) for name in self.headers}
            seen = Seen(self.path, headers, json.loads(body), now)
            self.close_connection = True
            try:
                self._answer(server.take(seen), seen)
            except (BrokenPipeError, ConnectionResetError):
                server.gone.set()

        do_GET = do_POST

        def _answer(self, play: Play, seen: Seen) -> None:
            self._hold(play.gate)
            time.sleep(play.delay)
            if play.drop:
                return
            if play.echo is not None:
                play = replace(play, error=f"your key is {seen.headers.get(play.echo)}")
            if play.status != 200:
                data = json.dumps({"error": {"message": play.error}}).encode() if play.body is None else play.body
                self._send(play, data, "application/json")
            elif seen.body.get("stream"):
                events = play.events if play.events is not None else events_of(seen.path, play, seen.body)
                lines = [e if isinstance(e, str) else json.dumps(e) for e in events]
                self._send(play, "".join(f"data: {line}\n\n" for line in lines).encode(), "text/event-stream")
            else:
                data = play.body
                if data is None:
                    data = json.dumps(answer_of(seen.path, play, seen.body)).encode()
                self._send(play, data, "application/json")

        def _send(self, play: Play, data: bytes, kind: str) -> None:
            self.send_response(play.status)
            self.send_header("Content-Type", kind)
            self.send_header("Connection", "close")
            if kind != "text/event-stream" or play.cut:  # else the end of the connection is that of the stream
                self.send_header("Content-Length", str(len(data)))
            for name, value in play.headers.items():
                self.send_header(name, value)
            self.end_headers()
            half = len(data) // 2
            self.wfile.write(data[:half])
            self.wfile.flush()
            self._hold(play.gate_in_body)
            if not play.cut:
                self.wfile.write(data[half:])
                self.wfile.flush()

        def _hold(self, gate: threading.Event | None) -> None:
            """Wait for the gate, or for the client to close."""
            while gate is not None and not gate.wait(0.01):
                readable, _, _ = select.select([self.connection], [], [], 0)
                if readable and self.connection.recv(1, socket.MSG_PEEK) == b"":
                    server.gone.set()
                    raise BrokenPipeError

    return Handler


# -- dialects ----------------------------------------------------------------------------------------------------------


def answer_of(path: str, play: Play, request: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of the service whose path was asked."""
    if path.split("?")[0].endswith("/embeddings"):
        return _with({"data": _vectors(request["input"]), "usage": play.usage or {"prompt_tokens": 5}}, play, "usage")
    if path.endswith(":batchEmbedContents"):
        texts = [item["content"]["parts"][0]["text"] for item in request["requests"]]
        return {"embeddings": [{"values": vector_of(text)} for text in texts], **play.extra}
    if path.split("?")[0].endswith("/responses"):
        return _responses(play)
    if path.endswith("/chat/completions"):
        return _chat(play)
    if path.endswith("/messages"):
        return _messages(play)
    return _generate(play)


LENGTH = 8
"""Numbers of each vector that the server makes."""


def vector_of(text: str) -> list[float]:
    """A vector that is not of length 1: how often each of the first letters of the alphabet is in the text."""
    return [3.0 * text.count(letter) for letter in "abcdefgh"]


def _vectors(texts: Sequence[str]) -> list[dict[str, Any]]:
    """In the order that nobody has promised: the last one first."""
    return [{"index": index, "embedding": vector_of(text)} for index, text in enumerate(texts)][::-1]


def _responses(play: Play) -> dict[str, Any]:
    output: list[dict[str, Any]] = []
    if play.text:
        output.append({"type": "message", "content": [{"type": "output_text", "text": play.text}]})
    for identity, name, arguments in play.calls:
        output.append({"type": "function_call", "call_id": identity, "name": name, "arguments": arguments})
    usage = {
        "input_tokens": 11,
        "input_tokens_details": {"cached_tokens": 3},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 2},
    }
    answer = {"id": "resp_1", "status": play.finish or "completed", "output": output, "usage": play.usage or usage}
    return _with(answer, play, "usage")


def _chat(play: Play) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": play.text or None}
    if play.calls:
        message["tool_calls"] = [
            {"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in play.calls
        ]
    usage = {
        "prompt_tokens": 11,
        "completion_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
    finish = play.finish or ("tool_calls" if play.calls else "stop")
    choices = [{"index": 0, "message": message, "finish_reason": finish}]
    return _with({"id": "chat_1", "choices": choices, "usage": play.usage or usage}, play, "usage")


def _messages(play: Play) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "text", "text": play.text}] if play.text else []
    for identity, name, arguments in play.calls:
        content.append({"type": "tool_use", "id": identity, "name": name, "input": _parsed(arguments)})
    usage = {"input_tokens": 6, "cache_read_input_tokens": 3, "cache_creation_input_tokens": 2, "output_tokens": 7}
    finish = play.finish or ("tool_use" if play.calls else "end_turn")
    return _with(
        {"id": "msg_1", "content": content, "stop_reason": finish, "usage": play.usage or usage}, play, "usage"
    )


def _generate(play: Play) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"text": play.text}] if play.text else []
    for identity, name, arguments in play.calls:
        call = {"id": identity, "name": name, "args": _parsed(arguments)}
        parts.append({"functionCall": call, "thoughtSignature": f"sig-{identity}"})
    usage = {
        "promptTokenCount": 11,
        "candidatesTokenCount": 5,
        "thoughtsTokenCount": 2,
        "cachedContentTokenCount": 3,
    }
    candidate = {"content": {"role": "model", "parts": parts}, "finishReason": play.finish or "STOP"}
    answer = {"responseId": "gen_1", "candidates": [candidate], "usageMetadata": play.usage or usage}
    return _with(answer, play, "usageMetadata")


def _with(answer: dict[str, Any], play: Play, usage: str) -> dict[str, Any]:
    if play.no_usage:
        del answer[usage]
    return {**answer, **play.extra}


def _parsed(text: str) -> Any:
    """Where arguments travel as JSON, half of them is something that is no object."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def events_of(path: str, play: Play, request: Mapping[str, Any]) -> list[Any]:
    """The same answer in pieces."""
    whole = answer_of(path, play, request)
    if path.split("?")[0].endswith("/responses"):
        pieces: list[Any] = [{"type": "response.created"}]
        pieces += [{"type": "response.output_text.delta", "delta": letter} for letter in play.text]
        pieces += [
            {"type": "response.output_item.added", "item": {"type": "function_call", "name": name}}
            for _, name, _ in play.calls
        ]
        return [*pieces, {"type": f"response.{whole['status']}", "response": whole}]
    pieces = [{"id": "chat_1", "choices": [{"index": 0, "delta": {"content": letter}}]} for letter in play.text]
    for index, (identity, name, arguments) in enumerate(play.calls):
        half = len(arguments) // 2
        first = {"index": index, "id": identity, "function": {"name": name, "arguments": arguments[:half]}}
        second = {"index": index, "function": {"arguments": arguments[half:]}}
        pieces += [{"choices": [{"delta": {"tool_calls": [piece]}}]} for piece in (first, second)]
    finish = whole["choices"][0]["finish_reason"]
    pieces.append({"choices": [{"delta": {}, "finish_reason": finish}]})
    if "usage" in whole:
        pieces.append({"choices": [], "usage": whole["usage"]})
    return [*pieces, "[DONE]"]
