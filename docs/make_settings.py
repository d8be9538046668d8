"""Write docs/settings.md from the docstrings of the option classes: ``python docs/make_settings.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pagedlc.cli.options import option_help
from pagedlc_engine.config import EngineConfig
from pagedlc_engine.request import SamplingParams

TARGET = Path(__file__).with_name("settings.md")
INTRODUCTION = """# Settings

Written by `docs/make_settings.py` from the docstrings; edit those. Names are vLLM's wherever vLLM has the option.

## Engine options

Keywords of `pagedlc.LLM`, `langchain_pagedlc.VLLM` and `VLLMChat`, and `llama_index.llms.pagedlc.Vllm`; on the command
line with dashes (`max_num_seqs` is `--max-num-seqs`). An unknown name is an error that suggests the nearest one.
"""
SAMPLING = """
## Sampling parameters

Fields of `pagedlc.SamplingParams`; the integrations take them as keywords of the model and of each call. An answer has
at most 512 tokens unless told otherwise, whichever class is asked: `LLM` (`SamplingParams(max_tokens=...)`), `VLLM`,
`VLLMChat` and `Vllm` (`max_tokens`, also spelled `max_new_tokens`) or `pagedlc chat` (`--max-tokens`). Only
`pagedlc ask` and `DocumentQA`, which ask for short answers, end them at 256.

Where an option has two names, or two places (a keyword and `vllm_kwargs`), and a model is given both, they must have
the same value: otherwise the error names both. What a call brings goes before what is the model's, whichever name is
used. In LangChain, replace what was bound under the name it was bound with. In LlamaIndex's `Vllm` a keyword of the
stock class whose value is the default counts as left out.
"""


def settings_page() -> str:
    """The whole page as Markdown."""
    return INTRODUCTION + _table(EngineConfig, leave_out={"model"}) + SAMPLING + _table(SamplingParams)


def _table(options: type[BaseModel], leave_out: frozenset[str] | set[str] = frozenset()) -> str:
    helps = option_help(options)
    rows = ["", "| name | default | meaning |", "| --- | --- | --- |"]
    for name, field in options.model_fields.items():
        if name not in leave_out:
            rows.append(f"| `{name}` | `{_shown(field.default)}` | {helps[name].replace('|', chr(92) + '|')} |")
    return "\n".join(rows) + "\n"


def _shown(default: Any) -> str:
    return "()" if default == () else repr(default).replace("'", '"')


if __name__ == "__main__":
    TARGET.write_text(settings_page())
