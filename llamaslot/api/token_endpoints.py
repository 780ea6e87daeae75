"""`POST /tokenize` and `/detokenize`."""

from __future__ import annotations

from aiohttp import web

from llamaslot.api.bodies import DetokenizeBody, TokenizeBody, json_response, read
from llamaslot.api.completions.submission import checked, parse_prompt
from llamaslot.api.context import READINESS
from llamaslot.base.commands import Detokenize, Detokenized, Tokenize, Tokenized


async def tokenize(request: web.Request) -> web.Response:
    """Return the token ids of a text or of texts and ids, with the text of each token if asked for."""
    service = request.app[READINESS].check()
    body = await read(request, TokenizeBody)
    if body.content in (None, []):
        return json_response({"tokens": []})
    parts = parse_prompt(body.content, service.info.n_vocab, "content", special=body.parse_special is not False)
    query = Tokenize(parts, bool(body.add_special), bool(body.with_pieces))
    answer = await service.ask(query, Tokenized)
    if not body.with_pieces:
        return json_response({"tokens": answer.tokens})
    pairs = zip(answer.tokens, answer.pieces, strict=True)
    return json_response({"tokens": [{"id": token, "piece": _piece(piece)} for token, piece in pairs]})


async def detokenize(request: web.Request) -> web.Response:
    """Return the text of token ids."""
    service = request.app[READINESS].check()
    body = await read(request, DetokenizeBody)
    tokens = checked(body.tokens or (), service.info.n_vocab, "tokens")
    return json_response({"content": (await service.ask(Detokenize(tokens), Detokenized)).content})


def _piece(piece: bytes) -> str | list[int]:
    """Return a token's bytes as text if they are valid UTF-8, else as numbers."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
