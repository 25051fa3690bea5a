"""An embedding server: texts in, vectors out, batched by the number of their tokens.

    python examples/embedding_server.py path/to/bert --port 8080
    curl -d '{"texts": ["the cat sat", "a dog"]}' localhost:8080

Texts wait in a bounded queue; one thread takes as many as fit `--max-tokens` and runs them as one
batch. Without padding a batch costs what its tokens cost, so texts of all lengths may be mixed, and
the token count alone says how long a batch takes. A vector is the mean of its text's last hidden
states.

Each connection is one request and one answer. Errors are JSON too: {"error": "..."} with

    400  the request is not HTTP, or its body is not JSON with a list of texts
    405  it is not a POST
    408  it did not arrive within `--timeout` seconds
    413  its body is larger than `--max-body`, its texts have more than `--max-characters` in all,
         or there are more of them than may ever wait
    500  the model failed on one of these texts; other requests of the batch are not affected
    503  too many texts or connections wait; answered at once, before the texts are tokenized
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
from http import HTTPStatus
from typing import NamedTuple

import torch

from bert_unpad._arguments import above_zero, not_negative, positive
from bert_unpad._extras import packages_of

with packages_of("serve"):
    import h11
    import transformers

    from bert_unpad import hf


class Refused(Exception):
    """A request gets an error instead of vectors."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Encoder:
    """A model and its tokenizer: token ids to vectors."""

    def __init__(self, path: str) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        model = transformers.AutoModel.from_pretrained(path)
        if getattr(model, "pooler", None) is not None:
            model.pooler = None  # nobody reads it
        self.model = hf.unpad(model.eval())
        # RoBERTa's positions begin after the padding token's id.
        first = getattr(model.embeddings, "padding_idx", -1) + 1
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
            Refused: there are too many, they are too long, or a text has no tokens.
        """
        if len(texts) > self._max_waiting:
            raise Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"texts: expected at most {self._max_waiting}, got {len(texts)}",
            )
        characters = sum(map(len, texts))
        if characters > self._max_characters:
            raise Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"texts: expected at most {self._max_characters} characters in all, got "
                f"{characters}",
            )
        with self._changed:
            if self._stopped or self._places + len(texts) > self._max_waiting:
                raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "too many texts wait")
            self._places += len(texts)
        try:
            found = [Waiting(ids, Future()) for ids in self._tokenize(texts)] if texts else []
            for number, waiting in enumerate(found):
                if not waiting.ids:
                    raise Refused(HTTPStatus.BAD_REQUEST, f"texts[{number}]: it has no tokens")
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
        Refused: it is something else.
    """
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(HTTPStatus.BAD_REQUEST, f"body: expected JSON: {error}") from None
    texts = message.get("texts") if isinstance(message, dict) else None
    if not isinstance(texts, list):
        raise Refused(HTTPStatus.BAD_REQUEST, 'body: expected {"texts": [...]}')
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            found = type(text).__name__
            raise Refused(
                HTTPStatus.BAD_REQUEST, f"texts[{number}]: expected a string, got {found}"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can name half of a surrogate pair
            raise Refused(
                HTTPStatus.BAD_REQUEST,
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


class Connection:
    """One request and its answer."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limits: Limits
    ) -> None:
        self._reader, self._writer, self._limits = reader, writer, limits
        self._http = h11.Connection(h11.SERVER)
        self._head = False

    async def receive(self) -> bytes:
        """The body of a POST.

        Raises:
            Refused: it is too large, too slow, or something else.
            ConnectionError: the client has gone without a request.
        """
        try:
            return await asyncio.wait_for(self._receive(), self._limits.seconds)
        except h11.RemoteProtocolError as error:
            raise Refused(HTTPStatus(error.error_status_hint), str(error)) from None
        except asyncio.TimeoutError:
            raise Refused(
                HTTPStatus.REQUEST_TIMEOUT,
                f"expected the whole request within {self._limits.seconds:g} s",
            ) from None

    async def _receive(self) -> bytes:
        body = bytearray()
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                if self._http.they_are_waiting_for_100_continue:
                    self._send(h11.InformationalResponse(status_code=100, headers=[]))
                self._http.receive_data(await self._reader.read(1 << 16))
            elif isinstance(event, h11.Request):
                self._head = event.method == b"HEAD"
                if event.method != b"POST":
                    raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, "expected a POST")
                self._check_size(int(dict(event.headers).get(b"content-length", 0)))
            elif isinstance(event, h11.Data):
                body += event.data
                self._check_size(len(body))
            elif isinstance(event, h11.EndOfMessage):
                return bytes(body)
            else:
                raise ConnectionError("no request came")

    def _check_size(self, size: int) -> None:
        if size > self._limits.body:
            raise Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"body: expected at most {self._limits.body} bytes",
            )

    async def send(self, status: HTTPStatus, body: bytes) -> None:
        """Sends the answer, waits until the client has it, and closes.

        Raises:
            OSError: the client has gone.
            asyncio.TimeoutError: it is too slow.
        """
        headers = [
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("Connection", "close"),
        ]
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            headers.append(("Allow", "POST"))
        self._send(h11.Response(status_code=status, headers=headers, reason=status.phrase))
        if not self._head:
            self._send(h11.Data(data=body))
        await asyncio.wait_for(self._finish(), self._limits.seconds)

    def _send(self, event: h11.Event) -> None:
        self._writer.write(self._http.send(event))

    async def _finish(self) -> None:
        await self._writer.drain()
        self._writer.write_eof()
        # Closing while the client still sends would take the answer away from it.
        while await self._reader.read(1 << 16):
            pass
        self._writer.close()
        await self._writer.wait_closed()


class Server:
    """HTTP: POST {"texts": [...]} -> {"embeddings": [[...], ...]}."""

    def __init__(self, batcher: Batcher, limits: Limits | None = None) -> None:
        self._batcher, self._limits = batcher, limits or Limits()
        self._open = 0
        # One thread, since a tokenizer is not for several; the event loop stays free.
        self._worker = ThreadPoolExecutor(1)

    async def listen(self, port: int) -> asyncio.Server:
        """On 127.0.0.1; a port of 0 is any free one."""
        return await asyncio.start_server(self._handle, "127.0.0.1", port)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer, self._limits)
        self._open += 1
        try:
            try:
                if self._open > self._limits.connections:
                    raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections are open")
                body = await self._answer(await connection.receive())
                status = HTTPStatus.OK
            except Refused as refused:
                body = json.dumps({"error": str(refused)}).encode()
                status = refused.status
            await connection.send(status, body)
        except (OSError, asyncio.TimeoutError):
            pass  # the client has gone, or does not take its answer
        finally:
            self._open -= 1
            writer.transport.abort()

    async def _answer(self, body: bytes) -> bytes:
        in_worker = asyncio.get_running_loop().run_in_executor
        try:
            waiting = await in_worker(self._worker, lambda: self._batcher.submit(read_texts(body)))
            vectors = await asyncio.gather(*map(asyncio.wrap_future, waiting))
            return await in_worker(self._worker, write_vectors, vectors)
        except Refused:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise Refused(HTTPStatus.INTERNAL_SERVER_ERROR, reason) from error


def write_vectors(vectors: list[list[float]]) -> bytes:
    """The body of an answer; a ValueError if a number has no form in JSON (nan, infinity)."""
    return json.dumps({"embeddings": vectors}, allow_nan=False).encode()


async def serve(batcher: Batcher, port: int, limits: Limits) -> None:
    server = await Server(batcher, limits).listen(port)
    print(f"listening on http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    async with server:
        await server.serve_forever()


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
        asyncio.run(serve(batcher, args.port, Limits(args.max_body, args.timeout)))
    batcher.stop()


if __name__ == "__main__":
    main()
