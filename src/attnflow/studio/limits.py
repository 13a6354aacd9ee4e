"""What the studio allows a page, whatever it asks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Caps of one server.

    Attributes:
        message_bytes: of a message from a page, a file that it opens included.
        reply_bytes: of a reply.
        seconds: for one operation; then its process is ended, and a new one goes on from the last design.
        model_seconds: for one question about a model.
        model_memory: bytes of address space of a model's process; 0 for no limit, since the server's own command line
            says which model it is.
        starting: seconds in which such a process must be ready.
        sessions: pages that are open at once.
        first_message: seconds in which a page must show the token.
        idle: seconds without a message from any page, after which the server ends.
        memory: bytes of address space of a page's process.
        queued: messages of a page that wait for their turn, those about masks and those about a model.
    """

    message_bytes: int = 2 << 20
    reply_bytes: int = 64 << 20
    seconds: float = 20.0
    model_seconds: float = 1800.0
    model_memory: int = 0
    starting: float = 120.0
    sessions: int = 4
    first_message: float = 5.0
    idle: float = 1800.0
    memory: int = 8 << 30
    queued: int = 64
