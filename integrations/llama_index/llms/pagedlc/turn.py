"""Turns of reasoning models whose answer has a form."""

from __future__ import annotations

import json
from dataclasses import replace

from pagedlc import SamplingParams
from pagedlc.tools import ChatTurn

__all__ = ["FormedTurn"]


class FormedTurn(ChatTurn):
    """A turn in which a JSON schema is that of the answer, not of the thoughts that the prompt has opened before."""

    def sampling_params(self, params: SamplingParams) -> SamplingParams:
        """See :meth:`ChatTurn.sampling_params`."""
        prepared = super().sampling_params(params)
        form = params.structured_outputs
        if form is None or form.kind != "json" or not self._thinking or self._tags is None:
            return prepared
        elements = [
            {"type": "any_text"},
            {"type": "const_string", "value": self._tags.closing},
            {"type": "regex", "pattern": r"[ \n]{0,4}"},
            {"type": "json_schema", "json_schema": json.loads(form.json)},
        ]
        tag = {"type": "sequence", "elements": elements}
        return prepared.replace(structured_outputs=replace(form, json=None, structural_tag=tag))
