"""A load test of the embedding server: latencies and texts a second, ours and its peer's.

    python -m benchmarks.serve                 # 5 minutes on two cores
    python -m benchmarks.serve --rounds 1 --texts 16 --dry      # try it out

`examples/embedding_server.py` gathers requests into batches by their tokens and answers; behind it
runs the model of a shape of benchmarks/lib/embed_shapes.py with random weights: by `hf.freeze`, the
same in 8 bits, or by sentence-transformers' own modules on PyTorch, in batches of 32 sorted by
length. Every client sends one text after another, each as a request of its own, as soon as it has
the last answer. Servers are processes of their own that take turns; one thread each, so that a
second core is left to the clients. Writes benchmarks/results/cpu/serve.json.
"""

from __future__ import annotations

import argparse
import http.client
import json
import logging
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.lib import embed_contenders, embed_shapes, embed_texts, harness
from examples import embedding_server

OURS, OURS_8BIT, PEER = "hf.freeze", "hf.freeze, 8 bits", "sentence-transformers"
CONTENDERS = (OURS, OURS_8BIT, PEER)


def encoder(name: str, shape: embed_shapes.Shape, folder: Path) -> embedding_server.Encoder:
    """What the server asks for tokens and vectors."""
    weights = "int8" if name == OURS_8BIT else "float32"
    made = embedding_server.Encoder(str(folder), weights)
    if name != PEER:
        return made
    build = embed_contenders.Build(shape, folder, torch.get_num_threads())
    model = embed_contenders.sentence_model(build, "sdpa").eval()

    @torch.inference_mode()
    def encode(texts: list[list[int]]) -> list[list[float]]:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        found: list[list[float]] = [[]] * len(texts)
        for first in range(0, len(order), embed_texts.BATCH_SIZE):
            some = order[first : first + embed_texts.BATCH_SIZE]
            ids = {"input_ids": [texts[i] for i in some]}
            batch = dict(made.tokenizer.pad(ids, return_tensors="pt"))
            for i, vector in zip(some, model(batch)["sentence_embedding"].tolist(), strict=True):
                found[i] = vector
        return found

    made.encode = encode  # type: ignore[method-assign]
    return made


def serve(name: str, shape: str, folder: Path, port: int) -> None:
    """The process of a server."""
    torch.set_num_threads(1)
    logging.getLogger("uvicorn.access").disabled = True
    made = encoder(name, embed_shapes.SHAPES[shape], folder)
    batcher = embedding_server.Batcher(made.tokenize, made.encode)
    batcher.start()
    embedding_server.server(batcher, embedding_server.Limits(), port).run()


def ask(port: int, text: str) -> list[float]:
    """The vector of one text."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", "/", json.dumps({"texts": [text]}))
        answer = connection.getresponse()
        body = json.loads(answer.read())
    finally:
        connection.close()
    if answer.status != 200:
        raise RuntimeError(f"the server answered {answer.status}: {body}")
    return body["embeddings"][0]


def load(port: int, texts: list[str], clients: int) -> dict[str, Any]:
    """Sends all texts by this many clients; seconds of each request and of all."""
    waiting, taken = iter(texts), list[float]()
    lock = threading.Lock()
    failures = list[BaseException]()

    def client() -> None:
        try:
            while not failures:
                with lock:
                    text = next(waiting, None)
                if text is None:
                    return
                start = time.perf_counter()
                ask(port, text)
                taken.append(time.perf_counter() - start)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=client) for _ in range(clients)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    p50, p99 = np.quantile(taken, [0.5, 0.99]).tolist()
    return {"p50": p50, "p99": p99, "texts_per_second": len(texts) / (time.perf_counter() - start)}


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]


def wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    """Returns when the server answers."""
    while True:
        try:
            ask(port, "w000005")
            return
        except ConnectionError:
            if server.poll() is not None:
                raise RuntimeError(f"the server ended with {server.returncode}") from None
            time.sleep(0.2)


def measure(ports: dict[str, int], texts: list[str], clients: int, rounds: int) -> dict[str, Any]:
    """All contenders in turns, round by round, after one that does not count."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ports}
    for number in range(rounds + 1):
        for name, port in ports.items():
            run = load(port, texts, clients)
            if number:
                found[name].append(run)
    rows = []
    for name, runs in found.items():
        row: dict[str, Any] = {"contender": name, "rounds": runs}
        row |= {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        rows.append(row)
        said = f"p50 {1e3 * row['p50']:6.1f} ms, p99 {1e3 * row['p99']:6.1f} ms"
        print(f"{clients:3d} clients  {name:22s} {row['texts_per_second']:7.1f} texts/s, {said}")
    return {"clients": clients, "results": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=list(embed_shapes.SHAPES), default="all-MiniLM-L6-v2")
    parser.add_argument("--lengths", choices=list(embed_texts.LENGTHS), default="mixed")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--texts", type=int, default=192, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layers", type=int, help="of the model, to try it out")
    parser.add_argument("--dry", action="store_true", help="print, and write nothing")
    parser.add_argument("--serve", nargs=3, metavar=("CONTENDER", "FOLDER", "PORT"))
    harness.add_name(parser, "serve")
    args = parser.parse_args()
    if args.serve:
        serve(args.serve[0], args.shape, Path(args.serve[1]), int(args.serve[2]))
        return
    shape = embed_shapes.SHAPES[args.shape]
    tokens = embed_texts.sample_tokens(args.lengths, args.texts, shape.longest, args.seed)
    texts = embed_texts.make_texts(tokens, shape.config(args.layers).vocab_size, args.seed)
    payload = {k: v for k, v in vars(args).items() if k not in ("dry", "serve", "name")}
    servers: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        embed_shapes.save_model(shape, Path(folder), args.layers)
        try:
            ports = {}
            for name in CONTENDERS:
                ports[name] = free_port()
                command = ["--shape", args.shape, "--serve", name, folder, str(ports[name])]
                servers.append(
                    subprocess.Popen([sys.executable, "-m", "benchmarks.serve", *command])
                )
                wait_for(ports[name], servers[-1])
            want = np.array([ask(ports[PEER], text) for text in texts[:8]])
            for name, least in ((OURS, 1 - 1e-5), (OURS_8BIT, 0.99)):
                got = np.array([ask(ports[name], text) for text in texts[:8]])
                norms = np.linalg.norm(got, axis=1) * np.linalg.norm(want, axis=1)
                cosine = float(((got * want).sum(1) / norms).min())
                if cosine < least:
                    raise RuntimeError(f"{name}: cosine {cosine} to the peer's vectors")
            payload |= {"tokens": int(tokens.sum()), "cells": []}
            for clients in args.clients:
                payload["cells"].append(measure(ports, texts, clients, args.rounds))
        finally:
            for server in servers:
                server.terminate()
                server.wait()
    if not args.dry:
        print(f"written to {harness.save(args.name, 'cpu', harness.command(), payload)}")


if __name__ == "__main__":
    main()
