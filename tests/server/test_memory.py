"""What clients send does not stay in memory. The process of a server is measured, so all these tests share one."""

from pathlib import Path

import pytest

from tests.server.battery import BAD_BODIES, VALID, firing, rss_bytes
from tests.server.running import ServerProcess
from tests.server.test_http_protocol import connect, post, send_until_answered


def test_of_bad_bodies_nothing_is_kept(process_server: ServerProcess, tokenizer_dir: Path):
    """The battery checks that both processes are the same and have not grown."""
    with firing(process_server, tokenizer_dir) as battery:
        for content, said in BAD_BODIES:
            battery.refused("/generate", content, said)
        for path in VALID:
            battery.refused(path, VALID[path] | {"x" * 10**6: 1}, "unknown field")


def test_a_body_of_300_mb_is_refused_and_not_kept(process_server: ServerProcess):
    server = process_server
    url = server.http.base_url
    pid = server.process.pid
    before = rss_bytes(pid)
    for length in (f"Content-Length: {300 * 2**20}", "Transfer-Encoding: chunked"):
        with connect(url.port or 0) as client:
            client.send(post("/v1/completions", "Content-Type: application/json", length))
            piece = b"a" * 2**16
            piece = piece if length.startswith("C") else b"10000\r\n" + piece + b"\r\n"
            send_until_answered(client, piece, 300 * 2**20)
            answer = client.answer()
            assert answer.status == 413 and answer.json["error"]["code"] == "request_too_large"
            assert "--max-request-bytes" in answer.json["error"]["message"]
            assert answer.headers["connection"] == "close"
    assert rss_bytes(pid) - before < 40 * 2**20
    assert server.http.get("/health").status_code == 200


@pytest.mark.parametrize(("query", "item"), [("a" * 1_000_000, "b"), ([1] * 1_000_000, [2])], ids=["text", "tokens"])
def test_a_query_is_not_multiplied_beyond_bounds(process_server: ServerProcess, query: object, item: object):
    before = peak_kb(process_server)
    body = {"query": query, "items": [item] * 1000, "label_token_ids": [1, 2]}
    response = process_server.http.post("/v1/score", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("query and items must have at most 8388608 characters or tok")
    assert peak_kb(process_server) - before < 200_000, "the front put all of them together before it refused them"


def peak_kb(server: ServerProcess) -> int:
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
