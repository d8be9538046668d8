"""Conversations to prompt tokens, through the model's chat template."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pagedlc.messages import ROLES, normalize_messages
from pagedlc.tokenizer import Tokenizer
from pagedlc_engine import heap
from pagedlc_engine.errors import InvalidRequestError

__all__ = ["ChatTemplate", "import_renderer"]


#: What people also call the roles, where that is not spelled alike.
_OTHER_NAMES = {"human": "user", "ai": "assistant", "bot": "assistant", "chatbot": "assistant", "model": "assistant"}


def import_renderer() -> None:
    """Import what writes conversations, if that has not happened: it takes a second, or several on a slow machine."""
    if "transformers.utils.chat_template_utils" not in sys.modules:
        import transformers.utils.chat_template_utils  # noqa: F401

        heap.set_aside_too()


class ChatTemplate:
    """A model's way of writing a conversation. Immutable; safe to use from many threads.

    Args:
        tokenizer: Turns the rendered text into tokens, and brings the model's own templates.
        template: A Jinja template, or the path of a file with one, to use in place of the model's own.

    Raises:
        InvalidRequestError: ``template`` is the path of no file, or is not valid Jinja.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | Path | None = None) -> None:
        self._tokenizer = tokenizer
        self._templates = dict(tokenizer.chat_templates)
        if template is not None:
            text = _read_template(template)
            _check_syntax(text)
            self._templates = {"default": text}

    @property
    def available(self) -> bool:
        """Whether there is a template at all; base models have none."""
        return bool(self._templates)

    def source(self, *, with_tools: bool = False) -> str:
        """The Jinja text that is used.

        Args:
            with_tools: For a conversation with tools, for which some models have a template of their own.

        Raises:
            InvalidRequestError: There is no template.
        """
        names = ("tool_use", "default") if with_tools else ("default",)
        for name in names:
            if name in self._templates:
                return self._templates[name]
        others = f" (it has: {', '.join(sorted(self._templates))})" if self._templates else ""
        raise InvalidRequestError(
            f"The model has no chat template{others}, so it cannot take messages. Give chat_template= (Jinja text "
            "or the path of a .jinja file), or use generate() with a prompt."
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **chat_template_kwargs: Any,
    ) -> list[int]:
        """The conversation as prompt token ids; arguments and errors as for :meth:`render_text`."""
        text = self.render_text(messages, tools, add_generation_prompt, continue_final_message, **chat_template_kwargs)
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered conversation.

        Raises:
            InvalidRequestError: There are none.
        """
        # The template writes the begin-of-text token where the model wants one.
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        if not token_ids:
            raise InvalidRequestError("The chat template made an empty prompt of the messages.")
        return token_ids

    def render_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **chat_template_kwargs: Any,
    ) -> str:
        """The conversation as the model reads it.

        Args:
            messages: OpenAI-style messages; see :func:`pagedlc.messages.normalize_messages`.
            tools: Tools as OpenAI-style JSON schemas, for templates that know tools.
            add_generation_prompt: End with the beginning of the assistant's answer.
            continue_final_message: Leave the last message open so that the answer continues it; then
                ``add_generation_prompt`` must be False.
            chat_template_kwargs: Further variables of the template, such as ``enable_thinking``.

        Raises:
            InvalidRequestError: No template; messages that are empty, malformed, or that the template refuses.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message leaves the last message open, add_generation_prompt begins a new one: "
                "pass add_generation_prompt=False with it."
            )
        conversation = normalize_messages(messages)
        schemas = _schemas(tools) if tools else None
        template = self.source(with_tools=schemas is not None)
        _check_roles(conversation, template)
        return _render(
            template,
            conversation,
            tools=schemas,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **{**self._tokenizer.special_tokens_map, **chat_template_kwargs},
        )


def _schemas(tools: Any) -> list[dict[str, Any]]:
    if isinstance(tools, Mapping | str) or not isinstance(tools, Iterable):
        raise InvalidRequestError(f"tools is a list of JSON schemas (dicts), not {type(tools).__name__}.")
    schemas = list(tools)
    for tool in schemas:
        if not isinstance(tool, Mapping):
            raise InvalidRequestError(f"A tool is a JSON schema (a dict), not {type(tool).__name__}: {tool!r}")
    return [dict(tool) for tool in schemas]


def _check_roles(conversation: list[dict[str, Any]], template: str) -> None:
    """Many templates write any role, and a model that knows none of that name answers all the same, worse."""
    for message in conversation:
        role = message["role"]
        if role not in ROLES and not any(f"{quote}{role}{quote}" in template for quote in "'\""):
            near = [_OTHER_NAMES[role.lower()]] if role.lower() in _OTHER_NAMES else get_close_matches(role, ROLES, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "the chat template knows none of that name."
            raise InvalidRequestError(f"A message has the role {role!r}: {hint} Roles are {', '.join(ROLES)}.")


def _render(template: str, conversation: list[dict[str, Any]], **options: Any) -> str:
    import_renderer()
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        # Annotated as text, it returns a pair: a text per conversation, and positions that are not used here.
        result: Any = render_jinja_template(conversations=[conversation], chat_template=template, **options)
    except jinja2.TemplateError as error:
        raise InvalidRequestError(f"The chat template refuses the messages: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"The chat template fails on the messages: {type(error).__name__}: {error}"
        ) from error
    return str(result[0][0])


def _check_syntax(template: str) -> None:
    """Compile the template by rendering no conversation with it."""
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template(conversations=[], chat_template=template)
    except jinja2.TemplateSyntaxError as error:
        raise InvalidRequestError(
            f"chat_template is not valid Jinja: {error.message} (line {error.lineno})."
        ) from error


def _read_template(template: str | Path) -> str:
    text = str(template)
    if isinstance(template, str) and ("{" in text or "\n" in text):
        return text
    path = Path(text).expanduser()
    if not path.is_file():
        raise InvalidRequestError(
            f"chat_template: there is no file {text!r}, and it is not a Jinja template (which has {{{{ }}}} in it)."
        )
    return path.read_text(encoding="utf-8")
