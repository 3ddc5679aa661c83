"""Errors as one sentence: {"detail": ...}; what is wrong with a spec comes as {"detail": ..., "problems": [...]} too."""

from __future__ import annotations

from collections.abc import Sequence

from django.conf import settings
from django.core.exceptions import PermissionDenied, RequestDataTooBig
from django.http import Http404, HttpRequest, HttpResponse
from ninja import NinjaAPI
from ninja.errors import AuthenticationError, HttpError, ValidationError

from webapp.runs.lifecycle import Refused
from webapp.runs.problems import Problem


class Invalid(Exception):
    """A request that is understood but can't be done, 422."""

    def __init__(self, detail: str, problems: Sequence[Problem] = ()) -> None:
        super().__init__(detail)
        self.problems = list(problems) or [Problem("", detail)]

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> Invalid:
        """From one or more problems; the first is the sentence."""
        first = problems[0]
        more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
        return cls((f"{first.field}: {first.message}" if first.field else first.message) + more, problems)


def add_handlers(api: NinjaAPI) -> None:
    """Give every expected exception its status and sentence."""

    def answer(request: HttpRequest, status: int, detail: str, problems: Sequence[Problem] = ()) -> HttpResponse:
        body: dict[str, object] = {"detail": detail}
        if problems:
            body["problems"] = [{"field": problem.field, "message": problem.message} for problem in problems]
        return api.create_response(request, body, status=status)

    @api.exception_handler(AuthenticationError)
    def unauthenticated(request: HttpRequest, error: AuthenticationError) -> HttpResponse:
        response = answer(
            request,
            401,
            "Send 'Authorization: Bearer <token>' with a live API token; they are made on the account page.",
        )
        response.headers["WWW-Authenticate"] = "Bearer"
        return response

    @api.exception_handler(PermissionDenied)
    def forbidden(request: HttpRequest, error: PermissionDenied) -> HttpResponse:
        return answer(request, 403, str(error) or "This account may not do that.")

    @api.exception_handler(Http404)
    def missing(request: HttpRequest, error: Http404) -> HttpResponse:
        return answer(request, 404, str(error) or "There is no such thing.")

    @api.exception_handler(RequestDataTooBig)
    def too_large(request: HttpRequest, error: RequestDataTooBig) -> HttpResponse:
        limit = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
        return answer(
            request, 413, f"The body has {request.headers.get('Content-Length')} bytes; up to {limit} are taken."
        )

    @api.exception_handler(Refused)
    def refused(request: HttpRequest, error: Refused) -> HttpResponse:
        return answer(request, 409, str(error))

    @api.exception_handler(Invalid)
    def invalid(request: HttpRequest, error: Invalid) -> HttpResponse:
        return answer(request, 422, str(error), error.problems)

    @api.exception_handler(HttpError)
    def http_error(request: HttpRequest, error: HttpError) -> HttpResponse:
        return answer(request, error.status_code, _sentence(str(error)))

    @api.exception_handler(ValidationError)
    def malformed(request: HttpRequest, error: ValidationError) -> HttpResponse:
        problems = [
            Problem(".".join(str(part) for part in item["loc"] if part not in ("body", "query", "path")), item["msg"])
            for item in error.errors
        ]
        return answer(request, 422, str(Invalid.of(problems)), problems)


def _sentence(text: str) -> str:
    if text == "CSRF check Failed":
        return "The CSRF token is missing or wrong; send the page's token as X-CSRFToken, or use an API token."
    return text if text.endswith(".") else f"{text}."
