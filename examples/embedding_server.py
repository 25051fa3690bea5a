"""An embedding server: texts in, vectors out, batched by the number of their tokens.

    python examples/embedding_server.py path/to/bert --port 8080
    curl -d '{"texts": ["the cat sat", "a dog"]}' localhost:8080

Texts wait in a bounded queue; one thread takes as many as fit `--max-tokens` and runs them as one
batch. Without padding a batch costs what its tokens cost, so texts of all lengths may be mixed, and
the token count alone says how long a batch takes. A vector is the mean of its text's last hidden
states.

The server is uvicorn, the application Starlette's. Each connection is one request and one answer.
Errors are JSON too, {"error": "..."}, but for those of HTTP itself, with

    400  the request is not HTTP, ends early, or its body is not JSON with a list of texts
    404  its path is not /
    405  it is not a POST
    408  its body did not arrive within `--timeout` seconds (without a head the connection closes)
    413  its body is larger than `--max-body`, its texts have more than `--max-characters` in all,
         or there are more of them than may ever wait
    500  the model failed on one of these texts; other requests of the batch are not affected
    503  too many texts or connections wait; answered before the texts are tokenized
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch

from bert_unpad._arguments import above_zero, not_negative, positive
from bert_unpad._extras import packages_of

with packages_of("serve"):
    import transformers
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import request_response
    from uvicorn.protocols.http.h11_impl import H11Protocol

    from bert_unpad import hf


class Encoder:
    """A model and its tokenizer: token ids to vectors."""

    def __init__(self, path: str, weights: str = "float32") -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        model = transformers.AutoModel.from_pretrained(path)
        if getattr(model, "pooler", None) is not None:
            model.pooler = None  # nobody reads it
        # RoBERTa's positions begin after the padding token's id.
        first = getattr(model.embeddings, "padding_idx", -1) + 1
        self.model = hf.freeze(hf.unpad(model.eval(), weights=weights))
        positions = model.config.max_position_embeddings - first
        self.max_length = min(positions, self.tokenizer.model_max_length)

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, truncation=True, max_length=self.max_length)["input_ids"]

    @torch.inference_mode()
    def encode(self, texts: list[list[int]]) -> list[list[float]]:
        batch = self.tokenizer.pad({"input_ids": texts}, return_tensors="pt")
        states = self.model(**batch).last_hidden_state
        # Padded positions are 0, so the sum is that of the real tokens.
        return (states.sum(1) / batch["attention_mask"].sum(1, keepdim=True)).tolist()


class Waiting(NamedTuple):
    """One text that waits."""

    ids: list[int]
    vector: Future[list[float]]


class Batcher(threading.Thread):
    """Runs texts of several requests together."""

    def __init__(
        self,
        tokenize: Callable[[list[str]], list[list[int]]],
        encode: Callable[[list[list[int]]], list[list[float]]],
        max_tokens: int = 4096,
        max_waiting: int = 1024,
        max_characters: int = 1 << 16,
        patience: float = 0.002,
    ) -> None:
        """Starts nothing yet.

        Args:
            tokenize: texts -> the token ids of each.
            encode: token ids of some texts -> a vector of each.
            max_tokens: of a batch; a longer text is a batch by itself.
            max_waiting: texts that may wait.
            max_characters: of the texts of a request, before they are cut to what the model takes:
                all of them are tokenized, by one thread, at about 2 s a million.
            patience: seconds that a text waits for others to share its batch.
        """
        super().__init__(daemon=True)
        self._tokenize, self._encode = tokenize, encode
        self._max_tokens, self._max_waiting, self._patience = max_tokens, max_waiting, patience
        self._max_characters = max_characters
        self._changed = threading.Condition()
        # All below are read and written under `_changed`.
        self._queue: collections.deque[Waiting] = collections.deque()
        self._tokens = 0  # in the queue
        self._places = 0  # taken by texts in the queue or on their way to it
        self._stopped = False

    def submit(self, texts: list[str]) -> list[Future[list[float]]]:
        """Queues all of these texts or none.

        Raises:
            HTTPException: there are too many, they are too long, or a text has no tokens.
        """
        if len(texts) > self._max_waiting:
            raise HTTPException(
                413,
                f"texts: expected at most {self._max_waiting}, got {len(texts)}",
            )
        characters = sum(map(len, texts))
        if characters > self._max_characters:
            raise HTTPException(
                413,
                f"texts: expected at most {self._max_characters} characters in all, got "
                f"{characters}",
            )
        with self._changed:
            if self._stopped or self._places + len(texts) > self._max_waiting:
                raise HTTPException(503, "too many texts wait")
            self._places += len(texts)
        try:
            found = [Waiting(ids, Future()) for ids in self._tokenize(texts)] if texts else []
            for number, waiting in enumerate(found):
                if not waiting.ids:
                    raise HTTPException(400, f"texts[{number}]: it has no tokens")
        except BaseException:
            with self._changed:
                self._places -= len(texts)
            raise
        with self._changed:
            self._queue.extend(found)
            self._tokens += sum(len(waiting.ids) for waiting in found)
            self._changed.notify()
        return [waiting.vector for waiting in found]

    def stop(self) -> None:
        """Ends the thread after what is waiting."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self.join()

    def run(self) -> None:
        while batch := self._collect():
            # A server that ends has cancelled what it does not wait for any more.
            self._answer([w for w in batch if w.vector.set_running_or_notify_cancel()])

    def _collect(self) -> list[Waiting]:
        """The next batch; empty at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._stopped)
            self._changed.wait_for(
                lambda: self._tokens >= self._max_tokens or self._stopped, self._patience
            )
            batch, tokens = [], 0
            while self._queue and (
                not batch or tokens + len(self._queue[0].ids) <= self._max_tokens
            ):
                batch.append(self._queue.popleft())
                tokens += len(batch[-1].ids)
            self._tokens -= tokens
            self._places -= len(batch)
        return batch

    def _answer(self, batch: list[Waiting]) -> None:
        try:
            vectors = self._encode([waiting.ids for waiting in batch]) if batch else []
            answers = list(zip(batch, vectors, strict=True))
        except Exception as error:
            if len(batch) == 1:
                batch[0].vector.set_exception(error)
            else:  # each by itself, so that only the text that fails gets the error
                for waiting in batch:
                    self._answer([waiting])
            return
        for waiting, vector in answers:
            waiting.vector.set_result(vector)


def read_texts(body: bytes) -> list[str]:
    """The texts of a request's body.

    Raises:
        HTTPException: it is something else.
    """
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"body: expected JSON: {error}") from None
    texts = message.get("texts") if isinstance(message, dict) else None
    if not isinstance(texts, list):
        raise HTTPException(400, 'body: expected {"texts": [...]}')
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            found = type(text).__name__
            raise HTTPException(400, f"texts[{number}]: expected a string, got {found}")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can name half of a surrogate pair
            raise HTTPException(
                400,
                f"texts[{number}]: expected Unicode text, got a lone surrogate at {error.start}",
            ) from None
    return texts


@dataclass(frozen=True)
class Limits:
    """What one client may take."""

    body: int = 1 << 20
    """Bytes of a request's body."""
    seconds: float = 10
    """To send a request; and as long again to take the answer."""
    connections: int = 256


class Protocol(H11Protocol):
    """HTTP that ends who sends no request, or takes no answer, for which uvicorn has no limits.

    A client may close its sending side once its request is sent.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._close_in_time(lambda: self.cycle is None)

    def eof_received(self) -> bool:
        if self.cycle is not None and self.cycle.more_body:
            self.data_received(b"")  # h11 knows then that the body ends early
        return self.cycle is not None  # True: only the sending side is closed

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._close_in_time(lambda: True)

    def _close_in_time(self, due: Callable[[], bool]) -> None:
        seconds = self.config.timeout_keep_alive
        self.loop.call_later(seconds, lambda: due() and self.transport.abort())


def application(batcher: Batcher, limits: Limits) -> Starlette:
    """POST {"texts": [...]} -> {"embeddings": [[...], ...]}; `state.connections` are those open."""
    # One thread, since a tokenizer is not for several; the event loop stays free.
    worker = ThreadPoolExecutor(1)

    def refusal_of(request: Request) -> HTTPException | None:
        if len(request.app.state.connections) > limits.connections:
            return HTTPException(503, "too many connections")
        if request.scope["path"] != "/":
            return HTTPException(404)
        return None if request.method == "POST" else HTTPException(405, headers={"Allow": "POST"})

    async def body_of(request: Request) -> bytes:
        refusal, body, size = refusal_of(request), bytearray(), 0
        # All of it is read: who still sends would lose the answer.
        async for chunk in request.stream():
            size += len(chunk)
            if refusal is None and size <= limits.body:
                body += chunk
        if refusal is not None:
            raise refusal
        if size > limits.body:
            raise HTTPException(413, f"body: expected at most {limits.body} bytes")
        return bytes(body)

    async def embeddings(request: Request) -> Response:
        try:
            body = await asyncio.wait_for(body_of(request), limits.seconds)
        except asyncio.TimeoutError:
            reason = f"body: expected all of it within {limits.seconds:g} s"
            raise HTTPException(408, reason) from None
        in_worker = asyncio.get_running_loop().run_in_executor
        waiting = await in_worker(worker, lambda: batcher.submit(read_texts(body)))
        vectors = await asyncio.gather(*map(asyncio.wrap_future, waiting))
        # Numbers that have no form in JSON (nan, infinity) are a ValueError.
        return await in_worker(worker, lambda: JSONResponse({"embeddings": vectors}))

    async def refused(_: Request, error: HTTPException) -> Response:
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)

    async def failed(_: Request, error: Exception) -> Response:
        return JSONResponse({"error": f"{type(error).__name__}: {error}"}, 500)

    async def gone(*_: object) -> Response:
        return Response()  # nobody reads it

    made = Starlette(
        exception_handlers={HTTPException: refused, ClientDisconnect: gone, Exception: failed}
    )
    made.router.default = request_response(embeddings)  # for all methods and paths
    return made


def server(batcher: Batcher, limits: Limits, port: int = 0) -> uvicorn.Server:
    """A server that is ready to `run`; the batcher is started by the caller."""
    app = application(batcher, limits)
    config = uvicorn.Config(
        app,
        port=port,
        http=Protocol,
        ws="none",
        lifespan="off",
        timeout_keep_alive=limits.seconds,
        headers=[("Connection", "close")],
    )
    made = uvicorn.Server(config)
    app.state.connections = made.server_state.connections
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="directory or name of a model with its tokenizer")
    parser.add_argument("--port", type=not_negative, default=8080, help="0: any free one")
    parser.add_argument("--max-tokens", type=positive, default=4096, help="of a batch")
    parser.add_argument("--max-waiting", type=positive, default=1024, help="texts in the queue")
    parser.add_argument(
        "--max-characters", type=positive, default=1 << 16, help="in all texts of a request"
    )
    parser.add_argument("--max-body", type=positive, default=Limits.body, help="bytes of a request")
    parser.add_argument(
        "--timeout", type=above_zero, default=Limits.seconds, help="seconds to send a request"
    )
    args = parser.parse_args()
    encoder = Encoder(args.model)
    batcher = Batcher(
        *(encoder.tokenize, encoder.encode),
        *(args.max_tokens, args.max_waiting, args.max_characters),
    )
    batcher.start()
    with contextlib.suppress(KeyboardInterrupt):
        server(batcher, Limits(args.max_body, args.timeout), args.port).run()
    batcher.stop()


if __name__ == "__main__":
    main()
