"""Reviews of what a team deploys: pipelines, images, manifests, plans, settings and changes."""

import difflib
import re
from typing import Any

from protocol import FLAG, INTEGER, OBJECT, OBJECTS, TEXT, TEXTS, Json, fields, operation, read_json, read_lines, table

Finding = dict[str, Any]


def _finding(where: str | int, rule: str, severity: str, message: str) -> Finding:
    return {"where": str(where), "rule": rule, "severity": severity, "message": message}


def _reviewed(title: str, findings: list[Finding]) -> Json:
    order = {"high": 0, "medium": 1, "low": 2}
    findings = sorted(findings, key=lambda finding: order[finding["severity"]])
    columns = ["severity", "where", "rule", "message"]
    report = f"# {title}: {len(findings)} findings\n\n"
    report += table(columns, [[finding[column] for column in columns] for finding in findings])
    high = sum(1 for finding in findings if finding["severity"] == "high")
    return {"high": high, "findings": findings, "report": report}


def _patch(path: str, before: list[str], after: list[str]) -> str:
    lines = difflib.unified_diff(before, after, f"a/{path}", f"b/{path}", lineterm="")
    return "".join(f"{line}\n" for line in lines)


REVIEW = {"high": INTEGER, "findings": OBJECTS, "report": TEXT}


@operation("pipeline", fields(path=TEXT, trustedOwners=TEXTS), fields(**REVIEW))
def pipeline(given: Json) -> Json:
    """A pipeline in the syntax of GitHub Actions, line by line: what runs foreign code or lets it do too much."""
    path, trusted = given["path"], given["trustedOwners"]
    lines = read_lines(path)
    found = []
    for number, line in enumerate(lines, 1):
        where = f"{path}:{number}"
        used = re.search(r"uses:\s*([\w.-]+)/[\w./-]+@(\S+)", line)
        if used and used[1] not in trusted and not re.fullmatch(r"[0-9a-f]{40}", used[2]):
            found.append(_finding(where, "pinned-action", "high", f"{used[0]} can be moved; name a commit"))
        if re.search(r"permissions:\s*write-all", line):
            found.append(_finding(where, "permissions", "high", "every job may change everything"))
        if re.search(r"\$\{\{\s*github\.(event\.|head_ref)", line) and not re.match(r"\s*(if|\w+_\w+):", line):
            found.append(_finding(where, "injection", "high", "text of a stranger becomes part of a command"))
        if re.search(r"(curl|wget)\b.*\|\s*(ba|z)?sh\b", line):
            found.append(_finding(where, "pipe-to-shell", "medium", "what is loaded is executed unseen"))
    if not any(re.match(r"\s*timeout-minutes:", line) for line in lines):
        found.append(_finding(path, "timeout", "low", "no job has a time limit"))
    if not any(re.match(r"permissions:", line) for line in lines):
        found.append(_finding(path, "permissions", "medium", "the default permissions of the token hold"))
    return _reviewed(path, found)


@operation("dockerfile", fields(path=TEXT), fields(**REVIEW, patch=TEXT))
def dockerfile(given: Json) -> Json:
    """A Dockerfile: findings, and a patch for those that have only one answer."""
    path = given["path"]
    before = read_lines(path)
    after = list(before)
    found = []
    words = [line.split() for line in before]
    for number, line in enumerate(before, 1):
        where = f"{path}:{number}"
        head, _, rest = line.strip().partition(" ")
        if head == "FROM" and "@sha256:" not in rest and (":" not in rest or ":latest" in rest):
            found.append(_finding(where, "moving-tag", "high", f"{rest.split()[0]} is another image tomorrow"))
        if head == "ADD" and not re.search(r"://|\.tar", rest):
            found.append(_finding(where, "add-for-copy", "low", "ADD does more than this needs"))
            after[number - 1] = line.replace("ADD", "COPY", 1)
        if head == "ENV" and re.search(r"(PASSWORD|SECRET|TOKEN|KEY)\w*[ =]", rest):
            found.append(_finding(where, "secret-in-image", "high", "whoever has the image has the secret"))
        if "apt-get install" in line and "--no-install-recommends" not in line:
            found.append(_finding(where, "recommends", "low", "packages come along that nobody has asked for"))
            after[number - 1] = after[number - 1].replace("install", "install --no-install-recommends", 1)
    users = [line[1] for line in words if len(line) > 1 and line[0] == "USER"]
    if not users or users[-1] in ("root", "0"):
        found.append(_finding(path, "root", "high", "the process runs as root"))
    return {**_reviewed(path, found), "patch": _patch(path, before, after)}


def _containers(manifest: Json) -> tuple[Json, list[Json]]:
    pod = manifest["spec"].get("template", {}).get("spec", {})
    return pod, pod.get("containers", [])


@operation("kubernetes", fields(path=TEXT, minReplicas=INTEGER), fields(**REVIEW))
def kubernetes(given: Json) -> Json:
    """Manifests as `kubectl get -o json` or `kustomize build -o json` write them: a `List`."""
    items = read_json(given["path"])["items"]
    found = []
    labels = [item["spec"]["template"]["metadata"].get("labels", {}) for item in items if item["kind"] == "Deployment"]
    for item in items:
        where = f"{item['kind']}/{item['metadata']['name']}"
        if item["kind"] == "Service":
            wanted = item["spec"].get("selector", {}).items()
            if not any(wanted <= label.items() for label in labels):
                found.append(_finding(where, "selector", "high", "it selects no pod of these manifests"))
            continue
        if item["kind"] != "Deployment":
            continue
        if item["spec"].get("replicas", 1) < given["minReplicas"]:
            found.append(_finding(where, "replicas", "medium", f"fewer than {given['minReplicas']} replicas"))
        pod, containers = _containers(item)
        if any("hostPath" in volume for volume in pod.get("volumes", [])):
            found.append(_finding(where, "host-path", "high", "a folder of the node is mounted"))
        for container in containers:
            place = f"{where}/{container['name']}"
            security = {**pod.get("securityContext", {}), **container.get("securityContext", {})}
            if security.get("privileged"):
                found.append(_finding(place, "privileged", "high", "it can do what the node can do"))
            if not security.get("runAsNonRoot"):
                found.append(_finding(place, "root", "medium", "it may run as root"))
            if "memory" not in container.get("resources", {}).get("limits", {}):
                found.append(_finding(place, "limits", "medium", "its memory has no limit"))
            if "readinessProbe" not in container:
                found.append(_finding(place, "probe", "low", "it gets requests before it is ready"))
            if re.search(r":latest$|^[^:@]+$", container["image"]):
                found.append(_finding(place, "moving-tag", "high", f"{container['image']} is another image tomorrow"))
    return _reviewed(given["path"], found)


@operation(
    "terraform-plan",
    fields(path=TEXT, protected=TEXTS),
    fields(create=INTEGER, update=INTEGER, replace=INTEGER, delete=INTEGER, endangered=TEXTS, report=TEXT),
)
def terraform_plan(given: Json) -> Json:
    """The JSON of `terraform show -json PLAN`: what changes, and which protected resources would be lost."""
    counts = {"create": 0, "update": 0, "replace": 0, "delete": 0}
    endangered, rows = [], []
    for item in read_json(given["path"])["resource_changes"]:
        actions = item["change"]["actions"]
        kind = "replace" if len(actions) == 2 else actions[0]
        if kind not in counts:  # no-op, read
            continue
        counts[kind] += 1
        before, after = item["change"].get("before") or {}, item["change"].get("after") or {}
        hidden = {**(item["change"].get("before_sensitive") or {}), **(item["change"].get("after_sensitive") or {})}
        changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        shown = ", ".join(f"{name} (hidden)" if hidden.get(name) else name for name in changed)
        rows.append([kind, item["address"], shown])
        if kind in ("delete", "replace") and item["type"] in given["protected"]:
            endangered.append(item["address"])
    title = ", ".join(f"{number} {kind}" for kind, number in counts.items())
    report = f"# Plan: {title}\n\n" + table(["action", "resource", "attributes"], rows)
    report += "".join(f"\n**Data would be lost: {address}**\n" for address in endangered)
    return {**counts, "endangered": endangered, "report": report}


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {key: leaf for name in value for key, leaf in _flat(value[name], f"{path}.{name}").items()}
    return {path.removeprefix("."): value}


@operation("drift", fields(wanted=OBJECT, path=TEXT, ignored=TEXTS), fields(drifted=TEXTS, report=TEXT))
def drift(given: Json) -> Json:
    """What is set against what is wanted, setting by setting."""
    wanted, found = _flat(given["wanted"]), _flat(read_json(given["path"]))
    rows = []
    for name in sorted(wanted.keys() | found.keys()):
        if name in given["ignored"] or (name in wanted and name in found and wanted[name] == found[name]):
            continue
        rows.append([name, wanted.get(name, "(not wanted)"), found.get(name, "(missing)")])
    report = f"# {len(rows)} settings have drifted\n\n" + table(["setting", "wanted", "found"], rows)
    return {"drifted": [row[0] for row in rows], "report": report}


@operation(
    "diff-stat",
    fields(path=TEXT, sensitive=TEXTS),
    fields(files=TEXTS, added=INTEGER, removed=INTEGER, sensitive=FLAG, summary=TEXT),
)
def diff_stat(given: Json) -> Json:
    """A unified diff in numbers, and whether it touches a place where two people should look."""
    files, added, removed = [], 0, 0
    for line in read_lines(given["path"]):
        if line.startswith("+++ "):
            files.append(line[4:].split("\t")[0].removeprefix("b/"))
        elif line.startswith("+"):
            added += 1
        elif line.startswith("-") and not line.startswith("--- "):
            removed += 1
    touched = any(file.startswith(place) for file in files for place in given["sensitive"])
    summary = f"{len(files)} files, {added} lines added, {removed} removed: {', '.join(files)}"
    return {"files": files, "added": added, "removed": removed, "sensitive": touched, "summary": summary}
