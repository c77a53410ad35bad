"""What a product is made of: updates of dependencies, bills of materials, and wheels for many platforms."""

import difflib
import re

from protocol import INTEGER, OBJECTS, TEXT, TEXTS, Json, fields, operation, read_json, read_lines, table, version


def _step(old: str, new: str) -> str:
    """What an update changes at most: `major`, `minor` or `patch`."""
    before, after = version(old), version(new)
    return "major" if after[:1] != before[:1] else "minor" if after[1:2] != before[1:2] else "patch"


@operation(
    "dependencies",
    fields(path=TEXT, index=TEXT, allow=TEXT),
    fields(updated=TEXTS, left=TEXTS, patch=TEXT, report=TEXT),
)
def dependencies(given: Json) -> Json:
    """Pinned requirements against an index of versions: a patch with the newest allowed one that is not yanked."""
    steps = ["patch", "minor", "major"]
    allowed = steps[: steps.index(given["allow"]) + 1]
    index, before = read_json(given["index"]), read_lines(given["path"])
    after, updated, left, rows = [], [], [], []
    for line in before:
        pinned = re.fullmatch(r"([\w.-]+)==([\d.]+)(\s*(?:#.*)?)", line)
        known = index.get(pinned[1], {}) if pinned else {}
        newer = [one for one in known if pinned and not known[one].get("yanked") and version(one) > version(pinned[2])]
        newer.sort(key=version)
        fits = [one for one in newer if pinned and _step(pinned[2], one) in allowed]
        if pinned and fits:
            line = f"{pinned[1]}=={fits[-1]}{pinned[3]}"
            updated.append(f"{pinned[1]} {fits[-1]}")
            fixes = [fix for one in newer if version(one) <= version(fits[-1]) for fix in known[one].get("fixes", [])]
            rows.append([pinned[1], pinned[2], fits[-1], ", ".join(fixes) or "-"])
        if pinned and newer and newer[-1] not in fits:
            left.append(f"{pinned[1]} {newer[-1]}")
        after.append(line)
    path = given["path"]
    diff = difflib.unified_diff(before, after, f"a/{path}", f"b/{path}", lineterm="")
    report = f"# {len(updated)} updates\n\n" + table(["package", "from", "to", "fixes"], rows)
    report += "".join(f"\nLeft for a person: {entry}\n" for entry in left)
    return {"updated": updated, "left": left, "patch": "".join(f"{line}\n" for line in diff), "report": report}


def _components(path: str) -> dict[str, Json]:
    return {component["name"]: component for component in read_json(path)["components"]}


def _licences(component: Json) -> list[str]:
    return [entry["license"]["id"] for entry in component.get("licenses", [])]


@operation(
    "sbom",
    fields(before=TEXT, after=TEXT, advisories=TEXT, deniedLicences=TEXTS),
    fields(critical=INTEGER, added=TEXTS, removed=TEXTS, changed=TEXTS, findings=OBJECTS, report=TEXT),
)
def sbom(given: Json) -> Json:
    """Two bills of materials in CycloneDX JSON: what came, went and changed, and what of it is known to be bad."""
    old, new = _components(given["before"]), _components(given["after"])
    changed = sorted(name for name in old.keys() & new.keys() if old[name]["version"] != new[name]["version"])
    findings = []
    for advisory in read_json(given["advisories"]):
        component = new.get(advisory["name"])
        if component and version(advisory["introduced"]) <= version(component["version"]) < version(advisory["fixed"]):
            known = advisory["name"] in old and advisory["name"] not in changed
            findings.append(
                {
                    "id": advisory["id"],
                    "component": f"{advisory['name']} {component['version']}",
                    "severity": advisory["severity"],
                    "remedy": f"update to {advisory['fixed']}" + (" (was there before)" if known else ""),
                }
            )
    for name in sorted(new):
        for licence in _licences(new[name]):
            if licence in given["deniedLicences"]:
                component = f"{name} {new[name]['version']}"
                found = {"id": licence, "component": component, "severity": "high", "remedy": "replace it"}
                findings.append(found)
    columns = ["severity", "id", "component", "remedy"]
    report = "# Bill of materials\n\n" + table(columns, [[entry[key] for key in columns] for entry in findings])
    report += f"\nNew: {', '.join(sorted(new.keys() - old.keys())) or '-'}\n"
    return {
        "critical": sum(1 for entry in findings if entry["severity"] == "critical"),
        "added": sorted(new.keys() - old.keys()),
        "removed": sorted(old.keys() - new.keys()),
        "changed": [f"{name} {old[name]['version']} -> {new[name]['version']}" for name in changed],
        "findings": findings,
        "report": report,
    }


_PLATFORMS = {"linux": "manylinux", "macos": "macosx", "windows": "win"}


@operation("wheels", fields(path=TEXT, platform=TEXT, python=TEXT), fields(cell=TEXT, wheel=TEXT))
def wheels(given: Json) -> Json:
    """The best file of a release for one platform and one Python; the source archive when no wheel fits."""
    wanted = "cp" + given["python"].replace(".", "")
    best, source = (0, ""), ""
    for name in sorted(read_lines(given["path"])):
        if not name.endswith(".whl"):
            source = name
            continue
        python, abi, platform = name.removesuffix(".whl").split("-")[-3:]
        here = platform.startswith(_PLATFORMS[given["platform"]])
        if wanted == python and here:
            rank = 3
        elif abi == "abi3" and here and version(python[3:]) <= version(wanted[3:]):
            rank = 2
        else:
            rank = int(python.startswith("py3") and platform == "any")
        best = max(best, (rank, name))
    wheel = best[1] if best[0] else source
    return {"cell": f"{given['platform']} {given['python']}", "wheel": wheel}


@operation("wheel-table", fields(items=OBJECTS), fields(report=TEXT))
def wheel_table(given: Json) -> Json:
    """The answers of `wheels` as an aggregate hands them over, in its order."""
    rows = [[item["output"]["cell"], item["output"]["wheel"]] for item in given["items"]]
    return {"report": "# What is installed where\n\n" + table(["where", "file"], rows)}
