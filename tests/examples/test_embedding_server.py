"""The embedding server: vectors, batches, and an answer to every request."""

import contextlib
import http.client
import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("tokenizers")
pytest.importorskip("starlette")
uvicorn = pytest.importorskip("uvicorn")
from starlette.exceptions import HTTPException

from bert_unpad.data import WordPieceTokenizer
from examples import embedding_server
from examples.embedding_server import Batcher, Limits
from tests.support.processes import TIMEOUT
from tests.support.seeds import derived


class Model:
    """Stands in for a model: the vector of a text is the number of its words, its tokens."""

    def __init__(self) -> None:
        self.tokenized: list[str] = []
        self.batches: list[list[int]] = []

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        self.tokenized += texts
        if "untokenizable" in texts:
            raise OSError("no vocabulary")
        return [[len(word) for word in text.split()] for text in texts]

    def encode(self, texts: list[list[int]]) -> list[list[float]]:
        self.batches.append([len(ids) for ids in texts])
        if any(13 in ids for ids in texts):
            raise OSError("13 letters")
        if any(14 in ids for ids in texts):
            return []
        return [[float("nan") if 15 in ids else len(ids)] for ids in texts]

    def batcher(self, **options) -> Batcher:
        return Batcher(self.tokenize, self.encode, **options)


@contextlib.contextmanager
def serving(batcher: Batcher, limits: Limits | None = None) -> Iterator[int]:
    """The port of a server that runs in this process."""
    server = embedding_server.server(batcher, limits or Limits())
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        batcher.start()
        try:
            yield listening.getsockname()[1]
        finally:
            batcher.stop()
            server.should_exit = True
            thread.join(TIMEOUT)


def answer_of(client: socket.socket) -> tuple[int, dict]:
    response = http.client.HTTPResponse(client)
    response.begin()
    return response.status, json.loads(response.read())


def talk(port: int, request: bytes, half_close: bool = False) -> tuple[int, dict]:
    """Status and body of the answer to these bytes."""
    with socket.create_connection(("127.0.0.1", port), TIMEOUT) as client:
        client.sendall(request)
        if half_close:
            client.shutdown(socket.SHUT_WR)
        return answer_of(client)


def post(body: bytes, *headers: str, length: object = None) -> bytes:
    """A request; `length` is its Content-Length, False for none."""
    lines = ["POST / HTTP/1.1", "Host: here", *headers]
    if length is not False:
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def chunked(*chunks: bytes) -> bytes:
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))
    return post(body, "Transfer-Encoding: chunked", length=False)


GOOD = b'{"texts": ["one two three", "one"]}'
VECTORS = (200, {"embeddings": [[3], [1]]})


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.fixture(scope="module")
def port(model) -> Iterator[int]:
    with serving(model.batcher(max_waiting=8), Limits(body=300_000, seconds=TIMEOUT)) as port:
        yield port


@pytest.mark.parametrize(
    "request_",
    [
        post(GOOD),
        post(GOOD + b"and more", length=len(GOOD)),
        chunked(GOOD[:5], GOOD[5:]),
        post(GOOD).replace(b"HTTP/1.1", b"HTTP/1.0"),
        post(GOOD.decode().encode("utf-16")),
        post(GOOD, "Connection: close"),
    ],
)
@pytest.mark.parametrize("half_close", [False, True])
def test_good_requests(port, request_, half_close):
    assert talk(port, request_, half_close) == VECTORS


def test_no_texts_have_no_vectors(port):
    assert talk(port, post(b'{"texts": []}')) == (200, {"embeddings": []})


@pytest.mark.parametrize(
    ("request_", "status", "message"),
    [
        (post(b""), 400, "body: expected JSON"),
        (post(b"nothing"), 400, "body: expected JSON"),
        (post(b"\xff\xff\xff"), 400, "body: expected JSON"),
        (post(b"1" * 5000), 400, "body: expected"),
        (post(b"[" * 200_000), 400, "body: expected JSON"),
        (post(b'{"texts": ' + b'{"a":' * 40_000), 400, "body: expected JSON"),
        (post(b"[]"), 400, 'body: expected {"texts": [...]}'),
        (post(b"null"), 400, 'body: expected {"texts": [...]}'),
        (post(b'{"text": ["a"]}'), 400, 'body: expected {"texts": [...]}'),
        (post(b'{"texts": "a"}'), 400, 'body: expected {"texts": [...]}'),
        (post(b'{"texts": ["a", 1]}'), 400, "texts[1]: expected a string, got int"),
        (post(b'{"texts": [null]}'), 400, "texts[0]: expected a string, got NoneType"),
        (post(b'{"texts": ["a", "b\\ud800"]}'), 400, "texts[1]: expected Unicode text"),
        (post(b'{"texts": ["a", ""]}'), 400, "texts[1]: it has no tokens"),
        (post(GOOD, length=False), 400, "body: expected JSON"),
        (post(GOOD, length=5), 400, "body: expected JSON"),
        (chunked(*[b"a" * 1000] * 400), 413, "body: expected at most 300000 bytes"),
        (post(json.dumps({"texts": ["a"] * 9}).encode()), 413, "texts: expected at most 8, got 9"),
        (post(b'{"texts": ["a", "' + b"a " * 40_000 + b'"]}'), 413,
         "texts: expected at most 65536 characters in all, got 80001"),
        (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", 405, "Method Not Allowed"),
        (post(GOOD).replace(b"POST /", b"BREW /"), 405, "Method Not Allowed"),
        (post(GOOD).replace(b"POST /", b"POST /x"), 404, "Not Found"),
        (post(GOOD).replace(b"POST /", b"OPTIONS *"), 404, "Not Found"),
        (post(b'{"texts": ["untokenizable"]}'), 500, "OSError: no vocabulary"),
        (post(b'{"texts": ["thirteenchars"]}'), 500, "OSError: 13 letters"),
        (post(b'{"texts": ["fourteen-chars"]}'), 500, "ValueError"),
        (post(b'{"texts": ["fifteen-letters"]}'), 500, "ValueError"),
    ],
)  # fmt: skip
def test_bad_requests_are_answered(port, model, request_, status, message):
    model.tokenized.clear()
    model.batches.clear()
    found, body = talk(port, request_)
    assert found == status
    assert list(body) == ["error"]
    assert message in body["error"]
    if status != 500:
        assert not model.batches
        assert model.tokenized in ([], ["a", ""])
    assert talk(port, post(GOOD)) == VECTORS


@pytest.mark.parametrize(
    "request_",
    [
        post(GOOD, length=-1),
        post(GOOD, length="many"),
        post(GOOD, "Content-Length: 3"),
        post(b"xyz\r\n", "Transfer-Encoding: chunked", length=False),
        post(GOOD, "Transfer-Encoding: gzip", length=False),
        post(GOOD, "X: " + "a" * 200_000),
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
    ],
)
def test_what_is_not_http_is_answered(port, request_):
    with socket.create_connection(("127.0.0.1", port), TIMEOUT) as client:
        client.sendall(request_)
        assert client.recv(1000).startswith(b"HTTP/1.1 400 ")
    assert talk(port, post(GOOD)) == VECTORS


@pytest.mark.parametrize("sent", [post(GOOD, length=500), chunked(GOOD)[:-5]])
def test_half_a_body_is_answered(port, sent):
    with socket.create_connection(("127.0.0.1", port), TIMEOUT) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1000).startswith(b"HTTP/1.1 400 ")
    assert talk(port, post(GOOD)) == VECTORS


@pytest.mark.parametrize("sent", [b"", b"POST / HTTP/1.1\r\nX-"])
def test_half_a_head_is_not(port, sent):
    with socket.create_connection(("127.0.0.1", port), TIMEOUT) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1000) == b""


LARGE = b"a" * 20_000_000


@pytest.mark.parametrize(
    ("method", "path", "status"), [("POST", "/", 413), ("PUT", "/", 405), ("POST", "/x", 404)]
)
def test_who_sends_all_of_a_large_body_gets_the_answer(port, method, path, status):
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    client.request(method, path, LARGE)
    response = client.getresponse()
    assert (response.status, list(json.load(response))) == (status, ["error"])
    client.close()


def test_a_body_is_asked_for_where_a_client_waits_for_that(port):
    with socket.create_connection(("127.0.0.1", port), TIMEOUT) as client:
        client.sendall(post(GOOD, "Expect: 100-continue")[: -len(GOOD)])
        assert client.recv(1000).startswith(b"HTTP/1.1 100 ")
        client.sendall(GOOD)
        assert answer_of(client) == VECTORS


def test_other_methods_learn_which_is_right(port):
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    client.request("HEAD", "/")
    response = client.getresponse()
    assert (response.status, response.headers["Allow"], response.read()) == (405, "POST", b"")
    client.close()


def test_clients_that_go_disturb_nobody(port):
    for sent in (b"", b"POST", post(GOOD)):
        with socket.create_connection(("127.0.0.1", port), TIMEOUT) as client:
            client.sendall(sent)
    assert talk(port, post(GOOD)) == VECTORS


@pytest.mark.parametrize("sent", [b"", b"POST / HTTP/1.1\r\nX-", post(b"", length=9999)])
def test_slow_clients_time_out(sent):
    with (
        serving(Model().batcher(), Limits(seconds=0.5)) as port,
        socket.create_connection(("127.0.0.1", port), TIMEOUT) as client,
    ):
        client.sendall(sent)
        deadline = time.monotonic() + TIMEOUT
        while not select.select([client], [], [], 0.05)[0]:
            assert time.monotonic() < deadline
            if sent:
                client.sendall(b"a")  # never idle for long, and never done
        if sent.endswith(b"\r\n"):
            error = {"error": "body: expected all of it within 0.5 s"}
            assert answer_of(client) == (408, error)
        else:
            with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
                answer_of(client)


def test_who_does_not_take_the_answer_is_cut_off():
    def encode(texts):
        return [[1.0] * 5_000_000]

    with (
        serving(Batcher(Model().tokenize, encode), Limits(seconds=0.5)) as port,
        socket.create_connection(("127.0.0.1", port), TIMEOUT) as client,
    ):
        client.sendall(post(b'{"texts": ["one"]}'))
        assert select.select([client], [], [], TIMEOUT)[0]
        time.sleep(1)
        with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
            answer_of(client)


def test_connections_are_bounded():
    with (
        serving(Model().batcher(), Limits(seconds=TIMEOUT, connections=1)) as port,
        socket.create_connection(("127.0.0.1", port), TIMEOUT) as first,
    ):
        for body in (GOOD, LARGE):
            assert talk(port, post(body)) == (503, {"error": "too many connections"})
        first.sendall(post(GOOD))
        assert answer_of(first) == VECTORS


def test_all_texts_of_a_request_are_queued_or_none():
    model = Model()
    batcher = model.batcher(max_waiting=3)
    answers = batcher.submit(["one", "one two"])
    for texts, status in ((["a", "b"], 503), (["a"] * 4, 413)):
        with pytest.raises(HTTPException) as refused:
            batcher.submit(texts)
        assert refused.value.status_code == status
    assert model.tokenized == ["one", "one two"]
    for text in ("untokenizable", ""):  # gives its place back
        with pytest.raises((OSError, HTTPException)):
            batcher.submit([text])
    answers += batcher.submit(["one two three"])
    batcher.start()
    assert [answer.result(TIMEOUT) for answer in answers] == [[1], [2], [3]]
    batcher.stop()
    assert model.batches == [[1, 2, 3]]
    with pytest.raises(HTTPException):
        batcher.submit(["late"])


def test_an_error_reaches_only_the_text_that_has_it():
    model = Model()
    batcher = model.batcher()
    first = batcher.submit(["one", "one two"])
    (bad,) = batcher.submit(["thirteenchars"])
    (short,) = batcher.submit(["fourteen-chars"])
    (cancelled,) = batcher.submit(["one"])
    cancelled.cancel()
    batcher.start()
    assert [answer.result(TIMEOUT) for answer in first] == [[1], [2]]
    with pytest.raises(OSError, match="13 letters"):
        bad.result(TIMEOUT)
    with pytest.raises(ValueError):
        short.result(TIMEOUT)
    assert batcher.submit(["a b c d"])[0].result(TIMEOUT) == [4]
    batcher.stop()
    assert model.batches == [[1, 2, 1, 1], [1], [2], [1], [1], [4]]


def test_requests_that_arrive_together_share_a_batch():
    model = Model()
    busy, go_on = threading.Event(), threading.Event()

    def encode(texts):
        busy.set()
        assert go_on.wait(TIMEOUT)
        return model.encode(texts)

    batcher = Batcher(model.tokenize, encode, max_tokens=5)
    with serving(batcher) as port, ThreadPoolExecutor(3) as clients:
        first = clients.submit(talk, port, post(b'{"texts": ["a"]}'))
        assert busy.wait(TIMEOUT)
        others = [clients.submit(talk, port, post(GOOD)) for _ in range(2)]
        deadline = time.monotonic() + TIMEOUT
        while len(batcher._queue) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        go_on.set()
        assert first.result(TIMEOUT) == (200, {"embeddings": [[1]]})
        assert [other.result(TIMEOUT) for other in others] == [VECTORS] * 2
    assert model.batches == [[1], [3, 1], [3, 1]]


WORDS = ["salmon trout carp pike", "raven eagle heron swan"]


@pytest.fixture(scope="module", params=["Bert", "ModernBert", "MPNet", "Albert"])
def encoder(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("model")
    WordPieceTokenizer.train(lambda: [WORDS * 5], vocab_size=90).save(folder)
    transformers.BertTokenizer.from_pretrained(folder).save_pretrained(folder)
    torch.manual_seed(derived(0))
    config = getattr(transformers, f"{request.param}Config")(
        vocab_size=90, hidden_size=32, num_hidden_layers=1, num_attention_heads=1,
        intermediate_size=64, max_position_embeddings=16, pad_token_id=0, cls_token_id=0,
        sep_token_id=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    return embedding_server.Encoder(str(folder))


def test_vectors_do_not_depend_on_the_batch(encoder):
    batches = []

    def encode(texts):
        batches.append([len(text) for text in texts])
        return encoder.encode(texts)

    texts = ["salmon", "raven eagle heron swan", "", "carp pike", "trout " * 40, "eagle \0"]
    with serving(Batcher(encoder.tokenize, encode, max_tokens=20)) as port:
        status, body = talk(port, post(json.dumps({"texts": texts}).encode()))
    assert status == 200
    for text, vector in zip(texts, body["embeddings"], strict=True):
        (ids,) = encoder.tokenize([text])
        assert len(ids) <= 16
        (alone,) = encoder.encode([ids])
        torch.testing.assert_close(torch.tensor(vector), torch.tensor(alone))
    assert sum(map(len, batches)) == 6
    assert all(sum(batch) <= 20 for batch in batches)


def test_texts_are_cut_to_the_positions_that_there_are(tmp_path):
    WordPieceTokenizer.train(lambda: [WORDS * 5], vocab_size=90).save(tmp_path)
    config = transformers.RobertaConfig(
        vocab_size=90, hidden_size=32, num_hidden_layers=1, num_attention_heads=1,
        intermediate_size=64, max_position_embeddings=16, pad_token_id=0,
    )  # fmt: skip
    transformers.RobertaModel(config).save_pretrained(tmp_path)
    encoder = embedding_server.Encoder(str(tmp_path))
    (ids,) = encoder.tokenize(["trout " * 40])
    assert len(ids) == 15  # positions count from the padding token's id
    assert len(encoder.encode([ids])[0]) == 32
