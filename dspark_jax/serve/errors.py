"""Errors a client sees, in OpenAI's shape."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """An error that becomes an HTTP response.

    Attributes:
        status: HTTP status code.
        message: what is wrong, naming the input.
        param: the request field at fault, or None.
        code: a short machine-readable word, or None.
        kind: OpenAI's ``type`` of error.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = kind

    def body(self) -> dict[str, Any]:
        """The JSON object of the response."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """HTTP 400 about the field ``param``."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str) -> ApiError:
    """HTTP 503: the engine is not there (not yet, or no longer)."""
    return ApiError(503, message, code="service_unavailable", kind="server_error")


def engine_failed(error: BaseException) -> ApiError:
    """HTTP 500: the engine raised while it worked on a request."""
    return ApiError(
        500,
        f"the engine failed on this request: {type(error).__name__}: {error}",
        code="engine_error",
        kind="server_error",
    )


def not_finite(made: int) -> ApiError:
    """HTTP 500: the model's logits became NaN or infinite after ``made`` tokens of the answer."""
    return ApiError(
        500,
        f"the model computed NaN or infinite logits after {made} tokens of this answer: damaged weights, or numbers "
        "too large for its dtype on this input; try another prompt, or serve it with --dtype float32",
        code="not_finite",
        kind="server_error",
    )
