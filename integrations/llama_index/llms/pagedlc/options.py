"""Sorting out what people pass to the constructor and to a call.

LlamaIndex's own ``Vllm`` is a thin cover over a vLLM server or engine, so its users bring vLLM options that
have no counterpart here. Where such an option would change nothing it is taken and dropped; where it asks for
something that will not happen, the error says what to do instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pagedlc import LLM, SamplingParams
from pagedlc.foreign import check_names, check_nested, named_options, refuse_foreign
from pagedlc.option_names import settle
from pagedlc.turns import Interruption
from pagedlc_engine.config import EngineConfig
from pagedlc_engine.errors import ConfigError, InvalidRequestError

__all__ = [
    "TEMPLATE_OPTIONS",
    "TOOL_OPTIONS",
    "SplitCall",
    "SplitOptions",
    "interruption",
    "merge_engine_options",
    "merge_sampling",
    "sampling_params",
    "split_call",
    "split_options",
    "updated_settings",
]

#: What a call may bring besides sampling parameters, for the engine.
CALL_OPTIONS = frozenset({"cache_salt", "priority"})
#: What a call that goes through the chat template may bring, for :class:`pagedlc.tools.ChatTurn`.
TEMPLATE_OPTIONS = frozenset({"add_generation_prompt", "chat_template_kwargs", "continue_final_message", "reasoning"})
#: How a call may be cut short.
INTERRUPTION_OPTIONS = frozenset({"barge_in", "conversation_id", "run_id", "stop_when"})
#: As the template options, for calls whose answer may hold tool calls.
TOOL_OPTIONS = frozenset({"tools", "tool_choice", "parallel_tool_calls", "tool_call_format"})

_OTHER_NAMES = {"max_tokens": "max_new_tokens"}


@dataclass(frozen=True)
class SplitOptions:
    """Keyword options of the constructor by where they belong."""

    engine: dict[str, Any]
    sampling: dict[str, Any]
    framework: dict[str, Any]


def split_options(options: Mapping[str, Any], framework_names: Collection[str]) -> SplitOptions:
    """Sort constructor keywords into engine options, sampling parameters and fields of the framework's class.

    A name that is both an engine option and a sampling parameter (``seed``) is the sampling parameter: it makes
    answers repeatable, and instances with different values still share an engine.

    Args:
        options: Keywords that are not named in the constructor's signature.
        framework_names: Names the class itself knows; also candidates for suggestions.

    Raises:
        ConfigError: An option is unknown (the nearest known name is suggested), or has no meaning here.
    """
    engine_names = _engine_option_names()
    sampling_names = SamplingParams.model_fields
    check_names(options, {*engine_names, *sampling_names, *framework_names})
    split = SplitOptions({}, {}, {})
    for name, value in options.items():
        if name in sampling_names:
            split.sampling[name] = value
        elif name in engine_names:
            split.engine[name] = value
        elif name in framework_names:
            split.framework[name] = value
        else:
            refuse_foreign(name, value)
    return split


def merge_engine_options(
    direct: Mapping[str, Any], vllm_kwargs: Mapping[str, Any], fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Engine options given as keywords and inside ``vllm_kwargs``, as one dict.

    Args:
        direct: Those that are keywords.
        vllm_kwargs: More of them.
        fields: Those that are fields of the class. They are only compared.

    Raises:
        ConfigError: An option is unknown, has no meaning here, or was given twice with different values.
    """
    engine_names = _engine_option_names()
    check_nested("vllm_kwargs", vllm_kwargs, engine_names, {*SamplingParams.model_fields, *_OTHER_NAMES.values()})
    for name in vllm_kwargs.keys() - engine_names:
        refuse_foreign(name, vllm_kwargs[name])
    nested = {name: value for name, value in vllm_kwargs.items() if name in engine_names}
    settle([*_as_written(fields), *_as_written(nested, "vllm_kwargs")])
    return settle([*_as_written(direct), *_as_written(nested, "vllm_kwargs")])


def merge_sampling(
    fields: Mapping[str, Any], keywords: Mapping[str, Any], sampling_kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Sampling parameters given as arguments, as further keywords and inside ``sampling_kwargs``, as one dict.

    Args:
        fields: Those of the constructor's own arguments that are not at their default.
        keywords: Other keywords.
        sampling_kwargs: More of them.

    Raises:
        ConfigError: One was given twice with different values.
    """
    nested = named_options("sampling_kwargs", sampling_kwargs)
    given = [*_as_written(fields), *_as_written(keywords), *_as_written(nested, "sampling_kwargs")]
    return settle((_OTHER_NAMES.get(name, name), written, value) for name, written, value in given)


def updated_settings(settings: Mapping[str, Any], update: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a ``Vllm`` as keywords, with changes that go before whatever they are written in there.

    Args:
        settings: Its fields.
        update: Keywords of the constructor.

    Raises:
        ConfigError: Options inside another one are no mapping of names.
    """
    sampling, nested = (
        named_options(inside, update.get(inside) or {}) for inside in ("sampling_kwargs", "vllm_kwargs")
    )
    changed = {_OTHER_NAMES.get(name, name) for name in [*update, *sampling]}
    engine = {*update, *nested} - SamplingParams.model_fields.keys()
    return {
        **{name: value for name, value in settings.items() if name not in changed | engine},
        "vllm_kwargs": {name: value for name, value in settings["vllm_kwargs"].items() if name not in engine},
        "sampling_kwargs": {name: value for name, value in settings["sampling_kwargs"].items() if name not in changed},
        **update,
    }


def _as_written(options: Mapping[str, Any], inside: str = "") -> Iterator[tuple[str, str, Any]]:
    for name, value in options.items():
        yield name, f"{inside}[{name!r}]" if inside else name, value


def sampling_params(values: Mapping[str, Any]) -> SamplingParams:
    """Build :class:`SamplingParams` from vLLM's names plus ``max_new_tokens`` and ``best_of``.

    Raises:
        InvalidRequestError: A name is unknown, a value out of range, or two names contradict each other.
    """
    params = dict(values)
    best_of = params.pop("best_of", None)
    if best_of is not None and best_of != params.get("n", 1):
        raise InvalidRequestError(
            f"best_of={best_of} is not supported: leave it out and set n to get several answers to choose from."
        )
    if "max_new_tokens" in params:
        params["max_tokens"] = params.pop("max_new_tokens")
    return SamplingParams(**{name: value for name, value in params.items() if not _unset(name, value)})


@dataclass(frozen=True)
class SplitCall:
    """A call's keywords by where they belong."""

    sampling: dict[str, Any]
    request: dict[str, Any]
    turn: dict[str, Any]
    interruption: dict[str, Any]


def split_call(kwargs: Mapping[str, Any], turn_options: Collection[str]) -> SplitCall:
    """Sort a call's keywords; ``max_tokens`` gets its LlamaIndex name.

    Args:
        kwargs: What the call brings.
        turn_options: Names that go to the turn; what is unknown counts as a sampling parameter.

    Raises:
        InvalidRequestError: ``max_tokens`` and ``max_new_tokens`` differ, or there are tools where
            there can be no calls.
    """
    split = SplitCall({}, {}, {}, {})
    for name, value in kwargs.items():
        if name in turn_options:
            split.turn[name] = value
        elif name in CALL_OPTIONS:
            split.request[name] = value
        elif name in INTERRUPTION_OPTIONS:
            split.interruption[name] = value
        elif name in TOOL_OPTIONS:
            raise InvalidRequestError(
                f"{name} needs a conversation that goes through the model's chat template: call chat() or one of its "
                "variants, without a messages_to_prompt of your own."
            )
        else:
            split.sampling[name] = value
    try:
        return replace(split, sampling=merge_sampling({}, split.sampling, {}))
    except ConfigError as error:
        raise InvalidRequestError(str(error)) from None


def interruption(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Interruption:
    """How an answer may be cut short.

    Args:
        values: The call's keywords.
        defaults: ``conversation_id`` and ``barge_in`` of calls that bring none.

    Raises:
        InvalidRequestError: The call is to barge in, but into no conversation.
    """
    chosen = {**defaults, **values}
    if values.get("barge_in") and chosen["conversation_id"] is None:
        raise InvalidRequestError("barge_in needs a conversation_id: it says which conversation is cut into.")
    run_id = chosen.pop("run_id", None)
    return Interruption(names=() if run_id is None else (str(run_id),), **chosen)


def _unset(name: str, value: Any) -> bool:
    return value is None and name != "max_tokens"


def _engine_option_names() -> frozenset[str]:
    of_llm = {
        name
        for name, parameter in inspect.signature(LLM.__init__).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    return frozenset({*of_llm, *EngineConfig.model_fields} - {"model"})
