"""An embedding server: texts in, vectors out, batched by the number of their tokens.

    python examples/embedding_server.py path/to/bert --port 8080
    curl -d '{"texts": ["the cat sat", "a dog"]}' localhost:8080

Requests wait in a bounded queue; one thread takes as many as fit `--max-tokens` and runs them as
one batch. Without padding a batch costs what its tokens cost, so texts of all lengths may be mixed,
and the token count alone says how long a batch takes. A full queue answers 503 at once instead of
making everybody wait. A vector is the mean of its text's last hidden states.
"""

from __future__ import annotations

import argparse
import json
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import torch
import transformers

from bert_unpad import hf


class Request(NamedTuple):
    """One text that waits."""

    ids: list[int]
    answer: Future[list[float]]


class Encoder:
    """A model and its tokenizer: token ids to vectors."""

    def __init__(self, path: str) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        model = transformers.AutoModel.from_pretrained(path, add_pooling_layer=False)
        self.model = hf.unpad(model.eval())
        self.max_length = model.config.max_position_embeddings

    def tokenize(self, text: str) -> list[int]:
        return self.tokenizer(text, truncation=True, max_length=self.max_length)["input_ids"]

    @torch.inference_mode()
    def encode(self, texts: list[list[int]]) -> list[list[float]]:
        batch = self.tokenizer.pad({"input_ids": texts}, return_tensors="pt")
        states = self.model(**batch).last_hidden_state
        # Padded positions are 0, so the sum is that of the real tokens.
        return (states.sum(1) / batch["attention_mask"].sum(1, keepdim=True)).tolist()


class Batcher(threading.Thread):
    """Takes requests from a bounded queue and runs them together."""

    def __init__(
        self,
        encode: Callable[[list[list[int]]], list[list[float]]],
        max_tokens: int = 4096,
        max_waiting: int = 1024,
        patience: float = 0.002,
    ) -> None:
        """Starts nothing yet.

        Args:
            encode: token ids of some texts -> a vector of each.
            max_tokens: of a batch; a longer text is a batch of its own.
            max_waiting: requests that may wait.
            patience: seconds that a request waits for company.
        """
        super().__init__(daemon=True)
        self._encode, self._max_tokens, self._patience = encode, max_tokens, patience
        self._waiting: queue.Queue[Request | None] = queue.Queue(max_waiting)

    def submit(self, ids: list[int]) -> Future[list[float]]:
        """Queues a text; raises queue.Full at once if too many wait."""
        request = Request(ids, Future())
        self._waiting.put_nowait(request)
        return request.answer

    def stop(self) -> None:
        """Ends the thread after what is waiting."""
        self._waiting.put(None)
        self.join()

    def run(self) -> None:
        request = self._waiting.get()
        while request is not None:
            batch, request = self._collect(request)
            try:
                vectors = self._encode([member.ids for member in batch])
            except Exception as error:  # the requests' error, not the server's end
                for member in batch:
                    member.answer.set_exception(error)
            else:
                for member, vector in zip(batch, vectors, strict=True):
                    member.answer.set_result(vector)
            if request is _NOTHING:
                request = self._waiting.get()

    def _collect(self, first: Request) -> tuple[list[Request], Request | None]:
        """A batch that begins with `first`, and what came next but is not part of it."""
        batch, tokens = [first], len(first.ids)
        deadline = time.monotonic() + self._patience
        while tokens < self._max_tokens:
            try:
                request = self._waiting.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return batch, _NOTHING
            if request is None or tokens + len(request.ids) > self._max_tokens:
                return batch, request
            batch.append(request)
            tokens += len(request.ids)
        return batch, _NOTHING


_NOTHING = Request([], Future())  # nothing came


def make_server(encoder: Encoder, batcher: Batcher, port: int) -> ThreadingHTTPServer:
    """An HTTP server on 127.0.0.1: POST {"texts": [...]} -> {"embeddings": [[...], ...]}."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
                texts = body["texts"]
                if not isinstance(texts, list) or not all(isinstance(t, str) for t in texts):
                    raise ValueError("texts must be a list of strings")
            except (ValueError, KeyError, TypeError) as error:
                return self.answer(400, {"error": f'expected {{"texts": [...]}}: {error}'})
            try:
                answers = [batcher.submit(encoder.tokenize(text)) for text in texts]
            except queue.Full:
                return self.answer(503, {"error": "too many requests wait"})
            try:
                self.answer(200, {"embeddings": [answer.result() for answer in answers]})
            except Exception as error:
                self.answer(500, {"error": str(error)})

        def answer(self, status: int, body: dict) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="directory or name of a model with its tokenizer")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--max-tokens", type=int, default=4096, help="of a batch")
    parser.add_argument("--max-waiting", type=int, default=1024, help="texts in the queue")
    args = parser.parse_args()
    encoder = Encoder(args.model)
    batcher = Batcher(encoder.encode, args.max_tokens, args.max_waiting)
    batcher.start()
    server = make_server(encoder, batcher, args.port)
    print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        batcher.stop()


if __name__ == "__main__":
    main()
