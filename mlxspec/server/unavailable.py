"""Answers in place of a server that cannot start, or has not loaded its model yet: 503 and why, so
that no client hangs or takes it for stopped. The standard library only.
"""

import html
import json
import select
import socket
from contextlib import suppress
from threading import Semaphore, Thread
from time import monotonic, sleep

CLIENT_S = 0.3  # for a client of this machine or network to send its request
MOST = 64  # clients that are answered at the same time, each by a thread
BACKLOG = 128  # connections that wait to be accepted
RETRY_S = 2  # after which a browser asks again
PAGE = "<!doctype html><meta http-equiv=refresh content={}><title>mlxspec</title><p>{}"


class UnavailableResponder:
    """Answers all clients of a socket, which it lets listen, while its block is entered; those that
    were accepted by then also after it."""

    def __init__(self, listener: socket.socket, message: str, code: str = "") -> None:
        self.message, self.code = message, code
        self.listener = listener.dup()
        self.ended, self.end = socket.socketpair()
        self.free = Semaphore(MOST)

    def __enter__(self) -> None:
        self.listener.listen(BACKLOG)
        self.listener.setblocking(False)  # as the server's loop wants it
        Thread(target=self._accept, name="unavailable").start()

    def __exit__(self, *_: object) -> None:
        self.end.close()

    def _accept(self) -> None:
        with self.listener, self.ended:
            while (
                self.free.acquire()
                and self.ended not in select.select([self.listener, self.ended], [], [])[0]
            ):
                try:
                    client, _ = self.listener.accept()
                    Thread(target=self._answer, args=(client,)).start()
                except (OSError, RuntimeError):  # no file descriptor is left, or no thread
                    self.free.release()
                    sleep(CLIENT_S)

    def _answer(self, client: socket.socket) -> None:
        """Answer a browser with a page that tries again, others in JSON."""
        with suppress(OSError), client:
            client.settimeout(CLIENT_S)
            end = monotonic() + CLIENT_S
            kind = "application/json"
            error = {"message": self.message, "type": "unavailable", "code": self.code}
            body = json.dumps({"error": error}).encode()
            if b"text/html" in client.recv(1 << 16):
                kind = "text/html; charset=utf-8"
                body = PAGE.format(RETRY_S, html.escape(self.message)).encode(errors="replace")
            head = (
                f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: {kind}\r\n"
                f"Content-Length: {len(body)}\r\nServer: mlxspec\r\n"
                f"Retry-After: {RETRY_S}\r\nConnection: close\r\n\r\n"
            )
            client.sendall(head.encode() + body)
            client.shutdown(socket.SHUT_WR)
            # Closing before all is read would cut off the answer.
            while monotonic() < end and client.recv(1 << 16):
                pass
        self.free.release()
