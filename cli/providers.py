"""Verbs about model providers: what each kind can do, and whether credentials are there (contract 4.12)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from .documents import Sources, compile_file, source_options, without_plugins
from .main import Settings, Verb, VerbGroup, pass_settings
from .preflight import providers_of, reached
from .render import Printer, clean

if TYPE_CHECKING:
    from agentctl.coordinator.plan import Plan

EXIT_MISSING = 6


@click.group(cls=VerbGroup)
def providers() -> None:
    """Model providers: what each kind can do."""


@providers.command(cls=Verb)
@click.argument("kind", required=False)
@pass_settings
def inspect(settings: Settings, kind: str | None) -> None:
    """Show what each kind of provider can do, which options it takes, and what it needs."""
    data = {"providers": [item for item in capabilities() if kind in (None, item["kind"])]}
    if kind is not None and not data["providers"]:
        known = ", ".join(item["kind"] for item in capabilities())
        raise click.UsageError(f"there is no provider kind {kind!r}; the kinds are {known}")

    def human(out: Printer) -> None:
        for item in data["providers"]:
            state = "installed" if item["installed"] else f"not installed: pip install 'agentctl[{item['extra']}]'"
            out.line(f"{item['kind']}  ({state if item['extra'] else 'always there'})")
            out.line(f"  capabilities  {', '.join(item['capabilities'])}")
            if item["options"]:
                out.line(f"  options       {', '.join(item['options'])}")
            out.line(f"  credential    {item['defaultCredential'] or 'none needed'}")
            out.line(f"  endpoint      {item['defaultEndpoint'] or item['endpointRule']}")

    Printer(settings).result("ProviderCapabilities", data, human)


def capabilities() -> list[dict[str, Any]]:
    """The facts of each kind of provider, in a stable order. Nothing is sent."""
    from importlib.util import find_spec

    with without_plugins():
        from agentctl.coordinator.capabilities import CAPABILITIES, OPTIONS
    from agentctl.worker.providers.exchange import DEFAULT_CREDENTIALS, DEFAULT_ENDPOINTS

    library = find_spec("httpx") is not None
    rules = {"fake": "none", "azure_openai": "required", "openai_compatible": "required"}
    found = []
    for kind, offered in CAPABILITIES.items():
        extra = None if kind == "fake" else "openai" if "openai" in kind else kind
        found.append(
            {
                "kind": kind,
                "capabilities": sorted({"text", "usage", "cancellation", *offered}),
                "options": sorted(OPTIONS.get(kind, {})),
                "extra": extra,
                "installed": extra is None or library,
                "defaultCredential": DEFAULT_CREDENTIALS.get(kind),
                "defaultEndpoint": DEFAULT_ENDPOINTS.get(kind),
                "endpointRule": rules.get(kind, "optional"),
            }
        )
    return found


@click.group(cls=VerbGroup)
def auth() -> None:
    """Credentials of model providers."""


@auth.command(cls=Verb)
@click.argument("file", type=click.Path())
@source_options
@pass_settings
@click.pass_context
def check(context: click.Context, settings: Settings, file: str, sources: Sources) -> None:
    """Check that the credentials of each provider that FILE uses can be read here. No value is shown, nothing is sent.

    Exit 6 when one is missing, 3 when the policy denies one and none is missing.
    """
    document, plan = compile_file(file, sources.inputs(), sources)
    found = _checked(document.workflow["spec"], plan, os.path.realpath(document.base_dir))
    problems = [entry for item in found for entry in item["secrets"] if entry["status"] != "ok"]

    def human(out: Printer) -> None:
        if not found:
            out.line("no provider is declared")
        for item in found:
            out.line(f"{clean(item['provider'])}  ({item['kind']})")
            if not item["used"]:
                out.line("  not used: no task of this document reaches it")
            elif not item["secrets"]:
                out.line("  needs no credential")
            for entry in item["secrets"]:
                note = f": {clean(entry['detail'])}" if entry["detail"] else ""
                out.line(f"  {clean(entry['name'])}  {entry['status']}  from {clean(entry['source'])}{note}")
                if entry["remedy"]:
                    out.line(f"    {clean(entry['remedy'])}")

    Printer(settings).result("AuthCheck", {"valid": not problems, "providers": found}, human)
    if problems:
        context.exit(EXIT_MISSING if any(entry["status"] == "missing" for entry in problems) else 3)


def _checked(spec: dict[str, Any], plan: Plan, base: str) -> list[dict[str, Any]]:
    """The secrets of each declared provider; those that no task reaches are named, and nothing of them is read."""
    from agentctl.store.policy import Policy
    from agentctl.worker.preflight import provider_service, secret_problem

    used = providers_of(spec, *reached(spec, plan.tasks.values()))
    policy = Policy.from_json(plan.policy)
    workspace = os.path.realpath(os.path.join(base, policy.workspace_root))
    found: list[dict[str, Any]] = []
    for name, definition in spec["providers"].items():
        if name not in used:
            found.append({"provider": name, "kind": definition["kind"], "used": False, "secrets": []})
            continue
        service = provider_service(name, definition)
        entries = []
        for place, reference in () if service is None else service.secrets.items():
            fault = secret_problem(reference, policy, workspace, definition["kind"])
            status = "ok" if fault is None else "denied" if fault.code == "policy_denied" else "missing"
            entries.append(
                {
                    "name": place,
                    "source": source_text(reference),
                    "status": status,
                    "detail": None if fault is None else fault.message,
                    "remedy": None if fault is None else (fault.details or {}).get("remediation"),
                }
            )
        found.append({"provider": name, "kind": definition["kind"], "used": True, "secrets": entries})
    return found


def source_text(reference: Mapping[str, Any]) -> str:
    """Where a secret comes from, as records tell it: `env:NAME`, `file:PATH`, `process:COMMAND`."""
    if reference.get("env") is not None:
        return f"env:{reference['env']}"
    if reference.get("file") is not None:
        return f"file:{reference['file']}"
    return f"process:{(reference.get('process') or {}).get('command')}"
