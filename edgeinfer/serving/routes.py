"""The paths of all APIs."""

from edgeinfer.serving.anthropic.routes import ANTHROPIC_ROUTES
from edgeinfer.serving.apis import AnyRoute
from edgeinfer.serving.lora_routes import LORA_ROUTES
from edgeinfer.serving.ollama.routes import OLLAMA_ROUTES
from edgeinfer.serving.openai.routes import OPENAI_ROUTES
from edgeinfer.serving.page.page import Page
from edgeinfer.serving.page.page_routes import page_routes
from edgeinfer.serving.responses.routes import responses_routes
from edgeinfer.serving.responses.store import ResponseStore


def all_routes(page: Page | None) -> tuple[AnyRoute, ...]:
    """The routes of one server, with the state that they share. `page` None: there is no page."""
    apis = (
        *LORA_ROUTES,
        *OPENAI_ROUTES,
        *responses_routes(ResponseStore()),
        *ANTHROPIC_ROUTES,
        *OLLAMA_ROUTES,
    )
    return apis if page is None else (*page_routes(page), *apis)
