"""What the constructor takes, refuses and passes on; copies and pickles."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts.default_prompts import DEFAULT_TEXT_QA_PROMPT
from pydantic import ValidationError

from llama_index.llms.pagedlc import Vllm
from pagedlc_engine.errors import ConfigError, EngineClosedError, InvalidRequestError

# The parameters of LlamaIndex's own Vllm, in order.
LLAMA_INDEX_PARAMETERS = [
    "model",
    "temperature",
    "tensor_parallel_size",
    "trust_remote_code",
    "n",
    "best_of",
    "presence_penalty",
    "frequency_penalty",
    "top_p",
    "top_k",
    "stop",
    "ignore_eos",
    "max_new_tokens",
    "logprobs",
    "dtype",
    "download_dir",
    "vllm_kwargs",
    "api_url",
    "callback_manager",
    "system_prompt",
    "messages_to_prompt",
    "completion_to_prompt",
    "pydantic_program_mode",
    "output_parser",
    "is_chat_model",
]


def shout(prompt: str) -> str:
    return prompt.upper()


def test_takes_the_parameters_of_llama_index_in_the_same_order() -> None:
    parameters = list(inspect.signature(Vllm.__init__).parameters)[1:]
    assert parameters[: len(LLAMA_INDEX_PARAMETERS)] == LLAMA_INDEX_PARAMETERS


def test_engine_options_come_directly_or_in_vllm_kwargs(engines: list[tuple[str, dict[str, Any]]]) -> None:
    direct = Vllm(model="smollm2", max_model_len=512, gpu_memory_utilization=0.5)
    nested = Vllm(model="smollm2", vllm_kwargs={"max_model_len": 512, "gpu_memory_utilization": 0.5})
    assert engines == [("smollm2", {"max_model_len": 512, "gpu_memory_utilization": 0.5})] * 2
    assert direct.vllm_kwargs == nested.vllm_kwargs


def test_only_what_was_chosen_reaches_the_engine(engines: list[tuple[str, dict[str, Any]]]) -> None:
    Vllm(temperature=0.3, top_k=5, repetition_penalty=1.2, system_prompt="Be brief.")
    Vllm(model=Path("/models/a"), dtype="float32", trust_remote_code=True, seed=2, vllm_kwargs={"seed": 3})
    assert engines == [
        ("smollm2", {}),
        ("/models/a", {"dtype": "float32", "trust_remote_code": True, "seed": 3}),
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 1},
        {"download_dir": None},
        {"api_url": ""},
        {"api_url": None},
        {"best_of": None},
        {"n": 2, "best_of": 2},
        {"vllm_kwargs": {"swap_space": 1, "gpu_memory_utilization": 0.5}},
        {"enforce_eager": True},
        {"enable_chunked_prefill": True},
    ],
    ids=str,
)
def test_vllm_options_that_change_nothing_are_taken(
    engines: list[tuple[str, dict[str, Any]]], options: dict[str, Any]
) -> None:
    Vllm(**options)
    assert set(engines[0][1]) <= {"gpu_memory_utilization", "enforce_eager"}


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"api_url": "http://localhost:8000"}, "OpenAILike"),
        ({"tensor_parallel_size": 2}, "one device"),
        ({"download_dir": "/tmp/models"}, "HF_HUB_CACHE"),
        ({"vllm_kwargs": {"pipeline_parallel_size": 2}}, "one device"),
        ({"max_model_length": 100}, "Did you mean 'max_model_len'"),
        ({"temprature": 0.0}, "Did you mean 'temperature'"),
        ({"vllm_kwargs": {"block_sise": 16}}, "Did you mean 'block_size'"),
        ({"block_size": 16, "vllm_kwargs": {"block_size": 32}}, r"block_size=16 and vllm_kwargs\['block_size'\]=32"),
        ({"dtype": "float32", "vllm_kwargs": {"dtype": "float16"}}, r"dtype='float32' and vllm_kwargs\['dtype'\]="),
        ({"trust_remote_code": True, "vllm_kwargs": {"trust_remote_code": False}}, "trust_remote_code=True and vllm_"),
        ({"max_new_tokens": 1, "max_tokens": 2}, "max_new_tokens=1 and max_tokens=2"),
        (
            {"temperature": 0.5, "sampling_kwargs": {"temperature": 0.0}},
            r"=0.5 and sampling_kwargs\['temperature'\]=0.0",
        ),
        ({"seed": 1, "sampling_kwargs": {"seed": 2}}, r"seed=1 and sampling_kwargs\['seed'\]=2"),
        ({"vllm_kwargs": ["block_size"]}, "vllm_kwargs must be a mapping"),
        ({"vllm_kwargs": {5: 1}}, "vllm_kwargs must be a mapping .*, but 5 is no name"),
        ({"sampling_kwargs": {5: 1}}, "sampling_kwargs must be a mapping .*, but 5 is no name"),
        ({"vllm_kwargs": {"temperature": 0}}, r"^temperature is a sampling parameter: .*keyword of its own"),
        ({"vllm_kwargs": {"max_new_tokens": 1}}, r"^max_new_tokens is no engine option: .*keyword of its own"),
        ({"additional_kwargs": {"temperature": 0}}, r"additional_kwargs=.*keywords of their own"),
        ({"extra_body": {}}, r"'extra_body'\. Engine options and .* docs/settings\.md\.$"),
        ({"tensor_paralel_siz": 2}, r"docs/settings\.md"),
        ({"model": 5}, "model: Input should be a valid string"),
        ({"trust_remote_code": "x"}, "trust_remote_code: Input should be a valid boolean"),
        ({"system_prompt": 5}, "system_prompt: Input should be a valid string"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_with_advice(engines: list[Any], options: dict[str, Any], advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        Vllm(**options)
    assert engines == []


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"best_of": 3}, "best_of"),
        ({"max_new_tokens": 0}, "max_tokens"),
        ({"min_p": 2.0}, "min_p"),
    ],
    ids=str,
)
def test_sampling_values_are_checked_at_construction(engines: list[Any], options: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        Vllm(**options)


def test_engine_fields_cannot_be_changed_afterwards_but_sampling_can(make: Any) -> None:
    llm, fake = make()
    with pytest.raises(ValidationError):
        llm.model = "other"
    llm.temperature = 0.25
    llm.complete("x")
    assert fake.calls[0].params.temperature == 0.25


def test_metadata(make: Any) -> None:
    llm, _ = make(max_new_tokens=99)
    metadata = llm.metadata
    assert (metadata.context_window, metadata.num_output, metadata.model_name) == (4096, 99, "fake")
    assert metadata.is_chat_model
    assert not make(engine={"has_template": False})[0].metadata.is_chat_model
    assert not make(is_chat_model=False)[0].metadata.is_chat_model
    assert Vllm.class_name() == "Vllm"


@pytest.mark.parametrize(
    ("options", "reserved"),
    [
        ({}, 256),
        ({"max_new_tokens": None}, 256),
        ({"max_new_tokens": 64}, 64),
        ({"max_new_tokens": 300}, 300),
        ({"max_new_tokens": 2000}, 256),
    ],
)
def test_a_short_context_has_room_for_prompt_and_answer(options: dict[str, Any], reserved: int) -> None:
    llm = Vllm(model="smollm2", max_model_len=512, **options)
    assert llm.metadata.num_output == reserved
    helper = PromptHelper.from_llm_metadata(llm.metadata, tokenizer=llm.tokenize)
    (chunk,) = helper.repack(DEFAULT_TEXT_QA_PROMPT, ["The ferry leaves at nine."])
    assert chunk == "The ferry leaves at nine."


def test_tokenize_counts_the_model_s_tokens_only(make: Any) -> None:
    assert make()[0].tokenize("abc") == [97, 98, 99]


def test_load_and_close(make: Any) -> None:
    llm, fake = make()
    assert not fake.loaded
    assert llm.load() is llm
    assert fake.loaded
    llm.close()
    llm.close()
    with pytest.raises(EngineClosedError, match="closed"):
        llm.complete("x")


def test_context_manager_closes(make: Any) -> None:
    llm, _ = make()
    with llm as entered:
        assert entered is llm
    with pytest.raises(EngineClosedError):
        llm.load()


SETTINGS: dict[str, Any] = {
    "model": "smollm2",
    "temperature": 0.3,
    "stop": ["\n"],
    "max_new_tokens": 9,
    "repetition_penalty": 1.3,
    "max_model_len": 256,
    "system_prompt": "Be brief.",
    "is_chat_model": True,
}


@pytest.mark.parametrize(
    "duplicate",
    [
        copy.copy,
        copy.deepcopy,
        lambda llm: pickle.loads(pickle.dumps(llm)),
        lambda llm: llm.model_copy(),
        lambda llm: Vllm.from_dict(llm.to_dict()),
        lambda llm: Vllm.from_dict(json.loads(llm.to_json())),
    ],
    ids=["copy", "deepcopy", "pickle", "model_copy", "dict", "json"],
)
def test_duplicates_keep_the_settings_and_ask_for_the_same_engine(engines: list[Any], duplicate: Any) -> None:
    llm = Vllm(**SETTINGS)
    again = duplicate(llm)
    assert again is not llm
    assert again.to_dict() == llm.to_dict()
    assert engines == [("smollm2", {"max_model_len": 256})] * 2
    again.vllm_kwargs["x"] = again.sampling_kwargs["x"] = 1
    assert "x" not in llm.vllm_kwargs
    assert "x" not in llm.sampling_kwargs


def test_to_dict_holds_settings_only(engines: list[Any]) -> None:
    data = Vllm(**SETTINGS).to_dict()
    assert data["class_name"] == "Vllm"
    assert data["vllm_kwargs"] == {"max_model_len": 256}
    assert data["sampling_kwargs"] == {"repetition_penalty": 1.3}
    json.dumps(data)


def test_pickle_keeps_functions_it_can_and_leaves_out_those_it_cannot(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    llm, _ = make(completion_to_prompt=shout, messages_to_prompt=lambda messages: "local")
    again = pickle.loads(pickle.dumps(llm))
    assert again.completion_to_prompt is shout
    assert again.messages_to_prompt([ChatMessage(content="hi")]) == "user: hi\nassistant: "
    assert "messages_to_prompt" in caplog.text


def test_model_copy_applies_and_checks_changes(engines: list[Any]) -> None:
    llm = Vllm(temperature=0.3)
    assert llm.model_copy(update={"temperature": 0.0}).temperature == 0.0
    assert llm.temperature == 0.3
    with pytest.raises(InvalidRequestError, match="temperature"):
        llm.model_copy(update={"temperature": -1})
    with pytest.raises(ConfigError, match=r"^sampling_kwargs must be a mapping"):
        llm.model_copy(update={"sampling_kwargs": 5})
    settings = Vllm(**SETTINGS, seed=1, vllm_kwargs={"seed": 3})
    copied = settings.model_copy(update={"max_tokens": 4, "seed": 2, "max_model_len": 128})
    assert (copied.max_new_tokens, copied.stop) == (4, ["\n"])
    assert copied.sampling_kwargs == {"repetition_penalty": 1.3, "seed": 2}
    assert copied.vllm_kwargs == {"max_model_len": 128, "seed": 3}


def test_model_copy_may_change_what_is_nested(engines: list[Any]) -> None:
    llm = Vllm(temperature=0.3, dtype="float32", seed=1)
    copied = llm.model_copy(update={"sampling_kwargs": {"temperature": 0.9}})
    assert (copied.temperature, copied.dtype) == (0.9, "float32")
    copied = llm.model_copy(update={"vllm_kwargs": {"dtype": "float16", "seed": 4}})
    assert (copied.temperature, copied.sampling_kwargs, copied.vllm_kwargs) == (
        0.3, {"seed": 1}, {"dtype": "float16", "seed": 4},
    )  # fmt: skip


def test_stop_strings_may_be_an_array(engines: list[Any]) -> None:
    assert Vllm(stop=np.array(["a", "b"])).stop == ["a", "b"]  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="stop="):
        Vllm(stop=np.array(["a", "b"]), sampling_kwargs={"stop": ["a"]})  # type: ignore[arg-type]


def test_an_option_may_be_given_twice_with_the_same_value(engines: list[Any]) -> None:
    llm = Vllm(max_tokens=9, max_new_tokens=9, sampling_kwargs={"max_tokens": 9, "top_k": 5}, top_k=5, dtype="float32")
    assert (llm.max_new_tokens, llm.top_k, llm.sampling_kwargs) == (9, 5, {})
    assert Vllm(sampling_kwargs={"temperature": 0.0}).temperature == 0.0
    assert Vllm(dtype="float32", vllm_kwargs={"dtype": "float32"}).dtype == "float32"
