"""The description of the HTTP API in OpenAPI's format, which the server shows at `/openapi.json`."""
