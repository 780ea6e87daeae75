"""`POST /completion`: text completions in llama-server's own format, which other replies include as `__verbose`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from aiohttp import web

from llamaslot.api.bodies import LATER, list_of, with_values
from llamaslot.api.context import service_of
from llamaslot.api.generation.reply_parts import ProbsWriter, PromptProgress, progress_of, stats_of, timings
from llamaslot.api.generation.request_handling import ReplyWriter, complete
from llamaslot.api.sse import event
from llamaslot.base.commands import ContextShift, GenerateParams
from llamaslot.base.errors import NotSupportedError
from llamaslot.base.events import Finished, Output
from llamaslot.base.generation.sampling import Sampling
from llamaslot.service.live_request import Completion


def native_body(
    reply: ReplyWriter, completion: Completion, *, content: str = "", tokens: Sequence[int] = ()
) -> dict[str, Any]:
    """Return the last event of a completion, with this text, these tokens, and the prompt as the model saw it."""
    end, params = completion.end, completion.params
    return {
        "index": completion.index,
        "content": content,
        "tokens": tokens,
        "id_slot": end.progress.slot,
        "stop": True,
        "model": reply.model,
        "tokens_predicted": end.progress.n_generated,
        "tokens_evaluated": end.progress.n_prompt,
        "generation_settings": {
            **generation_settings(params.sampling, params.max_tokens, params.shift),
            **_own_settings(params, reply.info.eog),
            "stream": reply.options.stream,
            "timings_per_token": reply.options.timings_per_token,
        },
        "prompt": completion.prompt_text,
        "has_new_line": "\n" in completion.text,
        "truncated": end.truncated,
        "stop_type": end.reason,
        "stopping_word": end.stopping_word,
        "tokens_cached": end.progress.n_held,
        **stats_of([end.progress]),
    }


def whole_native_body(reply: ReplyWriter, completion: Completion) -> dict[str, Any]:
    """Return the body of a completion with all of its text; its probabilities, if it has any, are `LATER`."""
    tokens = completion.tokens.tolist() if reply.options.return_tokens else []
    body = native_body(reply, completion, content=completion.text, tokens=tokens)
    if completion.has_probs:
        body["completion_probabilities"] = LATER
    return body


def _own_settings(params: GenerateParams, eog: Sequence[int]) -> dict[str, Any]:
    """Return the settings that only the request's own client sees; a bias of -inf is null.

    With `ignore_eos`, the tokens that end a text are shown with such a bias, as in llama-server.
    """
    ends = eog if params.sampling.ignore_eos else ()
    biases = {**params.sampling.logit_bias, **dict.fromkeys(ends, -math.inf)}
    return {
        "stop": params.stop,
        "logit_bias": [{"token": token, "bias": bias} for token, bias in biases.items()],
        "grammar": params.constraint.grammar if params.constraint is not None else "",
        "dry_sequence_breakers": params.sampling.dry_sequence_breakers,
        "lora": [{"id": each.id, "scale": each.scale} for each in params.adapters],
    }


def generation_settings(sampling: Sampling, max_tokens: int, shift: ContextShift) -> dict[str, Any]:
    """Return settings that reveal nothing of a request's text, under llama-server's names; seed -1 is 2**32 - 1.

    Only the request's own client sees its adapters.
    """
    settings = msgspec.structs.asdict(sampling)
    del settings["logit_bias"], settings["dry_sequence_breakers"]
    return {
        **settings,
        "n_keep": shift.n_keep,
        "n_discard": shift.n_discard,
        "lora": [],
        "n_probs": max(sampling.n_probs, 0),
        "seed": sampling.seed % 2**32,
        "max_tokens": max_tokens,
        "n_predict": max_tokens,
    }


async def completion(request: web.Request) -> web.StreamResponse:
    """Complete one prompt or several."""
    return await complete(request, "native", NativeReplyWriter)


async def infill(request: web.Request) -> web.StreamResponse:
    """Complete the middle between a prefix and a suffix."""
    if service_of(request).info.fim is None:
        raise NotSupportedError("this model cannot infill: its vocabulary has no fill-in-the-middle tokens")
    return await complete(request, "infill", NativeReplyWriter)


class NativeReplyWriter(ReplyWriter):
    """Writes llama-server's replies."""

    id_prefix = "cmpl-"
    shows_prompt = counts_tokens = True
    probs_fields = ("n", "n_predict", "n_probs")

    def events(self, completion: Completion, output: Output | Finished) -> Iterator[bytes]:
        """Yield new text and tokens, and everything else at the end."""
        if progress := PromptProgress.of(output):
            yield event({**self._part(completion, output, "", ()), "prompt_progress": progress})
        elif completion.has_probs and output.probs is not None:
            # As with llama-server, each event has one token: the last one has the text.
            rows, writer = list(output.probs), self.probs_writers[completion.index]
            for i, row in enumerate(rows, start=1):
                part = self._part(completion, output, output.content if i == len(rows) else "", [row.token])
                yield event({**part, "completion_probabilities": writer.native([row])})
        elif output.content or output.tokens:
            yield event(self._part(completion, output, output.content, output.tokens))
        if isinstance(output, Finished):
            yield event(self._picked(native_body(self, completion)))

    def _part(
        self, completion: Completion, output: Output | Finished, content: str, tokens: Sequence[int]
    ) -> dict[str, Any]:
        """Return an event with new text and tokens."""
        progress = progress_of(output)
        part: dict[str, Any] = {
            "index": completion.index,
            "content": content,
            "tokens": tokens,
            "stop": False,
            "id_slot": progress.slot,
            "tokens_predicted": progress.n_generated,
            "tokens_evaluated": progress.n_prompt,
        }
        if self.options.timings_per_token:
            part["timings"] = timings([progress])
        return part

    def whole(self) -> Iterator[bytes]:
        """Yield the final event of the completion with all of its text; a list if there are several."""
        bodies = (self._whole(each) for each in self.completions)
        return list_of(bodies) if len(self.completions) > 1 else next(bodies)

    def _whole(self, completion: Completion) -> Iterator[bytes]:
        body = self._picked(whole_native_body(self, completion))
        if LATER not in body.values():
            return with_values(body)
        return with_values(body, ProbsWriter(completion.params).native_later(completion.probs))

    def _picked(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the fields that `response_fields` (`a` or `a/b`) name, under those names; all without any.

        Missing ones are left out.
        """
        if not self.options.response_fields:
            return body
        picked = {}
        for path in self.options.response_fields:
            value: Any = body
            for key in path.split("/"):
                if not isinstance(value, dict) or key not in value:
                    break
                value = value[key]
            else:
                picked[path] = value
        return picked
