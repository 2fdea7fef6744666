"""The paths of all APIs."""

from edgeinfer.serving.openai.routes import OPENAI_ROUTES

ROUTES = (*OPENAI_ROUTES,)
