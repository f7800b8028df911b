"""Where a server listens: sockets, and which addresses only this machine can reach."""

from __future__ import annotations

import ipaddress
import socket

from agent_r1.errors import ConfigError

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")  # in the Host header, without the port


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket. Port 0 is a free port. Raises ConfigError if the address is taken or not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named, because asyncio turns off delays (TCP_NODELAY) only for sockets that say that they are TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen at {host}, port {port}: {error}. Choose another with --port") from error
    return listener


def link_name(host: str) -> str:
    """The host as written in a link."""
    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host
