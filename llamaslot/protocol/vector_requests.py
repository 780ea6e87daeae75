"""From bodies with inputs to embed, or with documents to be scored for a query, to the requests for their prompts.

Each input is a prompt of its own, whose vector or scores are the reply. Inputs that begin alike, such as with an
instruction or the query of a reranker, share their prefix as other prompts do.
"""

from __future__ import annotations

import re

from llamaslot.base.adapters import Adapters, always_active
from llamaslot.base.commands import GenerateParams, TextPart, TokensPart, VectorParams
from llamaslot.base.errors import InvalidRequestError, NotSupportedError
from llamaslot.base.model import ModelInfo, RerankFormat
from llamaslot.base.prompt_jobs import Prepare, ReplyOptions, RequestPolicy, VectorReply
from llamaslot.protocol.bodies import EmbeddingBody, InputObject, Inputs, RerankBody
from llamaslot.protocol.text_requests import Prompt, TextRequest, adapters_of, parse_prompt, request_salt
from llamaslot.text.conversation import refuse_field

MAX_INPUTS = 2048
"""Most inputs or documents of a request, as in OpenAI's API."""
_NO_TOKENS = TokensPart(())
"""Before a text, so that the tokenizer adds no tokens to it."""
_PLACE = re.compile(r"\{query\}|\{document\}")


def embedding_requests(
    body: EmbeddingBody, job: Prepare, settings: RequestPolicy, info: ModelInfo
) -> tuple[tuple[TextRequest, ...], ReplyOptions]:
    """Return a request for each input, and the form of the reply. Raises `InvalidRequestError`."""
    is_openai = job.kind == "embeddings" and body.input is not None
    inputs, param = (body.input, "input") if body.input is not None else (body.content, "content")
    if inputs is None:
        raise InvalidRequestError('"input" or "content" must be provided', param="input")
    if body.encoding_format not in (None, "float", "base64"):
        message = "The format to return the embeddings in. Can be either float or base64"
        raise InvalidRequestError(message, param="encoding_format")
    if body.dimensions is not None and body.dimensions > info.n_vector:
        refuse_field("dimensions", f"must be at most {info.n_vector}")
    if body.dimensions is not None and info.pooling == "none":
        refuse_field("dimensions", "needs another pooling than none, with which each token has a vector")
    normalize = settings.embd_normalize if body.embd_normalize is None else body.embd_normalize
    # As in llama-server, vectors of tokens are not normalized.
    vector = VectorParams(-1 if info.pooling == "none" else normalize, body.dimensions or 0)
    prompts = _inputs(inputs, info.n_vocab, param)
    form = VectorReply(
        "openai" if is_openai else "native", body.model or "", base64=is_openai and body.encoding_format == "base64"
    )
    adapters = always_active(adapters_of(None, job.context, info))
    requests = _requests(body, prompts, job, settings, adapters=adapters, vector=vector, param=param)
    return requests, ReplyOptions(vectors=form)


def rerank_requests(
    body: RerankBody, job: Prepare, settings: RequestPolicy, info: ModelInfo, form: RerankFormat
) -> tuple[tuple[TextRequest, ...], ReplyOptions]:
    """Return a request for each document, and the form of the reply. Raises `InvalidRequestError`."""
    query, documents = body.query, body.documents if body.documents is not None else body.texts
    if query is None:
        raise InvalidRequestError('"query" must be provided', param="query")
    if not documents:
        raise InvalidRequestError('"documents" must be a non-empty string array', param="documents")
    _check_number(len(documents), "documents")
    is_tei = body.texts is not None
    top_n = len(documents) if body.top_n is None else body.top_n
    texts = tuple(documents) if is_tei and body.return_text else ()
    reply = VectorReply("tei" if is_tei else "rerank", body.model or "", top_n=top_n, texts=texts)
    prompts = [_rerank_prompt(form, query, document) for document in documents]
    adapters = always_active(adapters_of(None, job.context, info))
    param = "documents" if body.documents is not None else "texts"
    requests = _requests(body, prompts, job, settings, adapters=adapters, vector=VectorParams(), param=param)
    return requests, ReplyOptions(vectors=reply)


def _requests(
    body: EmbeddingBody | RerankBody,
    prompts: list[Prompt],
    job: Prepare,
    settings: RequestPolicy,
    *,
    adapters: Adapters,
    vector: VectorParams,
    param: str,
) -> tuple[TextRequest, ...]:
    context, caller = job.context, job.context.caller
    cache_prompt = settings.cache_prompt if body.cache_prompt is None else body.cache_prompt
    salt = request_salt(context.key_secret, body.cache_salt or "", is_public=False, is_admin=context.is_admin)
    return tuple(
        TextRequest(
            GenerateParams(
                context.request_id if len(prompts) == 1 else f"{context.request_id}-{i}",
                max_tokens=0,
                cache_prompt=cache_prompt,
                cache_salt=salt,
                adapters=adapters,
                client=caller.client(),
                vector=vector,
            ),
            prompt,
            owner=caller.owner,
            field=f"{param}[{i}]" if len(prompts) > 1 else "",
        )
        for i, prompt in enumerate(prompts)
    )


def _inputs(inputs: Inputs, n_vocab: int, param: str) -> list[Prompt]:
    """Return the prompts of one text, of one list that contains token ids, or of a list of inputs."""
    if not isinstance(inputs, list) or any(isinstance(item, int) for item in inputs):
        return [_input(inputs, n_vocab, param)]
    if not inputs:
        raise InvalidRequestError('"input" must not be empty', param=param)
    _check_number(len(inputs), param)
    return [_input(item, n_vocab, f"{param}[{i}]") for i, item in enumerate(inputs)]


def _input(item: object, n_vocab: int, param: str) -> Prompt:
    """Return the prompt of one input."""
    if not isinstance(item, InputObject):
        return parse_prompt(item, n_vocab, param)
    if item.content is not None:
        if any(part.type != "text" for part in item.content):
            refuse_field(f"{param}.content", "may have parts of type text only", NotSupportedError)
        return (TextPart("".join(part.text or "" for part in item.content)),)
    if item.multimodal_data:
        refuse_field(f"{param}.multimodal_data", "is not supported yet: only text is", NotSupportedError)
    if item.prompt_string is None:
        refuse_field(param, "must be a text, token ids, or an object with 'prompt_string' or 'content'")
    return parse_prompt(item.prompt_string, n_vocab, f"{param}.prompt_string")


def _rerank_prompt(form: RerankFormat, query: str, document: str) -> Prompt:
    """Return the prompt for one document, as llama-server makes it (`format_prompt_rerank`)."""
    if form.template:
        # In one pass, so that a query with "{document}" in it stays as it is.
        texts = {"{query}": query, "{document}": document}
        return _NO_TOKENS, TextPart(_PLACE.sub(lambda found: texts[found[0]], form.template))
    return (
        TokensPart(form.start),
        TextPart(query, special=False),
        TokensPart(form.middle),
        TextPart(document, special=False),
        TokensPart(form.end),
    )


def _check_number(n: int, param: str) -> None:
    if n > MAX_INPUTS:
        refuse_field(param, f"has {n} items, and the limit is {MAX_INPUTS}")
