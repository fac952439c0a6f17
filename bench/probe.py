"""Measures how long a server takes to answer `/health`: `python -m bench.probe URL PERIOD_S`, until its stdin ends.

It is a separate process with one socket, so that its delays are those of the server and the machine, and not those of a
busy client. The lateness of its own timer shows the machine's part. It prints JSON with two lists of seconds.
"""

import http.client
import json
import select
import sys
import time
from urllib.parse import urlsplit

LIMIT_S = 60


def main(url: str, period_s: float) -> None:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=LIMIT_S)
    answered, late = [], []
    while True:
        due = time.perf_counter() + period_s
        if select.select([sys.stdin], [], [], period_s)[0]:
            break
        started = time.perf_counter()
        late.append(max(0.0, started - due))
        connection.request("GET", "/health")
        response = connection.getresponse()
        response.read()
        answered.append(time.perf_counter() - started)
        assert response.status == 200, f"/health answered {response.status}"
    print(json.dumps({"answered": answered, "late": late}))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
