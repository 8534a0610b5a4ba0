"""Errors of an agent, with its words."""

from __future__ import annotations

from typing import Any


class AgentError(Exception):
    """An agent refused a call, or a request ended other than ready.

    code: the kind, one of PROTOCOL.md section 3.5, e.g. "busy", "too_large", "peer_lost", "cancelled". Later agents may know more.
    text: names the field or option and the numbers.
    retry_after: seconds after which the call may be tried again, with "busy" only, else None.
    """

    def __init__(self, code: str, text: str = "", retry_after: float | None = None) -> None:
        super().__init__(f"{code}: {text}" if text else code)
        self.code = code
        self.text = text
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code, self.text, self.retry_after)


class DeadlineError(AgentError, TimeoutError):
    """The time of a call or of a request ran out; its code is "deadline"."""


def agent_error(code: str, text: str = "", retry_after: float | None = None) -> AgentError:
    """The error for a code."""
    kind = DeadlineError if code == "deadline" else AgentError
    return kind(code, text, retry_after)


def lost(why: str) -> AgentError:
    return AgentError("peer_lost", why)
