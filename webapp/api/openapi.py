"""The OpenAPI description: what ninja knows of each operation, and the errors that every operation of a kind may give."""

from __future__ import annotations

from typing import Any

from ninja import NinjaAPI

BINARY: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
FILE: dict[str, Any] = {
    "responses": {
        200: {"content": {"*/*": BINARY}},
        206: {"description": "The part that Range asked for", "content": {"*/*": BINARY}},
        304: {"description": "The file is still the one of If-None-Match"},
        412: {"description": "The file is not the one of If-Match"},
        416: {"description": "Range lies outside the file", "content": {"text/plain": {"schema": {"type": "string"}}}},
    }
}
"""`openapi_extra` of an operation that sends a file as it is, whole or in part."""
STREAM: dict[str, Any] = {"responses": {200: {"content": {"*/*": BINARY}}}}
"""`openapi_extra` of an operation that sends bytes made on the way."""
SENTENCES = {
    400: "The body is not JSON",
    401: "No live token",
    404: "There is no such thing",
    413: "The body is too large",
    422: "Understood, but not possible",
}


class StudioAPI(NinjaAPI):
    """Adds to the description what is the same everywhere, so that no operation can forget it."""

    def get_openapi_schema(self, **arguments: Any) -> Any:
        """As ninja's; besides, 400, 401, 404, 413 and 422 where an operation can give them."""
        schema = super().get_openapi_schema(**arguments)
        problems = "Problems" if "Problems" in schema["components"]["schemas"] else "Detail"
        for path, operations in schema["paths"].items():
            for operation in operations.values():
                for status in _possible(path, operation):
                    name = problems if status == 422 else "Detail"
                    operation["responses"][status] = {
                        "description": SENTENCES[status],
                        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}},
                    }
        return schema


def _possible(path: str, operation: dict[str, Any]) -> list[int]:
    found = []
    if "requestBody" in operation:
        found += [400, 413]
    if operation.get("security"):
        found.append(401)
    if "{" in path:
        found.append(404)
    if "requestBody" in operation or operation["parameters"]:
        found.append(422)
    return found
