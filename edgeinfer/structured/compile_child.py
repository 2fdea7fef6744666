"""A child process that compiles grammars line by line: a stack overflow or endless loop ends only this
process.

`compiler.py` runs it by path: it imports llguidance and nothing of edgeinfer. Stdin has one JSON object per
line, {"kind", "text", "overrides"}; stdout one per line, {"compiled"} or {"error"}. The arguments are folders
to import from.
"""

import json
import sys
import threading
from typing import Any

MAX_CPU_SECONDS = 4.0
MAX_MEMORY_BYTES = 3 << 30
STACK_BYTES = (1 if sys.platform == "win32" else 4) << 20
"""Half of the default stack of threads, which is 2 MB on Windows: what fits here also fits there."""


def main() -> None:
    """Serve requests until stdin ends."""
    sys.path.extend(sys.argv[1:])
    _limit_memory()
    threading.stack_size(STACK_BYTES)
    tokens = byte_tokens()
    for line in sys.stdin:
        reply: list[dict[str, str]] = []
        worker = threading.Thread(target=lambda line=line, reply=reply: reply.append(_compiled(line, tokens)))
        _limit_cpu(MAX_CPU_SECONDS)
        worker.start()
        worker.join()
        _limit_cpu(0)
        print(json.dumps(reply[0]), flush=True)


def _compiled(line: str, tokens: Any) -> dict[str, str]:
    import llguidance

    request = json.loads(line)
    matcher = llguidance.LLMatcher
    try:
        if request["kind"] == "schema":
            compiled = matcher.grammar_from_json_schema(request["text"], overrides=request["overrides"])
        else:
            compiled = llguidance.grammar_from("grammar", request["text"])
    except (ValueError, RecursionError) as error:
        return {"error": str(error)}
    failed, messages = matcher.validate_grammar_with_warnings(str(compiled), tokens)
    if failed:
        return {"error": str(messages[0])}
    first = matcher(tokens, str(compiled), log_level=0)
    first.compute_bitmask()
    return {"error": first.get_error()} if first.is_error() else {"compiled": str(compiled)}


def byte_tokens() -> Any:
    """A vocabulary of the 256 bytes and an end token: compilation hardly depends on the vocabulary."""
    import llguidance

    class Bytes:
        eos_token_id = 256
        bos_token_id = None
        special_token_ids = (256,)
        tokens = (*(bytes([byte]) for byte in range(256)), b"</s>")

        def __call__(self, text: bytes) -> list[int]:
            return list(text)

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()), n_vocab=257, eos_token=[256])


def _limit_memory() -> None:
    if sys.platform != "win32":
        import resource

        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        if hard == resource.RLIM_INFINITY or hard > MAX_MEMORY_BYTES:
            resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, hard))


def _limit_cpu(seconds: float) -> None:
    """Set the CPU time limit of this process; 0: no further CPU time."""
    if sys.platform != "win32":
        import signal

        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)


if __name__ == "__main__":
    main()
