"""What is known of extensions, MCP servers and A2A peers before anything runs (contract 1.5, 1.9, 12.5, 12.6). Pure.

A worker gets the definition of a server or peer inside the action that calls it, so the action alone says where a call
goes, and a changed address is a changed action. The same goes for the namespace of long-term memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from agentctl.store.embedding import LOCAL_HASH

from .diagnostics import Path
from .expressions import has_template
from .long_term_input import embeds

if TYPE_CHECKING:
    from .definition import A2aPeer, McpServer, Spec

MCP_VERSIONS: Final = ("2025-03-26", "2025-06-18", "2025-11-25")
"""Revisions of MCP that have Streamable HTTP and sessions."""

A2A_VERSIONS: Final = ("1.0",)

_PLACES: Final = {"mcp.call": ("server", "mcpServers"), "a2a.delegate": ("peer", "a2aPeers")}
"""Kind to: input field that names it, place in `spec`."""

_EXAMPLE: Final = "for example https://tools.example.org/mcp"

_OPEN_PORTS: Final = {"http": 80, "https": 443}


def asked_by(kind: str | None) -> tuple[str, str] | None:
    """(field of the input that names a server or peer, its place in `spec`) of an action kind, or None."""
    return _PLACES.get(kind or "")


def call_problems(kind: str, given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(field, message) of what is wrong with the literal part of an input."""
    value = given.get("arguments")
    if kind == "mcp.call" and value is not None and not isinstance(value, dict) and not has_template(value):
        yield "arguments", "arguments must be a mapping"


def version_problem(spec: Spec, kind: str, name: str) -> tuple[Path, str, str] | None:
    """(path, message, help) when a server or peer that a task may ask speaks a version that is not known here."""
    known: tuple[str, ...]
    if kind == "mcp.call":
        version, known = spec.mcp_servers[name].protocol_version, MCP_VERSIONS
    else:
        version, known = spec.a2a_peers[name].protocol_version, A2A_VERSIONS
    if version in known:
        return None
    path: Path = ("spec", _PLACES[kind][1], name, "protocolVersion")
    return path, f"protocol version {version!r} is not supported by this version", "one of " + ", ".join(known)


def declared_peers(spec: Spec, kind: str) -> Mapping[str, McpServer] | Mapping[str, A2aPeer]:
    """The servers or peers that an action of such a kind may ask, by name."""
    return spec.mcp_servers if kind == "mcp.call" else spec.a2a_peers


def address_problems(spec: Spec) -> Iterator[tuple[Path, str, str]]:
    """(path, message, help) of each address in a document that no request can be sent to, whoever needs it."""
    for name, provider in spec.providers.items():
        if provider.endpoint is not None and (found := url_problem(provider.endpoint)) is not None:
            yield ("spec", "providers", name, "endpoint"), found, "for example http://127.0.0.1:11434"
    for name, server in spec.mcp_servers.items():
        if (found := url_problem(server.url)) is not None:
            yield ("spec", "mcpServers", name, "url"), found, _EXAMPLE
    for name, peer in spec.a2a_peers.items():
        if (found := url_problem(peer.card_url)) is not None:
            yield ("spec", "a2aPeers", name, "cardUrl"), found, _EXAMPLE


def url_problem(url: str) -> str | None:
    """Why no request can be sent to an address, or None."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"not a URL: {str(error).lower()}"
    if parts.scheme not in _OPEN_PORTS or not parts.hostname:
        return "not an absolute http or https URL"
    if parts.username is not None or parts.password is not None:
        return "a URL may not hold a user name or a password; use headers with secret references"
    if parts.fragment or port == 0 or any(ord(letter) <= 32 or ord(letter) == 127 for letter in url):
        return "not a URL to ask: it has a fragment, a port of 0, a space or a control character"
    return None


def embedding_provider(spec: Mapping[str, Any], kind: str) -> str | None:
    """The entry of `spec.providers` that embeds for an action of such a kind; None without one, for which the embedding
    that is built in will do."""
    long_term = spec["memory"]["longTerm"]
    if long_term is None or not embeds(kind) or long_term["embedding"]["provider"] == LOCAL_HASH:
        return None
    return str(long_term["embedding"]["provider"])


def with_peers(
    action: Mapping[str, Any], spec: Mapping[str, Any], names: Iterable[str] | None = None
) -> dict[str, Any]:
    """The definition of an action as a worker gets it: with those servers or peers that it may ask, None for all, and
    with the long-term memory that it works on and the provider that embeds for it.

    `action` and `spec` are in the form of a document with all defaults.
    """
    if action["kind"].startswith("builtin.long_term_memory."):
        whole = {**action, "longTerm": spec["memory"]["longTerm"]}
        provider = embedding_provider(spec, action["kind"])
        return whole if provider is None else {**whole, "embedding": spec["providers"][provider]}
    asked = asked_by(action["kind"])
    if asked is None:
        return dict(action)
    declared = spec[asked[1]]
    return {**action, "peers": {name: declared[name] for name in sorted(declared if names is None else names)}}
