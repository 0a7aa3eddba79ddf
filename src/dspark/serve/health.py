"""What the server says of itself: health, version, models, metrics, and the engine's numbers."""

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from dspark.engine.async_engine import EngineStatus
from dspark.serve.errors import ApiError
from dspark.serve.service import Service, service_of
from dspark.version import __version__

router = APIRouter()


@router.api_route("/health", methods=["GET", "HEAD"])
async def health(request: Request) -> JSONResponse:
    """200 while answers are right, also degraded ones with the reason; 503 while no request is taken."""
    status = service_of(request).engine.status()
    body = {"status": status.state, "reason": status.reason}
    return JSONResponse(body, status_code=503 if status.state in ("draining", "dead") else 200)


@router.get("/version")
async def version() -> dict[str, str]:
    """The package's version."""
    return {"version": __version__}


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The served model, once under each of its names."""
    service = service_of(request)
    return {"object": "list", "data": [_card(service, name) for name in service.settings.served_model_names]}


@router.get("/v1/models/{name:path}")
async def show_model(request: Request, name: str) -> dict[str, Any]:
    """One of them."""
    service = service_of(request)
    service.require_model(name)
    return _card(service, name)


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "dspark",
        "root": service.settings.model_name,
        "parent": None,
        "max_model_len": service.engine.max_model_len,
    }


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    service = service_of(request)
    await service.engine.refresh()
    body, content_type = service.metrics.exposition(request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": content_type})


@router.get("/debug/speculation")
async def debug_speculation(request: Request) -> dict[str, Any]:
    """How drafts fare: accepted length, acceptance by draft position, verify lengths, and whether they are made."""
    status = await service_of(request).engine.refresh()
    return {
        "speculation": status.loop.speculation,
        "state": status.state,
        "reason": status.reason,
        "acceptance": status.loop.acceptance.to_dict(),
    }


@router.get("/debug/engine")
async def debug_engine(request: Request) -> dict[str, Any]:
    """The engine's numbers and the settings that it runs with."""
    service = service_of(request)
    status = await service.engine.refresh()
    return {**_numbers(status), "config": _config(service)}


def _numbers(status: EngineStatus) -> dict[str, Any]:
    numbers = status.loop.to_dict()
    return {"state": status.state, "reason": status.reason, "num_requests": status.num_requests, **numbers}


def _config(service: Service) -> dict[str, Any]:
    """Settings without paths, which are no client's business."""
    assembly = service.engine.assembly
    hidden = ("model", "speculative_config", "compilation_config")
    shown = {name: value for name, value in asdict(assembly.config).items() if name not in hidden}
    return {**shown, "max_model_len": assembly.max_model_len, "device": assembly.device}


@router.get("/favicon.ico", include_in_schema=False)
async def favicon() -> Response:
    """Browsers ask for it."""
    raise ApiError(404, "there is no such path on this server", code="not_found")
