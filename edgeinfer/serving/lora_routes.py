"""The path of LoRA adapters, as llama-server has it: which are loaded, and their scales."""

import asyncio
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgeinfer.errors import shown
from edgeinfer.model import Model
from edgeinfer.options.lora_option import LoraChoice
from edgeinfer.serving.apis import AnyRoute, PlainRoute, Server
from edgeinfer.serving.completion.requests import json_of
from edgeinfer.serving.fields import KnownFields, RequestError, check_fields, checked_list
from edgeinfer.serving.transport.bodies import read_body

MAX_BYTES = 1 << 16
MAX_ADAPTERS = 256
ENTRY = KnownFields(frozenset(("id", "scale")))


async def _adapters(request: Request, server: Server) -> Response:
    """GET: the adapters with their scales. POST: [{"id": 0, "scale": 0.5}], after which those that aren't
    listed have the scale 0. `?model=` names one of several models.
    """
    scales = None
    if request.method == "POST":
        scales = _scales(json_of(await read_body(request, MAX_BYTES)))
    lease = await server.models.acquire(request.query_params.get("model", ""))
    try:
        if scales is not None:
            await asyncio.to_thread(_set, lease.model, scales)
        return JSONResponse(_listed(lease.model.lora))
    finally:
        lease.release()


def _listed(adapters: Sequence[LoraChoice]) -> list[dict[str, Any]]:
    return [
        {"id": number, "path": str(each.path), "scale": each.scale} for number, each in enumerate(adapters)
    ]


def _scales(body: Any) -> dict[int, float]:
    """Number of an adapter -> its scale. Raises `RequestError`."""
    expected = 'a list of {"id": number, "scale": number}'
    if not isinstance(body, list):
        raise RequestError(f"the body: saw {shown(body)}, wanted {expected}")
    scales: dict[int, float] = {}
    for entry in checked_list(body, "the body", MAX_ADAPTERS, expected):
        if not isinstance(entry, dict):
            raise RequestError(f"the body: saw {shown(entry)}, wanted {expected}")
        check_fields(entry, ENTRY)
        number, scale = entry.get("id"), entry.get("scale")
        if type(number) is not int or number in scales:
            raise RequestError(f"id: saw {shown(number)}, wanted the number of an adapter, once", param="id")
        if isinstance(scale, bool) or not isinstance(scale, int | float):
            raise RequestError(f"scale: saw {shown(scale)}, wanted a number", param="scale")
        scales[number] = float(scale)
    return scales


def _set(model: Model, scales: dict[int, float]) -> None:
    adapters = model.lora
    unknown = next((number for number in scales if not 0 <= number < len(adapters)), None)
    if unknown is not None:
        known = f"0 to {len(adapters) - 1}" if adapters else "none: the server was started without --lora"
        raise RequestError(f"id: saw {unknown}, wanted {known}", param="id")
    model.set_lora([(each.path, scales.get(number, 0.0)) for number, each in enumerate(adapters)])


LORA_ROUTES: tuple[AnyRoute, ...] = (PlainRoute("/lora-adapters", _adapters, ("GET", "POST")),)
