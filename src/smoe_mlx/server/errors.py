"""What a request can be answered with instead of what it asked for."""


class RequestError(Exception):
    """An HTTP status and what to do about it; each protocol has its own JSON for it."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class UnknownModelError(RequestError):
    """The server was not started with this model."""

    def __init__(self, name: str, names: list[str]):
        super().__init__(
            404, f"no model {name!r} here; there is {', '.join(names)}", "model_not_found"
        )
