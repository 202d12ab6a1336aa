"""Serve a context: compress it once under plan.json, then answer questions about it over HTTP.

    python plan_model.py    # writes plan.json
    python serve.py         # then: curl -d '? code yellow' localhost:8000

docs/serving.md has a server for many contexts, which keeps them on disk.
"""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import torch

import kvsearch
from kvsearch.models.loading import load
from kvsearch.tasks.prompts import PromptFormat
from kvsearch.tasks.synthetic.suite import SyntheticTask

MODEL = "bundled"
CONTEXT = SyntheticTask("multikey").examples(1, seed=0)[0]  # a text in the bundled model's language, with questions
PROMPT = SyntheticTask.prompt  # how a question follows a context where the tokenizer has no chat template


class CompressedContext:
    """Answers questions about a text from what a plan leaves of it; no question sees another."""

    def __init__(self, planned: Any, prompts: PromptFormat, text: str) -> None:
        self.planned = planned
        self.prompts = prompts
        ids, self.rest = prompts.open_context(text)  # the rest shares a token with any question
        self.ids = ids.to(planned.device)
        self.cache = planned.read(self.ids)
        self.cache.activate_past_recording()  # layers with a window must be able to forget a question, too
        self.mark = self.cache.mark()

    def answer(self, question: str) -> str:
        """Return the greedy reply to a question."""
        asked = self.prompts.question(question, rest=self.rest)
        prompt = torch.cat([self.ids, asked.to(self.ids.device)], 1)
        output = self.planned.generate(prompt, past_key_values=self.cache, max_new_tokens=3, do_sample=False)
        self.cache.rewind(self.mark)
        return self.prompts.decode(output[0, prompt.shape[1] :].tolist())


def make_server(context: CompressedContext, port: int) -> HTTPServer:
    """Return a server that takes a question by POST and sends the reply."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            question = self.rfile.read(int(self.headers["Content-Length"])).decode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(context.answer(question).encode())

    return HTTPServer(("localhost", port), Handler)


def main(port: int = 8000) -> None:
    """Serve until the process is stopped."""
    loaded = load(MODEL)
    with kvsearch.attach(loaded.model, kvsearch.load_plan("plan.json")) as planned:
        context = CompressedContext(planned, PromptFormat(loaded.tokenizer, PROMPT), CONTEXT.context)
        print(f"{int(context.cache.entries().sum())} entries of {context.ids.shape[1]} tokens; ask on port {port}")
        make_server(context, port).serve_forever()


if __name__ == "__main__":
    main()
