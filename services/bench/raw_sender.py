"""The other end of the raw socket that transports are compared with: a process that sends.

`python -m services.bench.raw_sender PORT BYTES`: for each byte it is sent, BYTES come back.
"""

from __future__ import annotations

import socket
import sys

import numpy as np


def main() -> int:
    port, num_bytes = map(int, sys.argv[1:])
    payload = np.full(num_bytes, 1, np.uint8)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while connection.recv(1):
            connection.sendall(payload.data)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
