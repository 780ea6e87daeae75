"""Vectors of texts, in OpenAI's form and in llama-server's, and scores of documents for a query.

A reply is written vector by vector: 2,048 of them are many MiB of JSON.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from llamaslot.api.bodies import LATER, encode, list_of, with_values
from llamaslot.api.generation.reply_parts import PromptDetails
from llamaslot.api.generation.request_handling import ReplyWriter, complete
from llamaslot.base.events import Finished, Output
from llamaslot.base.prompt_jobs import ReplyOptions, VectorReply
from llamaslot.service.limits import ProbsLimit
from llamaslot.service.live_request import Completion


class VectorUsage(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's token counts of a request without a reply of text."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Embedding(msgspec.Struct, forbid_unknown_fields=True):
    """The vector of an input in OpenAI's form: numbers, or little-endian float32 in base64."""

    embedding: Sequence[float] | str
    index: int
    object: Literal["embedding"] = "embedding"
    encoding_format: str | UnsetType = UNSET


class EmbeddingsReply(msgspec.Struct, forbid_unknown_fields=True):
    """Vectors in OpenAI's form."""

    model: str
    usage: VectorUsage
    data: Sequence[Embedding]
    object: Literal["list"] = "list"


class NativeEmbedding(msgspec.Struct, forbid_unknown_fields=True):
    """The vector of an input in llama-server's form, as the only row of a matrix; or a row for each token."""

    index: int
    embedding: Sequence[Sequence[float]]


class Rank(msgspec.Struct, forbid_unknown_fields=True):
    """The score of a document."""

    index: int
    relevance_score: float


class RerankReply(msgspec.Struct, forbid_unknown_fields=True):
    """Documents by their scores in Jina's form, the most relevant one first."""

    model: str
    usage: VectorUsage
    results: Sequence[Rank]
    object: Literal["list"] = "list"


class TeiRank(msgspec.Struct, forbid_unknown_fields=True):
    """The score of a document in the form of Hugging Face's TEI."""

    index: int
    score: float
    text: str | UnsetType = UNSET


async def embeddings(request: web.Request) -> web.StreamResponse:
    """Return the vectors of texts, in OpenAI's form."""
    return await complete(request, "embeddings", VectorWriter)


async def native_embedding(request: web.Request) -> web.StreamResponse:
    """Return the vectors of texts, in llama-server's form."""
    return await complete(request, "embedding", VectorWriter)


async def rerank(request: web.Request) -> web.StreamResponse:
    """Return documents by how relevant they are for a query, in Jina's form or in that of Hugging Face's TEI."""
    return await complete(request, "rerank", VectorWriter)


class VectorWriter(ReplyWriter):
    """Writes replies with vectors or scores."""

    id_prefix = "embd-"

    @classmethod
    def probs_limit(cls, options: ReplyOptions, most: int) -> ProbsLimit | None:
        """Return None: there are no probabilities."""
        return None

    def events(self, completion: Completion, output: Output | Finished) -> Iterable[bytes]:
        """Yield nothing: no such reply is streamed."""
        return ()

    def whole(self) -> Iterator[bytes]:
        """Yield the reply in the form that its request asks for."""
        form = self.options.vectors
        assert form is not None
        if form.form == "openai":
            data = list_of(self.piece(self._embedding(each, form)) for each in self.completions)
            reply = EmbeddingsReply(form.model or self.model, self._usage(), LATER)
            return with_values(reply, data)
        if form.form == "native":
            return list_of(map(self._native, self.completions))
        return self._ranks(form)

    @staticmethod
    def piece(value: Any) -> Iterator[bytes]:
        """Yield the JSON of a value, once it is asked for."""
        yield encode(value)

    @staticmethod
    def _embedding(completion: Completion, form: VectorReply) -> Embedding:
        if form.base64:
            text = base64.b64encode(completion.end.vector).decode()
            return Embedding(text, completion.index, encoding_format="base64")
        return Embedding(numbers_of(completion), completion.index)

    def _native(self, completion: Completion) -> Iterator[bytes]:
        """Return the pieces of an input's matrix: with the pooling `none`, a row of each of thousands of tokens."""
        vector = completion.end.vector
        n_numbers = self.info.n_vector if self.info.pooling == "none" else len(vector) // 4
        rows = struct.iter_unpack(f"<{n_numbers}f", vector)
        return with_values(NativeEmbedding(completion.index, LATER), list_of(map(self.piece, rows)))

    def _ranks(self, form: VectorReply) -> Iterator[bytes]:
        """Yield the documents with the highest scores; the first one of those that are alike comes first."""
        scores = [(each.index, numbers_of(each)[0]) for each in self.completions]
        best = sorted(scores, key=lambda each: -each[1])[: form.top_n]
        if form.form == "tei":
            texts = form.texts
            tei = (TeiRank(index, score, texts[index] if texts else UNSET) for index, score in best)
            return list_of(self.piece(each) for each in tei)
        ranks = [Rank(index, score) for index, score in best]
        return self.piece(RerankReply(form.model or self.model, self._usage(), ranks))

    def _usage(self) -> VectorUsage:
        progress = [each.end.progress for each in self.completions]
        n_tokens = sum(each.n_prompt for each in progress)
        return VectorUsage(n_tokens, n_tokens, PromptDetails(sum(each.n_cached for each in progress)))


def numbers_of(completion: Completion) -> tuple[float, ...]:
    """Return the vector of a completion, or its scores."""
    data = completion.end.vector
    return struct.unpack(f"<{len(data) // 4}f", data)
