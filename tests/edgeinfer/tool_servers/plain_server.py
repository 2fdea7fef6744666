"""A tool server over standard input and output that starts at once: mcp's takes 0.7 s to import.

Its tools are `add`, and `wait`, which never returns.
"""

import json
import sys
from typing import Any

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [
    {"name": "add", "description": "Add two numbers.", "inputSchema": NUMBERS},
    {"name": "wait", "description": "Return after an hour.", "inputSchema": {"type": "object"}},
]


def result_of(method: str, parameters: dict[str, Any]) -> dict[str, Any] | None:
    """What a request returns; None: nothing yet. Raises KeyError for a method that it lacks."""
    match method, parameters.get("name"):
        case "initialize", _:
            version = parameters["protocolVersion"]
            server = {"name": "test", "version": "1"}
            return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server}
        case "tools/list", _:
            return {"tools": TOOLS}
        case "tools/call", "add":
            text = str(parameters["arguments"]["a"] + parameters["arguments"]["b"])
            return {"content": [{"type": "text", "text": text}]}
        case "tools/call", "wait":
            return None
    raise KeyError(method)


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request:
            continue
        response: dict[str, Any] = {"jsonrpc": "2.0", "id": request["id"]}
        try:
            result = result_of(request["method"], request.get("params", {}))
        except KeyError as error:
            response["error"] = {"code": -32601, "message": f"no method {error}"}
        else:
            if result is None:
                continue
            response["result"] = result
        print(json.dumps(response), flush=True)


if __name__ == "__main__":
    main()
