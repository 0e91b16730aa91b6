"""HEAD wherever GET is answered: the same answer without its body, which the HTTP server leaves out."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class HeadRequests:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)
