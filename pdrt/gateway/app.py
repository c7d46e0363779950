"""The HTTP application: routes, and what surrounds every one of them."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp

from pdrt.config import GatewayConfig
from pdrt.gateway.admission import Admission
from pdrt.gateway.completions import Completions
from pdrt.gateway.compression import Compression
from pdrt.gateway.errors import ApiError
from pdrt.gateway.http import (
    OPEN_PATHS,
    ApiKey,
    RequestIds,
    on_api_error,
    on_bug,
    on_http_error,
)
from pdrt.gateway.hub import Hub
from pdrt.gateway.openapi import openapi
from pdrt.gateway.operations import Operations
from pdrt.gateway.origins import Origins
from pdrt.gateway.page import page_routes
from pdrt.gateway.served_model import ServedModel
from pdrt.gateway.tokenization import Tokenization


def build_app(hub: Hub, model: ServedModel, config: GatewayConfig) -> ASGIApp:
    """Everything a client can reach."""
    page = page_routes()
    app = Starlette(
        routes=[*api_routes(hub, model, config), *page],
        middleware=_keys(config.api.api_key, OPEN_PATHS | {route.path for route in page}),
        exception_handlers={
            ApiError: on_api_error,
            HTTPException: on_http_error,
            Exception: on_bug,
        },
    )
    # Outside of the keys: browsers ask beforehand, and send none then.
    origins = config.api.cors_origin
    return RequestIds(_with_cors(Origins(Compression(app), origins), origins))


def api_routes(hub: Hub, model: ServedModel, config: GatewayConfig) -> list[Route]:
    """Every route that `openapi` describes."""
    admission = Admission(hub, model.identity, config)
    completions = Completions(hub, model, admission, config)
    tokenization = Tokenization(model, admission, config)
    operations = Operations(hub, model, openapi(model.name, bool(config.api.api_key), OPEN_PATHS))
    return [
        Route("/v1/chat/completions", completions.chat, methods=["POST"]),
        Route("/v1/completions", completions.completion, methods=["POST"]),
        Route("/tokenize", tokenization.tokenize, methods=["POST"]),
        Route("/detokenize", tokenization.detokenize, methods=["POST"]),
        Route("/v1/models", operations.models),
        Route("/v1/models/{model:path}", operations.model),
        Route("/version", operations.version),
        Route("/openapi.json", operations.openapi),
        Route("/health", operations.health),
        Route("/ready", operations.ready),
        Route("/metrics", operations.metrics),
        Route("/status", operations.status),
        Route("/workers/{worker}/drain", operations.drain, methods=["POST"]),
        Route("/workers/{worker}/gone", operations.gone, methods=["POST"]),
        Route("/debug/check", operations.check),
    ]


def _keys(keys: tuple[str, ...], open_paths: frozenset[str]) -> list[Middleware]:
    return [Middleware(ApiKey, keys=keys, open_paths=open_paths)] if keys else []


def _with_cors(app: ASGIApp, origins: tuple[str, ...]) -> ASGIApp:
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "x-pdrt-decode", "x-pdrt-prefill", "retry-after"],
    )
