"""What is recorded of requests: metrics in Prometheus' format, and a log line for each, without its text."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgeinfer.results import Generation

RECORD = "edgeinfer.record"
"""Key of a request's record in its scope."""
CLIENT_LEFT = 499
"""HTTP status that is logged when a client disconnects."""
MAX_PATH = 80
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_RATES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)
_OF_MODEL = ("model",)


@dataclass
class RequestRecord:
    """What is known of a request. `route`: the path of the server that it matched."""

    route: str = "other"
    model: str = ""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    status: int = CLIENT_LEFT
    is_logged: bool = True
    began: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """Seconds since the request came."""
        return time.perf_counter() - self.began


class Metrics:
    """Counters of one server."""

    def __init__(self, waiting: Callable[[], int], loaded: Callable[[], int]) -> None:
        """`waiting`: requests in the queue; `loaded`: models in memory."""
        self._registry = CollectorRegistry()
        registry = self._registry
        self._requests = Counter("edgeinfer_requests", "Requests.", ["route", "status"], registry=registry)
        self._seconds = Histogram(
            "edgeinfer_request_seconds",
            "Seconds of a request.",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._prompt = Counter("edgeinfer_prompt_tokens", "Tokens of prompts.", _OF_MODEL, registry=registry)
        self._cached = Counter(
            "edgeinfer_cached_prompt_tokens", "Prompt tokens from a cache.", _OF_MODEL, registry=registry
        )
        self._generated = Counter(
            "edgeinfer_generated_tokens", "Generated tokens.", _OF_MODEL, registry=registry
        )
        self._first = Histogram(
            "edgeinfer_first_token_seconds", "Seconds to the first token.", _OF_MODEL, buckets=_SECONDS,
            registry=registry,
        )  # fmt: skip
        self._rate = Histogram(
            "edgeinfer_tokens_per_second", "Decode speed of a completion.", _OF_MODEL, buckets=_RATES,
            registry=registry,
        )  # fmt: skip
        Gauge("edgeinfer_requests_waiting", "Requests in the queue.", registry=self._registry).set_function(
            waiting
        )
        Gauge("edgeinfer_models_loaded", "Models in memory.", registry=self._registry).set_function(loaded)

    def completed(self, model: str, completion: Generation) -> None:
        """Count a completion."""
        speed = completion.speed
        self._prompt.labels(model).inc(len(completion.prompt_ids))
        self._cached.labels(model).inc(speed.cached_tokens)
        self._generated.labels(model).inc(len(completion.ids))
        self._first.labels(model).observe(speed.seconds_to_first_token)
        if speed.decode_tokens_per_second:
            self._rate.labels(model).observe(speed.decode_tokens_per_second)

    def ended(self, record: RequestRecord) -> None:
        """Count a request."""
        self._requests.labels(record.route, str(record.status)).inc()
        self._seconds.labels(record.route).observe(record.seconds)

    def text(self) -> tuple[bytes, str]:
        """All metrics, and their media type."""
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4


class Recorder:
    """Middleware that records each request when its response has been sent."""

    def __init__(self, app: ASGIApp, metrics: Metrics, log: Callable[[str], None]) -> None:
        self._app, self._metrics, self._log = app, metrics, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope[RECORD] = RequestRecord()

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, sent)
        finally:
            self._metrics.ended(record)
            if record.is_logged:
                self._log(log_line(scope, record))


def log_line(scope: Scope, record: RequestRecord) -> str:
    """For example `POST /v1/completions 200, tiny, 12 + 34 tokens, 0.51 s`."""
    path = scope["path"][:MAX_PATH].encode("ascii", "backslashreplace").decode()
    shown = "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in path)
    parts = [f"{scope['method']} {shown} {record.status}"]
    if record.model:
        parts += [record.model, f"{record.prompt_tokens} + {record.generated_tokens} tokens"]
    return ", ".join([*parts, f"{record.seconds:.2f} s"])
