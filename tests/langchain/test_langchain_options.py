"""What the constructors accept, and what they say when they do not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from langchain_fakes import FakeRegistry

from langchain_pagedlc import VLLM, VLLMChat
from pagedlc_engine.errors import ConfigError, InvalidRequestError, ModelNotFoundError


def test_takes_the_constructor_of_langchains_own_vllm_class(registry: FakeRegistry) -> None:
    llm = VLLM(
        model="some/model",
        tensor_parallel_size=1,
        trust_remote_code=True,
        n=2,
        best_of=None,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        temperature=0.7,
        top_p=0.9,
        top_k=50,
        use_beam_search=False,
        stop=["\n"],
        ignore_eos=True,
        max_new_tokens=64,
        logprobs=3,
        dtype="float32",
        download_dir=None,
        vllm_kwargs={"gpu_memory_utilization": 0.85, "seed": 7, "revision": "main"},
        verbose=False,
        tags=["a"],
    )
    llm.generate(["Hi"])
    params = registry.engine.calls[0].params
    assert (params.n, params.temperature, params.top_p, params.top_k) == (2, 0.7, 0.9, 50)
    assert (params.presence_penalty, params.frequency_penalty) == (0.1, 0.2)
    assert (params.stop, params.ignore_eos, params.max_tokens, params.logprobs) == (("\n",), True, 64, 3)
    assert llm.engine_options == {"dtype": "float32", "gpu_memory_utilization": 0.85, "seed": 7}
    assert (llm.trust_remote_code, llm.revision, params.seed) == (True, "main", None)


@pytest.mark.parametrize("cls", [VLLM, VLLMChat])
def test_engine_options_are_plain_keywords(registry: FakeRegistry, cls: type[VLLM | VLLMChat]) -> None:
    model = cls(gpu_memory_utilization=0.85, max_num_seqs=8, block_size=32, engine_options={"num_blocks": 99})
    assert model.engine_options == {
        "gpu_memory_utilization": 0.85,
        "max_num_seqs": 8,
        "block_size": 32,
        "num_blocks": 99,
    }


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("use_beam_search", True),
        ("tensor_parallel_size", 2),
        ("download_dir", "/somewhere"),
        ("best_of", 4),
        ("client", object()),
        ("model_kwargs", {"temperature": 0}),
        ("base_url", "http://localhost:8000"),
        ("openai_api_base", "http://localhost:8000"),
    ],
)
def test_an_option_that_cannot_work_here_is_refused(registry: FakeRegistry, option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=option):
        VLLM(**{option: value})


@pytest.mark.parametrize(
    ("options", "way"), [({"tools": [print]}, "bind_tools"), ({"response_format": {"type": "text"}}, "bind")]
)
def test_what_belongs_to_a_call_is_said_to(registry: FakeRegistry, options: dict[str, Any], way: str) -> None:
    with pytest.raises(ConfigError, match=f"belongs to a call, not to the model: use {way}"):
        VLLMChat(**options)


def test_best_of_is_accepted_when_it_is_n(registry: FakeRegistry) -> None:
    assert VLLM(n=3, best_of=3).n == 3


@pytest.mark.parametrize("cls", [VLLM, VLLMChat])
@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("temprature", "temperature"), ("max_num_seq", "max_num_seqs"), ("block_sizes", "block_size")],
)
def test_an_unknown_option_names_the_nearest(
    registry: FakeRegistry, cls: type[VLLM | VLLMChat], wrong: str, meant: str
) -> None:
    with pytest.raises(ConfigError, match=f"{wrong!r}.*{meant!r}"):
        cls(**{wrong: 1})


def test_an_unknown_option_inside_vllm_kwargs_names_the_nearest(registry: FakeRegistry) -> None:
    with pytest.raises(ConfigError, match=r"'max_num_seq'.*'max_num_seqs'"):
        VLLM(vllm_kwargs={"max_num_seq": 1})
    with pytest.raises(ConfigError, match="mapping"):
        VLLM(vllm_kwargs=["max_num_seqs"])


@pytest.mark.parametrize("cls", [VLLM, VLLMChat])
@pytest.mark.parametrize("nested", ["vllm_kwargs", "engine_options"])
def test_a_keyword_inside_vllm_kwargs_is_told_its_place(
    registry: FakeRegistry, cls: type[VLLM | VLLMChat], nested: str
) -> None:
    with pytest.raises(ConfigError, match=f"^temperature is a sampling parameter: .*keyword of its own.*{nested}"):
        cls(**{nested: {"temperature": 0}})
    with pytest.raises(ConfigError, match=r"^max_new_tokens is no engine option: give it as a keyword of its own"):
        cls(**{nested: {"max_new_tokens": 1}})


@pytest.mark.parametrize("cls", [VLLM, VLLMChat])
def test_no_option_is_suggested_that_would_be_refused(registry: FakeRegistry, cls: type[VLLM | VLLMChat]) -> None:
    for wrong in ({"base_urls": 1}, {"vllm_kwargs": {"tensor_paralel_size": 2}}, {"bestof": 1}):
        with pytest.raises(ConfigError, match="Unknown option") as caught:
            cls(**wrong)
        assert not re.search("'base_url'|'tensor_parallel_size'|'best_of'", str(caught.value))


@pytest.mark.parametrize("cls", [VLLM, VLLMChat])
def test_where_no_option_is_near_the_error_says_where_they_stand(
    registry: FakeRegistry, cls: type[VLLM | VLLMChat]
) -> None:
    with pytest.raises(ConfigError, match=r"docs/settings\.md") as caught:
        cls(extra_body={})
    assert len(str(caught.value)) < 120


def test_an_option_given_twice_must_agree_with_itself(registry: FakeRegistry) -> None:
    assert VLLM(block_size=32, vllm_kwargs={"block_size": 32}).engine_options == {"block_size": 32}
    assert VLLMChat(max_tokens=7, max_new_tokens=7, max_completion_tokens=7).max_tokens == 7
    assert VLLM(max_tokens=7, max_completion_tokens=7).max_new_tokens == 7


@pytest.mark.parametrize("cls", [VLLM, VLLMChat])
@pytest.mark.parametrize(
    ("options", "both"),
    [
        ({"max_tokens": 1, "max_new_tokens": 2}, "max_tokens=1 and max_new_tokens=2"),
        ({"max_completion_tokens": 1, "max_tokens": None}, "max_completion_tokens=1 and max_tokens=None"),
        ({"stop": ["a"], "stop_sequences": ["b"]}, r"stop=\['a'\] and stop_sequences=\['b'\]"),
        ({"model": "a", "model_name": "b"}, "model='a' and model_name='b'"),
        ({"block_size": 32, "vllm_kwargs": {"block_size": 16}}, r"block_size=32 and vllm_kwargs\['block_size'\]=16"),
        ({"tokenizer": "a", "vllm_kwargs": {"tokenizer": "b"}}, r"tokenizer='a' and vllm_kwargs\['tokenizer'\]='b'"),
        (
            {"engine_options": {"dtype": "float32"}, "vllm_kwargs": {"dtype": "float16"}},
            r"engine_options\['dtype'\]='float32' and vllm_kwargs\['dtype'\]='float16'",
        ),
    ],
)
def test_two_names_of_an_option_with_different_values_are_both_named(
    registry: FakeRegistry, cls: type[VLLM | VLLMChat], options: dict[str, Any], both: str
) -> None:
    with pytest.raises(ConfigError, match=both):
        cls(**options)


@pytest.mark.parametrize("cls", [VLLM, VLLMChat])
def test_of_two_names_in_a_call_the_later_counts(registry: FakeRegistry, cls: type[VLLM | VLLMChat]) -> None:
    """What was bound comes first, and a call may bring the same option under another name."""
    model = cls(max_tokens=5, stop=["x"])
    model.invoke("Hi", max_completion_tokens=3, stop_sequences=["a"])
    model.bind(max_tokens=4).invoke("Hi", max_completion_tokens=2)
    model.bind(stop_sequences=["b"]).bind(stop=["c"]).invoke("Hi")
    params = [call.params for call in registry.engine.calls]
    assert [item.max_tokens for item in params] == [3, 2, 5]
    assert [item.stop for item in params] == [("a",), ("x",), ("c",)]


def test_a_number_of_log_probabilities_has_two_names(registry: FakeRegistry) -> None:
    for number in (0, 1, 2):
        with pytest.raises(InvalidRequestError, match=f"logprobs={number} and top_logprobs=5"):
            VLLMChat(logprobs=number, top_logprobs=5)
        with pytest.raises(InvalidRequestError, match=f"logprobs={number} and top_logprobs=5"):
            VLLMChat().invoke("Hi", logprobs=number, top_logprobs=5)
    two, five = VLLMChat(logprobs=2), VLLMChat(top_logprobs=5)
    five.invoke("Hi", logprobs=2)
    two.invoke("Hi", top_logprobs=5)
    five.invoke("Hi", logprobs=True)
    five.invoke("Hi", logprobs=False)
    five.invoke("Hi", logprobs=1)
    five.invoke("Hi", logprobs=0)
    VLLMChat(logprobs=1).invoke("Hi", top_logprobs=5)
    assert [call.params.logprobs for call in registry.engine.calls] == [2, 5, 5, None, 1, 0, 5]


def test_the_form_of_an_answer_is_given_once(registry: FakeRegistry) -> None:
    with pytest.raises(InvalidRequestError, match="response_format and structured_outputs"):
        VLLMChat().invoke("Hi", response_format={"type": "json_object"}, structured_outputs={"regex": "[0-9]"})


@pytest.mark.parametrize("cls", [VLLM, VLLMChat])
def test_values_are_checked_when_the_model_is_made(registry: FakeRegistry, cls: type[VLLM | VLLMChat]) -> None:
    with pytest.raises(InvalidRequestError, match="top_p"):
        cls(top_p=1.5)
    with pytest.raises(ConfigError, match="temperature"):
        cls(temperature="hot")
    with pytest.raises(ConfigError, match="block_size"):
        cls(block_size=17)
    with pytest.raises(ModelNotFoundError, match="missing"):
        cls(model="missing")


def test_other_spellings(registry: FakeRegistry) -> None:
    chat = VLLMChat(model_name="some/model", max_new_tokens=5, stop_sequences=["x"])
    assert (chat.model, chat.max_tokens, chat.stop) == ("some/model", 5, ["x"])
    llm = VLLM(model_name="some/model", max_tokens=5)
    assert (llm.model, llm.max_new_tokens) == ("some/model", 5)


def test_a_path_is_as_good_as_its_text(registry: FakeRegistry) -> None:
    chat = VLLMChat(model=Path("models/one"), chat_template=Path("chat.jinja"))
    assert (chat.model, chat.chat_template) == ("models/one", "chat.jinja")


def test_the_default_answer_length_is_512(registry: FakeRegistry) -> None:
    models = [VLLM(), VLLMChat()]
    for model in models:
        model.invoke("Hi")
    assert [call.params.max_tokens for call in registry.engine.calls] == [512, 512]


def test_chat_template_and_tokenizer_reach_the_engine(registry: FakeRegistry) -> None:
    VLLMChat(model="m", chat_template="{{ x }}", tokenizer="t", revision="r", trust_remote_code=True, block_size=32)
    ((model, options),) = registry.engines
    assert model == "m"
    assert options == repr(
        sorted(
            {
                "chat_template": "{{ x }}",
                "tokenizer": "t",
                "revision": "r",
                "trust_remote_code": True,
                "block_size": 32,
            }.items()
        )
    )
