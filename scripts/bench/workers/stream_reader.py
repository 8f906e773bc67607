"""Clients that cost next to nothing: posts each body of standard input to a port of this machine, reads to the end.

Prints the seconds from the first byte sent to the last one read. Raises ValueError if a stream does not end well.
"""

import json
import selectors
import socket
import sys
import time

HEAD = (
    "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    "Content-Type: application/json\r\nContent-Length: {}\r\n\r\n"  # vLLM refuses a body without a type
)
TAIL = 1000

port, bodies = int(sys.argv[1]), json.load(sys.stdin)
began = time.perf_counter()
with selectors.DefaultSelector() as selector:
    for text in map(json.dumps, bodies):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall((HEAD.format(len(text)) + text).encode())
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, bytearray())
    while selector.get_map():
        for key, _ in selector.select():
            piece, end = key.fileobj.recv(1 << 16), key.data
            end += piece
            del end[:-TAIL]  # they say whether the stream was whole, and what went wrong
            if not piece:
                selector.unregister(key.fileobj)
                if b"data: [DONE]" not in end:
                    raise ValueError(f"a stream ended with {bytes(end)!r}")
print(json.dumps({"seconds": time.perf_counter() - began}))
