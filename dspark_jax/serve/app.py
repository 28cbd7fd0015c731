"""The HTTP side: routes, bodies, event streams, errors."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from dspark_jax.serve.errors import ApiError, bad_request
from dspark_jax.serve.protocol import ChatRequest, CompletionRequest, parse_request
from dspark_jax.serve.responses import ModelCard, ResponseWriter
from dspark_jax.serve.service import Answer, Service

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 20
# A client that sends too much is heard out up to here, because many read no answer before they have sent
# everything.
_DRAIN_BYTES = 32 << 20

T = TypeVar("T")
# Annotations of route functions are resolved by FastAPI in this module's namespace: what they name must be
# imported here at run time, never under TYPE_CHECKING.
router = APIRouter()


def create_app(service: Service, *, api_key: str | None = None, version: str = "unknown") -> FastAPI:
    """The application. With ``api_key``, everything under /v1 wants ``Authorization: Bearer <key>``."""
    app = FastAPI(title="dspark_jax", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service
    app.state.api_key = api_key
    app.state.version = version
    app.include_router(router)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_crash)
    return app


def _service(request: Request) -> Service:
    return request.app.state.service


async def _authorised(request: Request) -> None:
    key = request.app.state.api_key
    if key is None:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # Header values are bytes that arrive decoded as Latin-1; the key is text.
    if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), key.encode()):
        return
    raise ApiError(401, "wrong or missing API key (Authorization: Bearer ...)", code="invalid_api_key")


_auth = [Depends(_authorised)]


@router.post("/v1/chat/completions", dependencies=_auth)
async def chat_completions(request: Request) -> Response:
    """An answer to a chat."""
    return await _answer(request, ChatRequest)


@router.post("/v1/completions", dependencies=_auth)
async def completions(request: Request) -> Response:
    """Continuations of one or several prompts."""
    return await _answer(request, CompletionRequest)


@router.get("/v1/models", dependencies=_auth)
async def models(request: Request) -> Response:
    """The one model there is."""
    return JSONResponse({"object": "list", "data": [_card(_service(request))]})


@router.get("/v1/models/{name:path}", dependencies=_auth)
async def model(request: Request, name: str) -> Response:
    """The model by name."""
    card = _card(_service(request))
    if card["id"] != name:
        raise ApiError(404, f"the model {name!r} does not exist", param="model", code="model_not_found")
    return JSONResponse(card)


@router.get("/health")
async def health(request: Request) -> Response:
    """200 once requests are taken; 503 while loading and compiling, and after the engine died."""
    service = _service(request)
    state = service.worker.state
    if state == "ready" and service.model is not None:
        return JSONResponse({"status": "ok"})
    body = {"status": "starting" if state == "ready" else state, "progress": service.progress}
    if service.worker.error is not None:
        body["error"] = repr(service.worker.error)
    return JSONResponse(body, status_code=503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    service = _service(request)
    page = service.metrics.render(service.worker.counters, ready=service.worker.state == "ready")
    return PlainTextResponse(page, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/version")
async def version(request: Request) -> Response:
    """The package's version."""
    return JSONResponse({"version": request.app.state.version})


def _card(service: Service) -> dict[str, Any]:
    model = service.ready_model()
    return ModelCard(
        id=model.name, created=model.created, root=model.root, max_model_len=model.max_model_len
    ).model_dump()


# -- one request -----------------------------------------------------------------------------------


async def _answer(request: Request, kind: type[ChatRequest] | type[CompletionRequest]) -> Response:
    service = _service(request)
    service.ready_model()
    try:
        parsed = parse_request(kind, await _read_json(request))
        answer = await _while_connected(request.receive, service.open(parsed))
    except _ClientGone:
        return Response(status_code=499)  # nobody reads it
    writer = ResponseWriter(
        chat=kind is ChatRequest,
        model=service.ready_model().name,
        token_ids=bool(parsed.return_token_ids) or service.ready_model().tokenizer is None,
        usage_field=parsed.include_usage(),
    )
    if parsed.stream:
        return EventStream(_events(answer, writer, parsed.include_usage()), answer.close)
    try:
        choices = await _while_connected(request.receive, answer.whole())
    except _ClientGone:
        return Response(status_code=499)
    finally:
        answer.close()
    return Response(writer.whole(choices, answer.usage), media_type="application/json")


async def _events(answer: Answer, writer: ResponseWriter, include_usage: bool) -> AsyncGenerator[str, None]:
    """The payloads of an event stream; an error that comes up on the way is the last but one."""
    started: set[int] = set()
    try:
        async for delta in answer.deltas():
            if delta.index not in started:
                # Not before the first token: clients take the first chunk for it when they measure.
                started.add(delta.index)
                if writer.chat:
                    yield writer.role(delta.index)
            if delta.text or delta.finish is not None or writer.token_ids:
                yield writer.piece(delta.index, delta.text, delta.tokens, delta.finish)
        if include_usage:
            yield writer.usage(answer.usage)
    except ApiError as error:
        yield json.dumps(error.body())
    except Exception as error:
        logger.exception("an answer failed")
        yield json.dumps(ApiError(500, f"internal error: {error!r}", kind="server_error").body())
    yield "[DONE]"


async def _read_json(request: Request) -> Any:
    """The decoded body.

    Raises:
        ApiError: 413 above 1 MiB, 400 if it is not JSON.
        _ClientGone: the client left before it had sent everything.
    """
    body = bytearray()
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size <= MAX_BODY_BYTES:
                body += chunk
            elif size > _DRAIN_BYTES:
                break
    except ClientDisconnect:
        raise _ClientGone from None
    if size > MAX_BODY_BYTES:
        raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", param="body", code="request_too_large")
    try:
        return json.loads(bytes(body))
    except (ValueError, RecursionError) as error:  # ValueError: JSON, UTF-8, numbers with thousands of digits
        raise bad_request(f"the body is not valid JSON: {error}", "body", "invalid_json") from None


# -- clients that leave ----------------------------------------------------------------------------


class _ClientGone(Exception):
    """The client closed the connection."""


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client leaves.

    Raises:
        _ClientGone: it left first.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise _ClientGone
    finally:
        for pending in (task, watch):
            pending.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class EventStream(Response):
    """Server-sent events. ``on_close`` runs exactly once, however the stream ends.

    Starlette's own streaming response notices a client that left only under some versions of the ASGI
    protocol.
    """

    media_type = "text/event-stream"

    def __init__(self, payloads: AsyncGenerator[str, None], on_close: Callable[[], None]) -> None:
        self.status_code = 200
        self.background = None
        self._payloads = payloads
        self._on_close = on_close
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(_ClientGone):
                await _while_connected(receive, self._send(send))
        finally:
            self._on_close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with contextlib.aclosing(self._payloads) as payloads:
            async for payload in payloads:
                data = f"data: {payload}\n\n".encode()
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


# -- errors ----------------------------------------------------------------------------------------


def _error_response(request: Request, error: ApiError) -> Response:
    _service(request).metrics.refused[error.status] += 1
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    if error.status == 503:
        headers["Retry-After"] = "5"
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error_response(request, error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    return _error_response(request, ApiError(error.status_code, message, code=code))


async def _on_crash(request: Request, error: Exception) -> Response:
    return _error_response(request, ApiError(500, f"internal error: {error!r}", kind="server_error"))
