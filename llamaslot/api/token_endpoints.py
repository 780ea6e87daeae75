"""`POST /tokenize` and `/detokenize`."""

from __future__ import annotations

from aiohttp import web

from llamaslot.api.bodies import BODY_READER, DetokenizeBody, TokenizeBody, json_response, read_as
from llamaslot.api.completions.submission import checked, parse_prompt
from llamaslot.api.context import READINESS
from llamaslot.base.commands import Detokenize, Detokenized, Tokenize, Tokenized

_EXPANSION = 2
"""Bytes of a token id in a reply, about, divided by those of a packed one."""


async def tokenize(request: web.Request) -> web.Response:
    """Return the token ids of a text or of texts and ids, with the text of each token if asked for."""
    service = request.app[READINESS].check()

    def query_of(body: TokenizeBody) -> Tokenize | None:
        if body.content in (None, []):
            return None
        parts = parse_prompt(body.content, service.info.n_vocab, "content", special=body.parse_special is not False)
        return Tokenize(parts, bool(body.add_special), bool(body.with_pieces))

    query = await read_as(request, TokenizeBody, query_of)
    if query is None:
        return json_response({"tokens": []})
    answer = await service.ask(query, Tokenized)
    n_bytes = len(answer.packed_tokens) * _EXPANSION
    return await request.app[BODY_READER].run(n_bytes, _reply, answer, query.with_pieces)


async def detokenize(request: web.Request) -> web.Response:
    """Return the text of token ids."""
    service = request.app[READINESS].check()
    n_vocab = service.info.n_vocab
    tokens = await read_as(request, DetokenizeBody, lambda body: checked(body.tokens or (), n_vocab, "tokens"))
    return json_response({"content": (await service.ask(Detokenize(tokens), Detokenized)).content})


def _reply(answer: Tokenized, with_pieces: bool) -> web.Response:
    if not with_pieces:
        return json_response({"tokens": answer.tokens})
    pairs = zip(answer.tokens, answer.pieces, strict=True)
    return json_response({"tokens": [{"id": token, "piece": _piece(piece)} for token, piece in pairs]})


def _piece(piece: bytes) -> str | list[int]:
    """Return a token's bytes as text if they are valid UTF-8, else as numbers."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
