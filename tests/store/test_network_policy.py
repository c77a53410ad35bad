"""The one decision about a connection (contract 1.8 and 11.2)."""

from __future__ import annotations

from typing import Any

import pytest
from agentctl.store.policy import Policy, decide_connection, host_allowed, special_address


def policy(*hosts: str, **network: Any) -> Policy:
    return Policy.from_json({"networkAllowlist": list(hosts), "network": network})


@pytest.mark.parametrize(
    ("entry", "host", "allowed"),
    [
        ("api.example.com", "api.example.com", True),
        ("api.example.com", "API.Example.COM", True),
        ("api.example.com", "api.example.com.", True),
        ("api.example.com", "xapi.example.com", False),
        ("api.example.com", "a.api.example.com", False),
        ("*.example.com", "api.example.com", True),
        ("*.example.com", "a.b.example.com", True),
        ("*.example.com", "example.com", False),
        ("*.example.com", "badexample.com", False),
        ("*.example.com", "example.com.evil.org", False),
        ("*", "example.com", False),
        ("*.", "example.com", False),
        ("", "", False),
        ("::1", "[::1]", True),
        ("[::1]", "::1", True),
        ("*.0.0.1", "127.0.0.1", False),
        ("bücher.example", "xn--bcher-kva.example", True),
    ],
)
def test_hosts(entry: str, host: str, allowed: bool) -> None:
    assert host_allowed(policy(entry), host) is allowed


def test_nothing_is_allowed_by_default() -> None:
    decision = decide_connection(policy(), scheme="https", host="example.com", port=443)
    assert decision.denied
    assert "networkAllowlist" in decision.reason


@pytest.mark.parametrize(
    ("network", "scheme", "port", "named"),
    [
        ({}, "ftp", 21, "allowedSchemes"),
        ({"allowedSchemes": ["https"]}, "http", 80, "allowedSchemes"),
        ({"allowedPorts": [443]}, "https", 8443, "allowedPorts"),
    ],
)
def test_schemes_and_ports(network: dict[str, Any], scheme: str, port: int, named: str) -> None:
    decision = decide_connection(policy("h", **network), scheme=scheme, host="h", port=port)
    assert decision.denied
    assert named in decision.reason


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("127.0.0.1", "loopback"),
        ("127.255.255.254", "loopback"),
        ("::1", "loopback"),
        ("10.1.2.3", "private"),
        ("172.16.0.1", "private"),
        ("172.31.255.255", "private"),
        ("192.168.1.1", "private"),
        ("fd00::1", "private"),
        ("169.254.169.254", "link-local"),
        ("fe80::1", "link-local"),
        ("fe80::1%eth0", "link-local"),
        ("100.64.0.1", "shared"),
        ("192.0.2.1", "documentation"),
        ("198.51.100.1", "documentation"),
        ("203.0.113.1", "documentation"),
        ("2001:db8::1", "documentation"),
        ("3fff::1", "documentation"),
        ("198.18.0.1", "benchmark"),
        ("2001:2::1", "benchmark"),
        ("0.0.0.0", "unspecified"),
        ("::", "unspecified"),
        ("224.0.0.1", "multicast"),
        ("ff02::1", "multicast"),
        ("240.0.0.1", "reserved"),
        ("255.255.255.255", "reserved"),
        ("5000::1", "reserved"),
        ("::ffff:127.0.0.1", "loopback"),
        ("::ffff:10.0.0.1", "private"),
        ("64:ff9b::7f00:1", "loopback"),
        ("2002:0a00:0001::1", "private"),
        ("8.8.8.8", None),
        ("172.32.0.1", None),
        ("100.128.0.1", None),
        ("2606:4700::1111", None),
        ("::ffff:8.8.8.8", None),
    ],
)
def test_addresses(address: str, kind: str | None) -> None:
    assert special_address(address) == kind
    decision = decide_connection(policy("h"), scheme="https", host="h", port=443, addresses=[address])
    assert decision.allowed is (kind is None)
    allowed = policy("h", allowPrivate=True)
    assert decide_connection(allowed, scheme="https", host="h", port=443, addresses=[address]).allowed


def test_one_private_address_among_public_ones_refuses_all() -> None:
    decision = decide_connection(
        policy("h"), scheme="https", host="h", port=443, addresses=["8.8.8.8", "10.0.0.7", "8.8.4.4"]
    )
    assert decision.denied
    assert "10.0.0.7" in decision.reason
    assert "allowPrivate" in decision.reason
