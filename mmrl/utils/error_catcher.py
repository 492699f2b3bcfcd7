"""A context manager for code of users, which may raise anything."""

from __future__ import annotations

from types import TracebackType


class ErrorCatcher:
    """Suppresses the error that ends its block and keeps it in `error`, for reports on code of users."""

    error: Exception | SystemExit | None = None  # None while the block has not failed

    def __enter__(self) -> ErrorCatcher:
        """Return this object, whose `error` is read after the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Keep and suppress the error. KeyboardInterrupt and the like pass through."""
        self.error = error if isinstance(error, Exception | SystemExit) else None
        return self.error is not None
