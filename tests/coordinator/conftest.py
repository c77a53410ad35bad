"""Helpers of the compiler's tests: documents from text, without files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agentctl.coordinator.compiler import compile_workflow
from agentctl.coordinator.definition import LoadedDocument, document_from_source
from agentctl.coordinator.plan import Plan
from agentctl.coordinator.variables import capture
from agentctl.coordinator.yaml_document import parse_document

HEAD = "apiVersion: agentctl.dev/v1\nkind: Workflow\nmetadata: {name: demo}\nspec:\n"

Load = Callable[[str], LoadedDocument]
Build = Callable[..., Plan]


def load_text(text: str) -> LoadedDocument:
    return document_from_source(parse_document(text.encode(), "flow.yaml"), base_dir=Path("/base"))


def build_spec(spec: str, *, variables: dict[str, Any] | None = None, **options: Any) -> Plan:
    document = load_text(HEAD + spec)
    return compile_workflow(capture(document, pairs=variables) if variables else document, **options)


@pytest.fixture(scope="session")
def load() -> Load:
    """A whole document, checked."""
    return load_text


@pytest.fixture(scope="session")
def build() -> Build:
    """The plan of a `spec`, given as indented YAML."""
    return build_spec
