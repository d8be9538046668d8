"""What stands behind the calls: a model's files, tokenizer and engine, each made when it is first needed."""

from __future__ import annotations

import os
import sys
import threading
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from tqdm import tqdm

from pagedlc.beside import Beside
from pagedlc.chat import ChatTemplate
from pagedlc.foreign import engine_options_of
from pagedlc.interruption import RunningAnswers
from pagedlc.models import DEFAULT_MODEL, ModelFiles, is_local, resolve_model
from pagedlc.prefix import PrefixHistory
from pagedlc.tokenizer import Tokenizer
from pagedlc.tokenizer_folder import has_code
from pagedlc_engine import heap
from pagedlc_engine.client import EngineClient
from pagedlc_engine.config import EngineConfig
from pagedlc_engine.device import check_hardware, settled
from pagedlc_engine.engine import check_max_model_len, model_limit
from pagedlc_engine.errors import MAKE_ANEW, ConfigError, EngineClosedError
from pagedlc_engine.hosts import EngineHost, start_host
from pagedlc_engine.model import ModelSpec, read_spec
from pagedlc_engine.stats import EngineStats

__all__ = ["ServedModel"]


class ServedModel:
    """A model on this machine that an engine can be asked to run; :class:`pagedlc.LLM` adds the ways to ask.

    Making one checks everything that can be checked without weights. Arguments and errors are those of the LLM.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        tokenizer: str | Path | None = None,
        chat_template: str | Path | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        use_tqdm: bool | None = None,
        **engine_options: Any,
    ) -> None:
        engine_options = engine_options_of(engine_options)
        self._needs_weights = engine_options.get("load_format") != "dummy"
        self._model = model
        self._revision = revision
        # A hub model's weights are fetched when they are needed, its configuration now.
        here = is_local(model)
        self._files: ModelFiles = resolve_model(model, revision, weights=self._needs_weights and here)
        self.config = EngineConfig.create(model=self._files.path, **engine_options)
        check_hardware(self.config)
        self.spec: ModelSpec = read_spec(self._files.path, self.config.load_format)
        self._max_model_len = check_max_model_len(self.config, self.spec)
        #: The greatest ``max_model_len`` that the model allows.
        self.model_limit = model_limit(self.spec)
        self._use_tqdm = use_tqdm
        self._tokenizer_source = tokenizer
        self._chat_template_source = chat_template
        self._trust_remote_code = trust_remote_code
        self._text: tuple[Tokenizer, ChatTemplate] | None = None
        self._client: EngineClient | None = None
        self._history = PrefixHistory()
        #: Where calls from an event loop do what takes a while.
        self.beside = Beside()
        #: Answers that can be interrupted; see :mod:`pagedlc.turns`.
        self.running = RunningAnswers()
        #: Others use this LLM, too: leaving a ``with`` block does not close it.
        self.shared = False
        self._closed = False
        self._process = os.getpid()
        self._own_lock = threading.RLock()

    @property
    def _lock(self) -> threading.RLock:
        """Held while something is loaded; another one in a fork, whose parent may hold this one forever."""
        if self._process != os.getpid():
            self._process, self._own_lock = os.getpid(), threading.RLock()
        return self._own_lock

    @property
    def model_name(self) -> str:
        """The model's name as it was given, or its file's name."""
        return self._files.name

    @property
    def closed(self) -> bool:
        """True after :meth:`close`."""
        return self._closed

    @property
    def usable(self) -> bool:
        """False after :meth:`close`, and when the engine has failed."""
        client = self._client
        return not self._closed and (client is None or not client.ended)

    @property
    def identity(self) -> tuple[tuple[str, object], ...]:
        """Options by name; equal for LLMs that answer alike and could share one engine."""
        source = self._tokenizer_source
        return (
            *settled(self.config).model_dump().items(),
            ("tokenizer", str(source or self._files.tokenizer)),
            ("chat_template", str(self._chat_template_source)),
            ("trust_remote_code", self._trust_remote_code and (source is not None or has_code(self._files.tokenizer))),
        )

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer in tokens."""
        client = self._client
        return self._max_model_len if client is None else client.max_model_len

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; read on first use."""
        return self._text_parts()[0]

    @property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template; read on first use."""
        return self._text_parts()[1]

    def _text_parts(self) -> tuple[Tokenizer, ChatTemplate]:
        with self._lock:
            if self._text is None:
                tokenizer = Tokenizer.from_files(self._files, self._tokenizer_source, self._trust_remote_code)
                self._text = tokenizer, ChatTemplate(tokenizer, self._chat_template_source)
            return self._text

    def load(self) -> Self:
        """Load the weights and start the engine, if that has not happened yet.

        Raises:
            ModelLoadError: The files are damaged.
            OutOfMemoryError: Weights or KV cache do not fit.
            EngineClosedError: The LLM was closed.
        """
        self._ready()
        return self

    def _ready(self) -> EngineClient:
        client = self._client
        if client is not None and not self._closed:
            return client
        with self._lock:
            self._check_open()
            if self._client is None:
                client = EngineClient(self._start_host())
                if self._closed:  # by a signal's handler, while this thread loaded
                    client.close()
                self._check_open()
                self._client = client
                if client.device == "cuda":
                    heap.set_aside(client)
            return self._client

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError(f"The LLM of {self.model_name} was closed, by its close(). {MAKE_ANEW}")

    def _start_host(self) -> EngineHost:
        if self._needs_weights:
            resolve_model(self._model, self._revision)
        vocabulary = partial(self.tokenizer.vocabulary, self.spec.vocab_size)
        with self._bar(1, f"Loading {self.model_name}", "tensor", self._use_tqdm) as bar:
            return start_host(self.config, self.spec, lambda done, total: _advance(bar, done, total), vocabulary)

    async def _aread_text_parts(self) -> None:
        if self._text is None:
            await self.beside.run(self._text_parts)

    async def _aready(self) -> EngineClient:
        return self._ready() if self._client is not None else await self.beside.run(self._ready)

    def close(self) -> None:
        """Stop the engine and free its memory; running requests end with an :class:`EngineClosedError`.

        That of a shared LLM as well: everybody who holds it needs a new one then.
        """
        with self._lock:
            self._closed = True
            client, self._client = self._client, None
        if client is not None:
            client.close()
            if client.device == "cuda":
                heap.take_back(client)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ConfigError(
            f"{type(self).__name__} cannot be copied or pickled: it is an engine with threads and weights. Hand it "
            "around within the process; another process makes its own."
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.shared:
            self.close()

    def stats(self) -> EngineStats:
        """Queues, KV usage, prefix cache and speed, as of the last step."""
        client = self._client
        return EngineStats() if client is None else client.stats()

    def configure(self, *, max_num_seqs: int) -> None:
        """Change how many answers may run at once."""
        self._ready().configure(max_num_seqs)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        client = self._client
        if client is not None:
            client.reset_prefix_cache()

    def _bar(self, total: int, title: str, unit: str, show: bool | None) -> tqdm[Any]:
        hidden = not sys.stderr.isatty() if show is None else not show
        return tqdm(total=total, desc=title, unit=unit, disable=hidden, leave=False)


def _advance(bar: tqdm[Any], done: int, total: int) -> None:
    bar.total = total
    bar.update(done - bar.n)
