"""The paths of all APIs."""

from edgeinfer.serving.anthropic.routes import ANTHROPIC_ROUTES
from edgeinfer.serving.apis import AnyRoute
from edgeinfer.serving.openai.routes import OPENAI_ROUTES

ROUTES: tuple[AnyRoute, ...] = (*OPENAI_ROUTES, *ANTHROPIC_ROUTES)
