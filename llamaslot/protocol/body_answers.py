"""Answers of `/apply-template`, `/tokenize` and `/detokenize`, which need only chat template and vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from llamaslot.base.commands import AnswerBody, JsonReply, PromptPart, TextPart
from llamaslot.base.errors import InvalidRequestError
from llamaslot.base.model import ModelInfo
from llamaslot.protocol.bodies import ChatBody, DetokenizeBody, TokenizeBody
from llamaslot.protocol.chat_prompt import ChatReader
from llamaslot.protocol.decoding import decode
from llamaslot.protocol.text_requests import BodyTokenizer, checked, parse_prompt, refuse_missing

_MAX_TOKENS = 2**20
"""Most tokens of a text. Limited, because each may become a JSON object."""
_MAX_REPLY_BYTES = 16 * 2**20
"""Most bytes of a reply, which the parent process keeps until the client has read it."""


class BodyAnswers:
    """Answers such bodies. Usable on any thread."""

    def __init__(self, chats: ChatReader, tokenizer: BodyTokenizer, info: ModelInfo) -> None:
        self._chats = chats
        self._tokenizer = tokenizer
        self._info = info
        self._methods: dict[str, Callable[[AnswerBody], Any]] = {
            "apply_template": self._apply_template,
            "tokenize": self._tokens,
            "detokenize": self._text,
        }

    def answer(self, job: AnswerBody) -> JsonReply:
        """Answer a body; raises `InvalidRequestError`."""
        data = msgspec.json.encode(self._methods[job.kind](job))
        if len(data) > _MAX_REPLY_BYTES:
            raise InvalidRequestError(
                f"the reply would have {len(data)} bytes (limit: {_MAX_REPLY_BYTES}); send less at a time"
            )
        return JsonReply(data)

    def _tokenize(self, parts: Iterable[PromptPart], param: str, *, add_special: bool) -> list[int]:
        tokens = self._tokenizer.tokenize(tuple(parts), add_special=add_special)
        if len(tokens) > _MAX_TOKENS:
            message = f"'{param}' has {len(tokens)} tokens (limit: {_MAX_TOKENS}); send less at a time"
            raise InvalidRequestError(message, param=param)
        return tokens

    def _apply_template(self, job: AnswerBody) -> dict[str, str]:
        """Return the prompt that the template renders from a conversation and its tools."""
        return {"prompt": "".join(part.text for part in self._rendered(job))}

    def _rendered(self, job: AnswerBody, *, keeps_added: bool = False) -> tuple[TextPart, ...]:
        body = decode(job.body, ChatBody)
        refuse_missing(body)
        return self._chats.render(body, job.reasoning, keeps_added=keeps_added)

    def _tokens(self, job: AnswerBody) -> dict[str, Any]:
        """Return the token ids of a text, or of mixed texts and ids, with the text of each token if requested."""
        body = decode(job.body, TokenizeBody)
        has_messages = body.messages is not msgspec.UNSET and bytes(body.messages) != b"null"
        if body.prompt is not None or has_messages:
            adds = body.add_special_tokens is not False
            own = body.prompt
            text = (TextPart(own),) if own is not None else self._rendered(job, keeps_added=not adds)
            tokens = self._tokenize(text, "prompt" if own is not None else "messages", add_special=adds)
            reply = {"tokens": tokens, "count": len(tokens), "max_model_len": self._info.n_ctx_slot}
            if body.return_token_strs:
                reply["token_strs"] = [self._tokenizer.piece(token).decode(errors="replace") for token in tokens]
            return reply
        if body.content is None or body.content == []:
            return {"tokens": []}
        special = body.parse_special is not False
        parts = parse_prompt(body.content, self._info.n_vocab, "content", special=special)
        tokens = self._tokenize(parts, "content", add_special=bool(body.add_special))
        if not body.with_pieces:
            return {"tokens": tokens}
        return {"tokens": [{"id": token, "piece": _piece(self._tokenizer.piece(token))} for token in tokens]}

    def _text(self, job: AnswerBody) -> dict[str, str]:
        """Return the text of token ids, under llama-server's name and vLLM's."""
        tokens = checked(decode(job.body, DetokenizeBody).tokens or (), self._info.n_vocab, "tokens")
        text = self._tokenizer.detokenize(tokens)
        return {"content": text, "prompt": text}


def _piece(piece: bytes) -> str | list[int]:
    """Return a token's bytes as text if they are valid UTF-8, else as numbers."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
