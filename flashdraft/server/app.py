"""The application: routes, keys, errors in OpenAI's form."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from flashdraft import __version__
from flashdraft.errors import FlashdraftError
from flashdraft.server.chat import Chat
from flashdraft.server.completions import Completions
from flashdraft.server.errors import APIError
from flashdraft.server.http import ClientGone, EventStream, read_body, request_id, while_connected
from flashdraft.server.jobs import EngineFault
from flashdraft.server.messages import Message, MessagesRequest
from flashdraft.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from flashdraft.server.responses import Responding, ResponsesRequest
from flashdraft.server.service import Service

log = logging.getLogger("flashdraft.server")
STATIC = Path(__file__).parent / "static"
POLICY = "default-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
OPEN_PATHS = ("/health", "/version", "/metrics", "/static/", "/openapi.json")  # and "/": no key is asked for


def build(service: Service) -> FastAPI:
    """The application over a service, which it starts and ends."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.loop.start()
        yield
        service.close()

    app = _Application(title="flashdraft", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    _add_answers(app, service)
    _add_rest(app, service)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.add_exception_handler(APIError, _api_error)
    app.add_exception_handler(EngineFault, _engine_fault)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGone, _client_gone)
    app.add_exception_handler(Exception, _unforeseen)
    app.add_middleware(_Edge, service=service)
    return app


BODIES = (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest, TokenizeRequest, DetokenizeRequest)


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI description of a body that read_body reads."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


class _Application(FastAPI):
    """FastAPI whose OpenAPI description knows the bodies that read_body reads."""

    def openapi(self) -> dict[str, Any]:
        described: dict[str, Any] = super().openapi()
        schemas = described.setdefault("components", {}).setdefault("schemas", {})
        for model in BODIES:
            schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= {**schema.pop("$defs", {}), model.__name__: schema}
        return described


def _add_answers(app: FastAPI, service: Service) -> None:
    """Endpoints that answer, streamed or whole."""

    def answering(path: str, model: type[BaseModel], start: Callable[[Service, Any, str], Coroutine[Any, Any, Any]]) -> None:
        @app.post(path, openapi_extra=body_of(model), response_model=None)
        async def answer(request: Request) -> Response:
            body: Any = await read_body(request, model, service.options)
            if service.options.log_requests:
                log.info("request %s", body.model_dump_json(exclude_unset=True)[:4000], extra=_fields(request))
            seconds = service.options.request_seconds
            try:
                async with asyncio.timeout(seconds):  # which ends what waits for a grammar, media, or an engine that hangs
                    work = await while_connected(request, start(service, body, request.scope["flashdraft.id"]))
            except TimeoutError as error:
                raise APIError(504, f"the request took longer than {seconds:g} s") from error
            if body.stream:
                return EventStream(work.stream(), seconds)
            return JSONResponse(await while_connected(request, work.whole()))

    answering("/v1/chat/completions", ChatRequest, Chat.start)
    answering("/v1/completions", CompletionRequest, Completions.start)
    answering("/v1/responses", ResponsesRequest, Responding.start)
    answering("/v1/messages", MessagesRequest, Message.start)


def _add_rest(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    @app.head("/health", include_in_schema=False)  # load balancers
    async def health() -> Response:
        if service.trouble is not None:
            raise APIError(503, service.trouble)
        return Response(status_code=200)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(service.measures.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        _need_model(service)
        return {"object": "list", "data": [_model(service, name) for name in service.options.names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        _need_model(service)
        if name not in service.options.names:
            raise APIError(404, f"there is no model {name[:200]!r} here", param="model")
        return _model(service, name)

    @app.post("/tokenize", openapi_extra=body_of(TokenizeRequest), response_model=None)
    async def tokenize(request: Request) -> dict[str, Any]:
        body = await read_body(request, TokenizeRequest, service.options)
        service.admit(body.model)
        if body.messages is not None:
            ids = (await service.prompts.chat(body.messages, body.tools or [], body.chat_template_kwargs)).ids
        else:
            ids = await service.prompts.text(body.prompt or "", body.add_special_tokens)
        strings = service.prompts.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": service.facts.max_model_len, "tokens": ids, "token_strs": strings}

    @app.post("/detokenize", openapi_extra=body_of(DetokenizeRequest), response_model=None)
    async def detokenize(request: Request) -> dict[str, str]:
        body = await read_body(request, DetokenizeRequest, service.options)
        service.admit(body.model)
        vocabulary = service.facts.vocab_size
        if wrong := [token for token in body.tokens if not 0 <= token < vocabulary]:
            raise APIError(400, f"tokens: {wrong[0]} is not an id of the vocabulary, 0 to {vocabulary - 1}", param="tokens")
        return {"prompt": str(await service.prompts.run(service.prompts.tokenizer.decode, body.tokens))}

    @app.post("/flush_cache", response_model=None)
    async def flush_cache() -> dict[str, bool]:
        service.admit(None)
        service.loop.flush()
        return {"success": True}

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        page = (STATIC / "index.html").read_bytes()
        return Response(page, media_type="text/html; charset=utf-8", headers={"Content-Security-Policy": POLICY})


def _need_model(service: Service) -> None:
    if service.loop.state == "loading" or service.loop.facts is None:
        raise APIError(503, service.trouble or "the model is being loaded")


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "flashdraft",
        "root": service.options.names[0],
        "parent": None,
        "max_model_len": service.facts.max_model_len,
        "num_speculative_tokens": service.loop.num_proposals,
    }


def _fields(request: Request) -> dict[str, Any]:
    return {"request_id": request.scope.get("flashdraft.id", "-")}


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    return error.response()


async def _engine_fault(request: Request, error: Exception) -> Response:
    return APIError(500, str(error)).response()  # the engine's process ended while it was asked


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return APIError(error.status_code, str(error.detail)).response()


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _unforeseen(request: Request, error: Exception) -> Response:
    log.error("unforeseen", exc_info=error, extra=_fields(request))
    status, message = (400, str(error)) if isinstance(error, FlashdraftError) else (500, "something went wrong in the server")
    return APIError(status, message).response()


class _Edge:
    """Around every request: its id, keys, one log line, a count of what is in flight."""

    def __init__(self, app: Any, service: Service) -> None:
        self.app, self.service = app, service
        self._keys = [key.encode() for key in service.options.keys]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        own, began, status = request_id(headers), time.monotonic(), 0
        scope["flashdraft.id"] = own

        async def send_with_id(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", own.encode())]
            await send(message)

        self.service.in_flight += 1
        try:
            if self._needs_key(scope) and not self._has_key(headers):
                refusal = APIError(401, "a valid API key is needed: send Authorization: Bearer KEY")
                await refusal.response()(scope, receive, send_with_id)
            else:
                await self.app(scope, receive, send_with_id)
        except ClientGone:
            status = 499
        finally:
            self.service.in_flight -= 1
            self._log(scope, own, status, time.monotonic() - began)

    def _needs_key(self, scope: Any) -> bool:
        path = scope["path"]
        return bool(self._keys) and path != "/" and not path.startswith(OPEN_PATHS)

    def _has_key(self, headers: dict[str, str]) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = (key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")).encode()
        return any([hmac.compare_digest(given, one) for one in self._keys])  # all of them, whichever fits

    def _log(self, scope: Any, own: str, status: int, seconds: float) -> None:
        route = str(getattr(scope.get("route"), "path", "other"))
        self.service.measures.responses.labels(route, str(status)).inc()
        level = logging.DEBUG if route in ("/health", "/metrics") else logging.INFO
        fields = {"request_id": own, "method": scope["method"], "path": route, "status": status, "seconds": round(seconds, 4)}
        log.log(level, "response", extra=fields)
