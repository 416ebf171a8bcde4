"""Errors in OpenAI's form. A body never holds a path, a key or a stack trace."""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError

M = TypeVar("M", bound=BaseModel)
TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class APIError(Exception):
    """An answer that is an error: HTTP status, message, and the request's field that is to blame."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code or self.status}}

    def response(self) -> JSONResponse:
        headers = {429: {"Retry-After": "1"}, 503: {"Retry-After": "5"}, 401: {"WWW-Authenticate": "Bearer"}}
        return JSONResponse(self.body(), self.status, headers=headers.get(self.status))


def of_validation(error: ValidationError) -> APIError:
    """The first thing that pydantic found, by the name of its field."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"] if not str(part).startswith("function-"))
    message = str(first["msg"]).removeprefix("Value error, ")
    return APIError(400, f"{place}: {message}" if place else message, param=place or None)


def of_validation_of(model: type[M], data: dict[str, Any]) -> M:
    """The data as a model. Raises APIError."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise of_validation(error) from error


def bad(message: str, param: str | None = None) -> APIError:
    return APIError(400, message, param=param)
