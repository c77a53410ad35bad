"""A process extension: mean and median of some numbers. Standard library only; see `extension.yaml`."""

import json
import statistics
import sys

PROTOCOL = "agentctl.dev/process-extension/v1"
CONTRACT = {
    "protocolVersion": PROTOCOL,
    "name": "statistics",
    "capabilities": ["arithmetic"],
    "inputSchema": {
        "type": "object",
        "properties": {"numbers": {"type": "array", "items": {"type": "number"}, "minItems": 1}},
        "required": ["numbers"],
        "additionalProperties": False,
    },
    "outputSchema": {
        "type": "object",
        "properties": {"mean": {"type": "number"}, "median": {"type": "number"}},
        "required": ["mean", "median"],
        "additionalProperties": False,
    },
}


def main() -> None:
    if sys.argv[-1] == "--agentctl-handshake":
        print(json.dumps(CONTRACT))
        return
    call = json.load(sys.stdin)
    numbers = call["input"]["numbers"]
    output = {"mean": statistics.fmean(numbers), "median": statistics.median(numbers)}
    print(json.dumps({"protocolVersion": PROTOCOL, "effectId": call["effectId"], "output": output}))


if __name__ == "__main__":
    main()
