"""Options that people bring from other classes of vLLM, and that have no counterpart here.

Where such an option asks for nothing special it is taken and dropped; where it asks for something that will not
happen, the error says what to do instead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pagedlc_engine.config import EngineConfig, check_option_names
from pagedlc_engine.errors import ConfigError
from pagedlc_engine.request import SamplingParams

__all__ = ["FOREIGN_OPTIONS", "check_names", "check_nested", "engine_options_of", "named_options", "refuse_foreign"]


@dataclass(frozen=True, slots=True)
class _Foreign:
    """Values that change nothing (``None``: every value), and what to do instead of any other."""

    neutral: tuple[Any, ...] | None
    advice: str = ""


_NO_SERVER = _Foreign(
    (None, ""),
    "The model runs inside this process and no server is called; leave it out. To talk to a server, use a client "
    "for it (in LangChain, ChatOpenAI; in LlamaIndex, OpenAILike).",
)
_KEYWORDS = _Foreign((None, {}), "Give sampling parameters and engine options as keywords of their own.")
_ONE_DEVICE = _Foreign((None, 1), "One engine uses one device; leave it at 1.")

FOREIGN_OPTIONS: Final[Mapping[str, _Foreign]] = {
    "additional_kwargs": _KEYWORDS,
    "api_key": _Foreign(None),
    "api_url": _NO_SERVER,
    "base_url": _NO_SERVER,
    "client": _Foreign((None,), "The engine is made from 'model' and the engine options."),
    "cpu_offload_gb": _Foreign((None, 0), "Weights stay on one device; use a smaller model or dtype."),
    "disable_log_stats": _Foreign(None),
    "download_dir": _Foreign(
        (None,),
        "Set the environment variable HF_HUB_CACHE to that folder, or pass the folder of a downloaded model as model.",
    ),
    "enable_chunked_prefill": _Foreign(
        (None, True), "Prompts are always computed in chunks; see max_num_batched_tokens."
    ),
    "max_retries": _Foreign(None),
    "model_kwargs": _KEYWORDS,
    "openai_api_base": _NO_SERVER,
    "openai_api_key": _Foreign(None),
    "pipeline_parallel_size": _ONE_DEVICE,
    "swap_space": _Foreign(None),
    "tensor_parallel_size": _ONE_DEVICE,
    "timeout": _Foreign((None,), "Limit the answer with max_tokens, or cancel the call (asyncio.timeout)."),
    "tokenizer_mode": _Foreign((None, "auto"), "There is one tokenizer implementation; leave it at 'auto'."),
    "use_beam_search": _Foreign((None, False), "Beam search is not available: sample with n and temperature."),
}


def refuse_foreign(name: str, value: Any) -> None:
    """Let an option of :data:`FOREIGN_OPTIONS` pass if it asks for nothing.

    Raises:
        ConfigError: It asks for something that is not available here.
    """
    option = FOREIGN_OPTIONS[name]
    if option.neutral is not None and value not in option.neutral:
        raise ConfigError(f"{name}={value!r} is not supported. {option.advice}")


def check_names(given: Iterable[str], offered: Collection[str]) -> None:
    """Let options pass that a class offers, and foreign ones; these are never suggested.

    Raises:
        ConfigError: An option is neither; the nearest that is offered is named.
    """
    unsettled = [name for name in given if name not in FOREIGN_OPTIONS]
    check_option_names(unsettled, [name for name in offered if name not in FOREIGN_OPTIONS])


def check_nested(inside: str, options: Any, offered: Collection[str], keywords: Collection[str]) -> None:
    """:func:`check_names` for the options inside another one, such as ``vllm_kwargs``.

    Args:
        inside: The option's name.
        options: Its value.
        offered: What may stand there.
        keywords: What may stand beside it.

    Raises:
        ConfigError: It is no mapping of names, or it holds an option that is unknown or belongs beside it.
    """
    for name in named_options(inside, options):
        if name in keywords and name not in offered and name not in FOREIGN_OPTIONS:
            kind = "a sampling parameter" if name in SamplingParams.model_fields else "no engine option"
            raise ConfigError(f"{name} is {kind}: give it as a keyword of its own, not inside {inside}.")
    check_names(options, offered)


def named_options(inside: str, options: Any) -> Mapping[str, Any]:
    """The options inside another one.

    Raises:
        ConfigError: It is no mapping, or a key is no string.
    """
    if not isinstance(options, Mapping):
        raise ConfigError(f"{inside} must be a mapping of option names to values, not {type(options).__name__}.")
    for name in options:
        if not isinstance(name, str):
            raise ConfigError(f"{inside} must be a mapping of option names to values, but {name!r} is no name.")
    return options


def engine_options_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """An LLM's options less those that ask for nothing.

    Raises:
        ConfigError: One asks for something that is not available here, or belongs to a call.
    """
    for name in FOREIGN_OPTIONS.keys() & options.keys():
        refuse_foreign(name, options[name])
    for name in options.keys() & SamplingParams.model_fields.keys() - EngineConfig.model_fields.keys():
        raise ConfigError(f"{name} is a sampling parameter: give each call SamplingParams({name}=...).")
    return {name: value for name, value in options.items() if name not in FOREIGN_OPTIONS}
