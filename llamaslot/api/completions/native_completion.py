"""`POST /completion`: text completions, in llama-server's own words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from aiohttp import web

from llamaslot.api.bodies import CompletionBody, read
from llamaslot.api.completions import submission, unsupported
from llamaslot.api.completions.delivery import deliver
from llamaslot.api.completions.reply_bodies import cache_use, pick, timings
from llamaslot.api.context import READINESS, SETTINGS
from llamaslot.api.middleware import UNIQUE_ID, caller_of
from llamaslot.api.sse import event
from llamaslot.base.commands import Detokenize, Detokenized, Sampling, Submit
from llamaslot.base.events import Finished, Output
from llamaslot.service.generations import Generation

_decoder = msgspec.json.Decoder(CompletionBody)

_NEUTRAL: dict[str, Any] = {
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "adaptive_target": -1.0,
    "adaptive_decay": 0.9,
    "n_keep": 0,
    "n_discard": 0,
    "n_probs": 0,
    "min_keep": 0,
    "lora": [],
    "post_sampling_probs": False,
}
"""llama-server's settings for what this server does not offer: all of it is off."""


async def completion(request: web.Request) -> web.StreamResponse:
    """Complete one prompt or several."""
    service, settings = request.app[READINESS].check(), request.app[SETTINGS]
    body = await read(request, _decoder)
    unsupported.refuse(body)
    prompts = submission.parse_prompts(body.prompt, service.info.n_vocab)
    reply_id = f"cmpl-{request[UNIQUE_ID]}"
    asked = await submission.make(
        service,
        settings,
        body,
        prompts,
        reply_id,
        caller=caller_of(request),
        return_tokens=True,
    )
    async with service.generate(asked) as choices:
        texts = [
            (await service.ask(Detokenize(choice.prompt_tokens), Detokenized)).content for choice in choices.all
        ]
        dialect = NativeDialect(settings.model_names(service.info)[0], body, choices.all, texts)
        return await deliver(request, body, choices, dialect)


class NativeDialect:
    """llama-server's replies; `prompts` are the choices' prompts as the model saw them."""

    def __init__(
        self, model: str, body: CompletionBody, choices: Sequence[Generation], prompts: Sequence[str]
    ) -> None:
        self._model = model
        self._body = body
        self._choices = choices
        self._prompts = prompts

    def chunks(self, choice: Generation, output: Output | Finished) -> Iterator[bytes]:
        """New text and tokens, and everything else at the end."""
        if output.content or output.tokens:
            part = {
                "index": choice.index,
                "content": output.content,
                "tokens": output.tokens,
                "stop": False,
                "id_slot": output.progress.slot,
                "tokens_predicted": output.progress.n_generated,
                "tokens_evaluated": output.progress.n_prompt,
            }
            if self._body.timings_per_token:
                part["timings"] = timings([output.progress])
            yield event(part)
        if isinstance(output, Finished):
            yield event(self._final(choice, content="", tokens=[]))

    def closing(self) -> Iterator[bytes]:
        """Nothing: the last event says `stop`."""
        return iter(())

    def whole(self) -> Any:
        """The final event of the choice with all of its text; a list where there are several choices."""
        bodies = [
            self._final(choice, content=choice.text, tokens=choice.tokens if self._body.return_tokens else [])
            for choice in self._choices
        ]
        return bodies[0] if len(bodies) == 1 else bodies

    def _final(self, choice: Generation, *, content: str, tokens: Sequence[int]) -> dict[str, Any]:
        end = choice.end
        submit = choice.submit
        body = {
            "index": choice.index,
            "content": content,
            "tokens": tokens,
            "id_slot": end.progress.slot,
            "stop": True,
            "model": self._model,
            "tokens_predicted": end.progress.n_generated,
            "tokens_evaluated": end.progress.n_prompt,
            "generation_settings": {
                **generation_settings(submit.sampling, submit.max_tokens),
                **_texts(submit),
                "stream": bool(self._body.stream),
                "timings_per_token": bool(self._body.timings_per_token),
            },
            "prompt": self._prompts[choice.index],
            "has_new_line": "\n" in choice.text,
            "truncated": end.truncated,
            "stop_type": end.reason,
            "stopping_word": end.stopping_word,
            "tokens_cached": end.progress.n_held,
            "timings": timings([end.progress]),
            "cache": cache_use(end.progress),
        }
        return pick(body, self._body.response_fields) if self._body.response_fields else body


def generation_settings(sampling: Sampling, max_tokens: int) -> dict[str, Any]:
    """Settings that tell nothing of a request's text, under llama-server's names; a `seed` of -1 is 2**32 - 1."""
    settings = msgspec.structs.asdict(sampling)
    del settings["logit_bias"]
    return {
        **_NEUTRAL,
        **settings,
        "seed": sampling.seed % 2**32,
        "max_tokens": max_tokens,
        "n_predict": max_tokens,
        "samplers": unsupported.SAMPLERS,
    }


def _texts(submit: Submit) -> dict[str, Any]:
    """The settings that only the request's own client sees; a bias of -inf is null."""
    return {
        "stop": submit.stop,
        "logit_bias": [{"token": token, "bias": bias} for token, bias in submit.sampling.logit_bias.items()],
        "grammar": "",
        "dry_sequence_breakers": ["\n", ":", '"', "*"],
    }
