"""Drives pagedlc through an engine-neutral workload file, as a user would call it.

``generate`` is ``LLM.generate`` over token ids, one sampling setting a request; ``start`` and ``step`` stream requests
into one mailbox of the engine's client, which is what a server does. The workload file brings requests (``prompt``,
``max_tokens``, ``temperature``) and the clock.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pagedlc import LLM, SamplingParams
from pagedlc_engine.client import Mailbox
from pagedlc_engine.request import Request

__all__ = ["WorkloadAdapter", "with_tokenizer"]


class WorkloadRequest(Protocol):
    """What a workload asks for."""

    prompt: list[int]
    max_tokens: int
    temperature: float


class WorkloadAdapter:
    """One loaded model under a workload driver.

    Args:
        llm: Loaded.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._mailbox = Mailbox(1 << 30)
        self._handles: dict[str, Any] = {}
        self._names: dict[str, Any] = {}
        self._runs = 0

    def prepare(self, requests: Sequence[WorkloadRequest]) -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
        """Prompts and settings in pagedlc's form."""
        return [{"prompt_token_ids": item.prompt} for item in requests], [_params(item) for item in requests]

    def generate(self, native: tuple[Any, Any]) -> list[list[int]]:
        """Complete all prompts; their token ids."""
        return [output.outputs[0].token_ids for output in self.llm.generate(*native, use_tqdm=False)]

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes."""
        self.llm.reset_prefix_cache()

    def start(self, key: Any, request: WorkloadRequest) -> None:
        """Stream a request."""
        self._runs += 1
        name = f"{key}/{self._runs}"
        self._names[name] = key
        message = Request(request_id=name, prompt_token_ids=tuple(request.prompt), params=_params(request))
        client = self.llm._ready()
        self._handles[name] = client.submit(message, self._mailbox)

    def step(self) -> list[tuple[Any, int, bool]]:
        """Wait for tokens: (key, how many, whether these were the last)."""
        news = []
        for delta in self._mailbox.take():
            if delta.error is not None:
                raise delta.error
            finished = delta.finish_reason is not None
            news.append((self._names[delta.request_id], len(delta.token_ids), finished))
            if finished:
                del self._handles[delta.request_id], self._names[delta.request_id]
        return news


def _params(item: WorkloadRequest) -> SamplingParams:
    return SamplingParams(temperature=item.temperature, max_tokens=item.max_tokens, ignore_eos=True)


#: A word a role, a message's words, and the word of the role that is to answer.
_TEMPLATE = (
    "{% set names = {'system': 't1', 'user': 't2', 'assistant': 't3'} %}"
    "{% for message in messages %}{{ names[message['role']] }} {{ message['content'] }} {% endfor %}t3"
)


def with_tokenizer(model: Path) -> Path:
    """A copy of a folder that holds only a config, with a tokenizer that knows one word a token id.

    Its chat template adds a word a message, so that conversations can be made to length.
    """
    folder = Path(tempfile.mkdtemp(prefix="pagedlc-bench-")) / model.name
    shutil.copytree(model, folder)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    backend = Tokenizer(models.WordLevel({f"t{number}": number for number in range(size)}, unk_token="t0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece()
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
