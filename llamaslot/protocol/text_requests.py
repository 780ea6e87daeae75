"""From the fields of a request body to the requests for its prompts, whose texts do not leave the prompt worker.

Fill-in-the-middle prompts, for the text between a prefix and a suffix, have llama-server's layout:

    [REP]myproject  [SEP]name  text  ...  [SEP]filename  [BOS] [PRE]prefix  prompt [SUF]suffix [MID]
    |-- other files, with the tokens that the model has --|

A prompt that fits into the context is not cut, so that after each keystroke the cache has everything before it.
llama-server cuts prompts to one batch, and with each keystroke drops a little more from the start of a long prefix.
"""

from __future__ import annotations

import operator
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any, Protocol, TypeAlias, TypeVar

import msgspec

from llamaslot.base.adapters import Adapters, applied
from llamaslot.base.commands import (
    N_SEEDS,
    ContextShift,
    GenerateParams,
    ImagePart,
    PromptPart,
    TextPart,
    TokensPart,
)
from llamaslot.base.errors import ForbiddenError, InvalidRequestError, NotSupportedError
from llamaslot.base.generation.sampling import INFILL, Sampling, named_samplers
from llamaslot.base.model import FimTokens, ModelInfo
from llamaslot.base.namespaces import PUBLIC_SALT, client_salt, key_salt, salt_namespace
from llamaslot.base.prompt_jobs import RequestContext, RequestPolicy
from llamaslot.base.text_records import ChatTurn, session_digest
from llamaslot.protocol.bodies import (
    MAX_TOP_LOGPROBS,
    AdapterScale,
    ChatBody,
    CompletionBody,
    FileExtract,
    InfillBody,
    Options,
    Parts,
    PromptObject,
)
from llamaslot.protocol.images import RequestImages
from llamaslot.text.conversation import refuse_field

Prompt: TypeAlias = tuple[PromptPart, ...]
TokensOf: TypeAlias = Callable[[str], tuple[int, ...]]
"""Tokenizes a plain text."""
T = TypeVar("T")

CUT_TOKENS = 256
"""Granularity in tokens at which a too long text is cut, so that later prompts keep the same start."""
_CHARACTERS_PER_TOKEN = 32
"""Most characters of a text that are read per token of the context."""
_MAX_COPIED_BYTES = 2**26
"""Most bytes of images of all completions of a prompt, of which the engine gets a copy each."""
_MAX_NAME = 4096
"""Most characters of a file name that are used."""
_SNIPPET = "\n\n--- snippet ---\n\n"
"""Precedes each file if the model has no token for that."""

CONTINUATIONS = "a", "\nb", "<c"
"""Texts that stand for what later prompts have after a prompt that is computed ahead.

A tokenizer may join a letter, a line break or a mark with the text before it: then the others have other tokens.
"""
_IS_ID = re.compile(r"[0-9]{1,10}").fullmatch
_SAME_FIELDS = {field.name for field in msgspec.structs.fields(Sampling)} - {
    "top_k", "seed", "logit_bias", "dry_base", "dry_sequence_breakers", "samplers", "n_probs",
}  # fmt: skip
"""Request fields with the same name and type as in `Sampling`."""


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A prompt before it is tokenized, and the parameters of its completions."""

    params: GenerateParams
    parts: Prompt
    chat: ChatTurn | None = None
    """Of a chat whose reply may be remembered."""
    rest: tuple[TextPart, ...] = ()
    """The prompt after the tokens that `chat` restores; `parts` is the same conversation without them."""
    session_id: str = ""
    """The client's name for the conversation; empty for none."""
    session_branch: str = ""
    """Distinguishes conversations of one session, such as those of sub-agents, by their beginning."""
    owner: str = ""
    """The `Caller.owner` whose share of memory is charged for the remembered reply."""
    tools: bytes = b""
    """`ParserOptions.packed_tools` of a chat."""
    others: tuple[TextRequest, ...] = ()
    """The same prompt with other continuations: only the tokens with which all begin are computed."""
    is_cut: bool = False
    """True for one text that is cut to what fits instead of being refused."""
    field: str = ""
    """The request field of one of several prompts, with its index, for errors."""

    @property
    def namespace(self) -> str:
        """The namespace in which its KV and its texts may be reused."""
        return self.params.namespace

    @property
    def session(self) -> bytes:
        """Digest of its session, with which all that is remembered of it is dropped; empty for none.

        Its turns may have had other adapters.
        """
        if not self.session_id:
            return b""
        return session_digest(salt_namespace(self.params.cache_salt), self.session_id)


class BodyTokenizer(Protocol):
    """Methods of the tokenizer (`llamaslot.prompts.tokenizer`) that may run on any thread."""

    def tokenize(self, prompt: Prompt, *, add_special: bool = False) -> list[int]:
        """Return the token ids of any prompt."""

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token."""

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, with invalid UTF-8 replaced."""

    def check_size(self, prompt: Prompt) -> None:
        """Raise `ContextSizeError` for a text that is too long to fit."""


_IS_OFF: Mapping[str, Callable[[Any], bool]] = {
    "functions": operator.not_,
    "function_call": lambda value: value in ("none", "auto"),
    "modalities": lambda value: value == ["text"],
    # Without a blocking policy there are only scores, which would not change the reply.
    "moderation": lambda value: b"block" not in msgspec.json.encode(value),
}
"""Fields that are not supported, with a predicate for values other than null that leave the feature off."""


def refuse_missing(body: Options, *, is_text: bool = False) -> None:
    """Raise `NotSupportedError` for the first feature that the server, or this endpoint, does not support.

    A value that would change the reply is refused instead of being ignored; one that leaves the feature off is
    accepted. `is_text` is True for OpenAI's text completions.
    """
    for name, is_off in _IS_OFF.items():
        value = getattr(body, name)
        if name == "functions" and body.function_call == "none":
            continue
        if value is not None and not is_off(value):
            refuse_field(name, ": this value is not supported yet", NotSupportedError)
    if is_text:
        return
    if body.best_of is not None and body.best_of > (body.n or 1):
        refuse_field("best_of", "above 'n' is for /v1/completions only", NotSupportedError)
    for name in ("echo", "suffix"):
        if getattr(body, name):
            refuse_field(name, "is for /v1/completions only", NotSupportedError)


def text_requests(
    options: Options,
    prompts: Sequence[Prompt],
    context: RequestContext,
    settings: RequestPolicy,
    info: ModelInfo,
    *,
    tokens_of: TokensOf,
    session_branch: str = "",
    **of_kind: Any,
) -> tuple[TextRequest, ...]:
    """Return a request for each prompt, with `n` completions. Raises `InvalidRequestError`.

    `of_kind` has fields of `GenerateParams` that come from other things than `options`.
    """
    n = _n_computed(options)
    _check_choices(options, n, prompts, settings.max_choices)
    stop = _stop(options, settings)
    session_id = options.session_id or context.caller.session_id or options.prompt_cache_key or ""
    salt = request_salt(
        context.key_secret,
        options.cache_salt or "",
        is_public=bool(options.cache_public),
        is_admin=context.is_admin,
        is_cached=options.cache_prompt is not False,
    )
    sampling = _sampling(options, settings, info, tokens_of)
    prompt_probs = sampling.n_probs if options.echo and wants_probs(options) else -1
    if prompt_probs > MAX_TOP_LOGPROBS:
        refuse_field("logprobs", f"must be at most {MAX_TOP_LOGPROBS} with 'echo'")
    if prompt_probs >= 0 and any(isinstance(part, ImagePart) for prompt in prompts for part in prompt):
        refuse_field("logprobs", "cannot be combined with 'echo' where the prompt has images", NotSupportedError)
    id_slot = _first(options.id_slot, -1)
    if id_slot >= info.n_slots:
        refuse_field("id_slot", f"must be below {info.n_slots}")
    params = GenerateParams(
        completion_id=context.request_id,
        sampling=sampling,
        max_tokens=max_tokens_of(options, settings),
        shift=ContextShift(
            settings.shift.is_on,
            n_keep=_first(options.n_keep, settings.shift.n_keep),
            n_discard=_first(options.n_discard, settings.shift.n_discard),
        ),
        stop=stop,
        n_indent=_first(options.n_indent, 0),
        t_max_predict_ms=_first(options.t_max_predict_ms, -1),
        return_progress=bool(options.return_progress and options.stream),
        reports_progress=bool(options.stream and (options.timings_per_token or context.counts_tokens)),
        cache_prompt=_first(options.cache_prompt, options.cache_public or None, settings.cache_prompt),
        cache_salt=salt,
        adapters=adapters_of(options.lora, context, info),
        id_slot=id_slot,
        max_draft=0 if options.speculate is False else settings.max_draft,
        client=context.caller.client(session_id),
        n=n,
        prompt_probs=prompt_probs,
        **of_kind,
    )
    owner = context.caller.owner
    if len(prompts) == 1:
        return (TextRequest(params, prompts[0], session_id=session_id, session_branch=session_branch, owner=owner),)
    # Several prompts are no conversation, and have no session.
    return tuple(
        TextRequest(
            msgspec.structs.replace(params, completion_id=f"{params.completion_id}-{i}"),
            prompt,
            owner=owner,
            field=f"prompt[{i}]",
        )
        for i, prompt in enumerate(prompts)
    )


def warming(request: TextRequest, pin: bool | None) -> TextRequest:
    """Return the request that computes a prompt and generates nothing; raises `InvalidRequestError`."""
    params = request.params
    if not params.cache_prompt:
        refuse_field("cache_prompt", "must not be false, because nothing would be kept")
    params = GenerateParams(
        params.completion_id,
        max_tokens=0,
        cache_salt=params.cache_salt,
        adapters=params.adapters,
        id_slot=params.id_slot,
        client=params.client,
        pin=pin,
    )
    return replace(request, params=params)


def open_ended(request: TextRequest) -> TextRequest:
    """Return the request for a text that later prompts continue; one that ends with other tokens is unchanged."""
    *parts, last = request.parts
    if not isinstance(last, TextPart):
        return request
    one, *others = (
        replace(request, parts=(*parts, msgspec.structs.replace(last, text=last.text + text)))
        for text in CONTINUATIONS
    )
    return replace(one, others=tuple(others))


def max_tokens_of(options: Options, settings: RequestPolicy) -> int:
    """Return the most tokens to generate; -1 for no limit."""
    return _first(options.n_predict, options.max_completion_tokens, options.max_tokens, settings.max_tokens)


def prompts_of(body: CompletionBody, n_vocab: int, max_prompts: int, images: RequestImages) -> list[Prompt]:
    """Return the prompts of a `prompt` field: one text, one list that contains token ids, or a list of prompts."""
    prompt = body.prompt
    if isinstance(prompt, str | PromptObject) or any(isinstance(item, int) for item in prompt):
        return [parse_prompt(prompt, n_vocab, "prompt", images=images)]
    if not prompt:
        refuse_field("prompt", "must not be empty")
    # Checked before they are parsed, because there may be a million.
    if len(prompt) > max_prompts:
        refuse_field("prompt", f"has {len(prompt)} prompts, and the limit is {max_prompts}")
    return [parse_prompt(item, n_vocab, f"prompt[{i}]", images=images) for i, item in enumerate(prompt)]


def parse_prompt(
    prompt: object, n_vocab: int, param: str, *, special: bool = True, images: RequestImages | None = None
) -> Prompt:
    """Return one prompt: a text, a list of texts and token ids, or llama-server's object around either.

    Only with `images` it may be an object, whose images these read.
    """
    if isinstance(prompt, PromptObject):
        assert images is not None
        if prompt.multimodal_data is not None:
            return images.in_prompt(prompt.prompt_string, prompt.multimodal_data, param)
        prompt = prompt.prompt_string
    if isinstance(prompt, str):
        return (TextPart(prompt, special=special),)
    assert isinstance(prompt, list)
    if not prompt:
        refuse_field(param, "must not be empty")
    parts: list[PromptPart] = []
    for kind, items in groupby(prompt, type):
        if kind is int:
            parts.append(TokensPart(checked(items, n_vocab, param)))
        elif kind is str:
            parts += [TextPart(text, special=special) for text in items]
        else:
            refuse_field(param, "must hold strings and token ids only")
    return tuple(parts)


def checked(tokens: Iterable[int], n_vocab: int, param: str) -> tuple[int, ...]:
    """Return token ids; raises `InvalidRequestError` for one that is not in the vocabulary."""
    ids = tuple(tokens)
    if ids and max(ids) >= n_vocab:
        refuse_field(param, f"holds token {max(ids)}, but the vocabulary ends at {n_vocab - 1}")
    return ids


def request_salt(key_secret: str, own: str, *, is_public: bool, is_admin: bool, is_cached: bool = True) -> str:
    """Return the salt of a request's namespace, from its `own` salt and, if set, its API key's `key_secret`.

    The salt does not reveal the key. With `is_public`, raises `ForbiddenError` unless the key is an
    administrator's, and `InvalidRequestError` if nothing can be public, or the request excludes it (`own`, not
    `is_cached`).
    """
    if not is_public:
        return key_salt(key_secret, own) if key_secret else client_salt(own)
    if not key_secret:
        why = "without it all requests without 'cache_salt' share their KV"
        refuse_field("cache_public", f"needs --cache-salt-from-api-key; {why}")
    if not is_admin:
        refuse_field("cache_public", "needs an administrator's API key", ForbiddenError)
    if own:
        refuse_field("cache_public", "cannot be combined with 'cache_salt'")
    if not is_cached:
        refuse_field("cache_public", "cannot be combined with 'cache_prompt': false")
    return PUBLIC_SALT


def adapters_of(chosen: Sequence[AdapterScale] | None, context: RequestContext, info: ModelInfo) -> Adapters:
    """Return the adapters that a request applies: those `chosen` by its field, else those of the server.

    Raises `InvalidRequestError`.
    """
    n = len(info.adapters)
    return applied(info.adapters, adapter_scales(chosen, n, "lora") if chosen else context.adapter_scales)


def adapter_scales(chosen: Sequence[AdapterScale], n_adapters: int, param: str) -> tuple[float, ...]:
    """Return the scale of each adapter; as in llama-server, those that are not named have 0.

    Raises `InvalidRequestError` for an id that no adapter has.
    """
    scales = [0.0] * n_adapters
    for each in chosen:
        if each.id >= n_adapters:
            has = f"the ids are 0 to {n_adapters - 1}" if n_adapters else "there are none; --lora loads them"
            refuse_field(param, f"names adapter {each.id}, but {has}")
        scales[each.id] = each.scale
    return tuple(scales)


def _sampling(options: Options, settings: RequestPolicy, info: ModelInfo, tokens_of: TokensOf) -> Sampling:
    asked: dict[str, Any] = {name: value for name in _SAME_FIELDS if (value := getattr(options, name)) is not None}
    if options.top_k is not None:
        asked["top_k"] = max(options.top_k, 0)
    if options.dry_base is not None and options.dry_base >= 1:
        # As in llama-server, a smaller value means the default.
        asked["dry_base"] = options.dry_base
    if options.dry_sequence_breakers is not None:
        asked["dry_sequence_breakers"] = tuple(options.dry_sequence_breakers)
    if options.samplers is not None:
        asked["samplers"] = named_samplers(options.samplers)
        if INFILL in asked["samplers"]:
            refuse_field("samplers", f": the sampler '{INFILL}' is not supported yet", NotSupportedError)
    if options.logit_bias is not None:
        most = settings.max_logit_bias_entries
        asked["logit_bias"] = _logit_bias(options.logit_bias, most, info.n_vocab, tokens_of)
    # If the best of several completions are to be returned, the probabilities of the chosen tokens are needed.
    asked["n_probs"] = max(_n_probs(options), -1 if _n_computed(options) == n_choices(options) else 0)
    seed = _first(options.seed, settings.sampling.seed)
    asked["seed"] = secrets.randbelow(N_SEEDS) if seed in (-1, N_SEEDS) else seed % N_SEEDS
    return msgspec.structs.replace(settings.sampling, **asked)


def n_choices(options: Options) -> int:
    """Return the number of completions of each prompt in the reply."""
    return _first(options.n_cmpl, options.n, 1)


def _check_choices(options: Options, n: int, prompts: Sequence[Prompt], max_choices: int) -> None:
    """Raise `InvalidRequestError` for too many completions, `n` of each prompt, or too many bytes of images."""
    field = "best_of" if n > n_choices(options) else "n" if options.n_cmpl is None else "n_cmpl"
    if n * len(prompts) > max_choices:
        message = f"{n * len(prompts)} completions requested, and the limit is {max_choices} (--max-choices)"
        raise InvalidRequestError(message, param=field if n > 1 else "prompt")
    if n == 1:
        return
    for prompt in prompts:
        n_bytes = n * sum(len(part.data) for part in prompt if isinstance(part, ImagePart))
        if n_bytes > _MAX_COPIED_BYTES:
            refuse_field(
                field, f"is {n}, and the choices have {n_bytes} bytes of images (limit: {_MAX_COPIED_BYTES})"
            )


def _n_computed(options: Options) -> int:
    """Return how many completions of each prompt to compute; raises `InvalidRequestError` for a wrong `best_of`."""
    n, best_of = n_choices(options), options.best_of
    if best_of is None or not isinstance(options, CompletionBody) or best_of == n:
        return n
    # vLLM's clients send 0 for none.
    if best_of and best_of < n:
        refuse_field("best_of", f"must be at least 'n', which is {n}")
    if best_of and options.stream:
        refuse_field("best_of", "above 'n' cannot be streamed")
    return best_of or n


def wants_probs(options: Options) -> bool:
    """Return True if the reply has probabilities."""
    return _n_probs(options) >= 0


def _n_probs(options: Options) -> int:
    """Return how many alternatives with probabilities each token gets; -1 for no probabilities."""
    is_chat, logprobs = isinstance(options, ChatBody), options.logprobs
    if options.top_logprobs is not None and not (is_chat and logprobs is True):
        why = "needs 'logprobs': true" if is_chat else "is for chats only; here 'logprobs' is a number"
        refuse_field("top_logprobs", why)
    if is_chat and logprobs is not None and not isinstance(logprobs, bool):
        refuse_field("logprobs", "must be true or false in a chat")
    if is_chat and logprobs:
        return _first(options.top_logprobs, MAX_TOP_LOGPROBS)
    if options.n_probs is not None:
        return options.n_probs or -1
    # As in llama-server, true means 1. OpenAI's 0 asks for the chosen tokens only.
    return -1 if logprobs is None or logprobs is False else int(logprobs)


def _logit_bias(
    biases: Sequence[tuple[int | str, float | bool]] | dict[str, float | bool],
    most: int,
    n_vocab: int,
    tokens_of: TokensOf,
) -> dict[int, float]:
    """Return the bias of each token id. A text stands for all of its tokens, and false for a bias of -inf.

    Digits as the key of a map are a token id; in a list a text is always a text. More than `most` entries are
    refused.
    """
    if len(biases) > most:
        refuse_field("logit_bias", f"has {len(biases)} entries (limit: {most}, --max-logit-bias-entries)")
    if isinstance(biases, dict):
        biases = [(int(key) if _IS_ID(key) else key, bias) for key, bias in biases.items()]
    result: dict[int, float] = {}
    for key, bias in biases:
        if bias is True:
            refuse_field("logit_bias", "must have numbers or false")
        tokens = checked([key], n_vocab, "logit_bias") if isinstance(key, int) else tokens_of(key)
        result.update(dict.fromkeys(tokens, float("-inf") if bias is False else float(bias)))
        if len(result) > most:
            refuse_field("logit_bias", f"names more than {most} tokens (--max-logit-bias-entries)")
    return result


def _stop(options: Options, settings: RequestPolicy) -> tuple[str, ...]:
    words = [options.stop] if isinstance(options.stop, str) else options.stop or []
    if len(words) > settings.max_stop_strings:
        limit = f"{settings.max_stop_strings} (--max-stop-strings)"
        refuse_field("stop", f"has {len(words)} strings, and the limit is {limit}")
    n_chars = sum(map(len, words))
    if n_chars > settings.max_stop_chars:
        limit = f"{settings.max_stop_chars} (--max-stop-chars)"
        refuse_field("stop", f"has {n_chars} characters in total, and the limit is {limit}")
    return tuple(word for word in words if word)


def _first(*values: T | None) -> T:
    """Return the first value that is not None; the last one is a default."""
    return next(value for value in values if value is not None)


class InfillPrompts:
    """Makes fill-in-the-middle prompts for a model. Usable on any thread."""

    def __init__(
        self, info: ModelInfo, tokenize: Callable[[Prompt], list[int]], check_size: Callable[[Prompt], None]
    ) -> None:
        self._info = info
        self._tokenize = tokenize
        self._check_size = check_size
        """Raises an error for a prompt that is far too long for the context, before it is tokenized."""
        self._max_characters = info.n_ctx_slot * _CHARACTERS_PER_TOKEN

    def of_parts(self, body: InfillBody, settings: RequestPolicy) -> Prompt:
        """Return the prompt of `/infill`."""
        fim = self._fim("input_prefix")
        start = parse_prompt(body.prompt or "", self._info.n_vocab, "prompt")
        self._check_size(start)
        return self._prompt(
            fim,
            prefix=self._plain(_near(body.input_prefix, -self._max_characters), "input_prefix"),
            suffix=self._plain(_near(body.input_suffix, self._max_characters), "input_suffix"),
            start=self._tokenize(start),
            files=self._files(fim, body.input_extra or ()),
            n_max=self._n_max(max_tokens_of(body, settings)),
        )

    def of_suffix(self, prompt: Prompt, body: CompletionBody, settings: RequestPolicy) -> Prompt:
        """Return the prompt for a text between `prompt` and OpenAI's `suffix`."""
        fim = self._fim("suffix")
        if body.echo:
            refuse_field("suffix", "cannot be combined with 'echo'")
        if any(isinstance(part, ImagePart) for part in prompt):
            refuse_field("suffix", "cannot be combined with images", NotSupportedError)
        return self._prompt(
            fim,
            prefix=self._tokenize(prompt),
            suffix=self._plain(_near(body.suffix or "", self._max_characters), "suffix"),
            n_max=self._n_max(max_tokens_of(body, settings)),
        )

    def _fim(self, param: str) -> FimTokens:
        if self._info.fim is None:
            why = "needs a model whose vocabulary has fill-in-the-middle tokens"
            refuse_field(param, why, NotSupportedError)
        return self._info.fim

    def _n_max(self, max_tokens: int) -> int:
        """Return the most tokens of a prompt, after reserving at most half of the context for the reply."""
        n_ctx = self._info.n_ctx_slot
        return n_ctx - max(1, min(max_tokens, n_ctx // 2) if max_tokens >= 0 else n_ctx // 4)

    def _plain(self, text: str | Parts, param: str) -> list[int]:
        """Tokenize a text in which control tokens are plain text."""
        if not text:
            return []
        prompt = parse_prompt(text, self._info.n_vocab, param, special=False)
        if not isinstance(text, str):
            self._check_size(prompt)
        return self._tokenize(prompt)

    def _files(self, fim: FimTokens, extracts: Sequence[FileExtract]) -> list[int]:
        """Return the tokens of the other files, and of the heading of the file itself."""
        files: list[list[int]] = []
        n_left = self._max_characters
        for extract in reversed(extracts):
            if n_left <= 0:
                break
            name = (extract.filename or "tmp")[:_MAX_NAME]
            text = _near(extract.text, -n_left)
            files.append([*self._heading(fim, name), *self._plain(text, "input_extra")])
            n_left -= len(text) + len(name) + len(_SNIPPET)
        repository = [fim.repository, *self._plain("myproject\n", "")] if fim.repository >= 0 else []
        own = self._heading(fim, "filename") if fim.file_separator >= 0 else []
        return [*repository, *chain.from_iterable(reversed(files)), *own]

    def _heading(self, fim: FimTokens, filename: str) -> list[int]:
        if fim.file_separator < 0:
            return self._plain(_SNIPPET, "")
        return [fim.file_separator, *self._plain(f"{filename}\n", "input_extra")]

    @staticmethod
    def _prompt(
        fim: FimTokens,
        *,
        prefix: Sequence[int],
        suffix: Sequence[int],
        n_max: int,
        start: Sequence[int] = (),
        files: Sequence[int] = (),
    ) -> Prompt:
        """Return a prompt of at most `n_max` tokens.

        Other files are cut first. Then prefix and suffix are cut at their far ends, to 3/4 and 1/4 of the space.
        """
        bos = [fim.bos] if fim.bos >= 0 else []
        n_free = n_max - len(bos) - 3 - len(start)
        if n_free < 0:
            refuse_field("prompt", f"has more than the {n_max} tokens that fit")
        prefix = _end(prefix, n_free - min(len(suffix), n_free // 4))
        suffix = suffix[: n_free - len(prefix)]
        files = _end(files, n_free - len(prefix) - len(suffix))
        tokens = (*files, *bos, fim.prefix, *prefix, *start, fim.suffix, *suffix, fim.middle)
        return (TokensPart(tokens),)


def _near(text: str | Parts, n_characters: int) -> str | Parts:
    """Return the first `n_characters` of a text, or the last ones if the number is negative."""
    if not isinstance(text, str):
        return text
    return text[_n_cut(len(text) + n_characters) :] if n_characters < 0 else text[:n_characters]


def _end(tokens: Sequence[int], n_max: int) -> Sequence[int]:
    """Cut tokens at their start to at most `n_max`."""
    return tokens[_n_cut(len(tokens) - n_max) :]


def _n_cut(n_over: int) -> int:
    """Return how many tokens to cut if there are `n_over` too many."""
    return -(-max(n_over, 0) // CUT_TOKENS) * CUT_TOKENS
