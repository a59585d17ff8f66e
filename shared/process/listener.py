"""The listening socket of an HTTP port: bound before anything is loaded, so that a port in use is one sentence."""

from __future__ import annotations

import socket

from shared.errors import StartError


def listen(host: str, port: int) -> socket.socket:
    """A socket that an event loop can serve on; raises `StartError` when the port is taken or not allowed."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except OSError as error:
        raise StartError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise StartError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return listener
