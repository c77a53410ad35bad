"""The process extension of the DevOps examples: `python3 ../helper/devops.py OPERATION`, standard library only.

agentctl adds `--agentctl-handshake` or `--agentctl-invoke`. The operations are the functions of the modules beside this
one that carry an `operation` mark; each says what it takes and gives, and the workflow says the same.
"""

import importlib
import sys

from protocol import OPERATIONS, serve

MODULES = {
    "junit": "evidence",
    "ci-log": "evidence",
    "timeline": "evidence",
    "citations": "evidence",
    "pipeline": "reviews",
    "dockerfile": "reviews",
    "kubernetes": "reviews",
    "terraform-plan": "reviews",
    "drift": "reviews",
    "diff-stat": "reviews",
    "dependencies": "supply",
    "sbom": "supply",
    "wheels": "supply",
    "wheel-table": "supply",
    "changes": "releases",
    "readiness": "releases",
    "canary": "releases",
    "install": "rollout",
    "step": "rollout",
    "build": "rollout",
    "test": "rollout",
    "remediate": "rollout",
}


def main(arguments: list[str]) -> int:
    """Answer one question of agentctl."""
    if len(arguments) != 2 or arguments[0] not in MODULES:
        print(f"usage: devops.py OPERATION QUESTION, with one of {', '.join(MODULES)}", file=sys.stderr)
        return 2
    importlib.import_module(MODULES[arguments[0]])
    return serve(OPERATIONS[arguments[0]], arguments[1], sys.stdin, sys.stdout)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
