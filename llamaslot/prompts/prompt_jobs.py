"""Jobs of the prompt worker, and what carries them out on a tokenizer.

Jobs and results are plain values that msgspec can encode, so that the worker can run in a process of its own.
Clients take turns (`client_of`); otherwise jobs are carried out in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from llamaslot.base.commands import (
    AnswerBody,
    Detokenize,
    Detokenized,
    DropSession,
    JsonReply,
    ParseBody,
    ParsedBody,
    Submit,
)
from llamaslot.base.generation.responses import ListItems
from llamaslot.base.namespaces import salt_namespace
from llamaslot.base.prompt import TokenizedPrompt
from llamaslot.base.text_records import TextRecord
from llamaslot.base.tokens import unpacked
from llamaslot.prompts.sessions import session_digest
from llamaslot.protocol.responses.listing import list_items

if TYPE_CHECKING:
    # The parent of a worker process, which knows its jobs, needs neither numpy nor Jinja.
    from llamaslot.prompts.prompt_context import PromptContext
    from llamaslot.prompts.tokenizer import Tokenizer
    from llamaslot.protocol.request_reader import RequestReader


class TokenizePrompt(msgspec.Struct, frozen=True, tag="tokenize_prompt"):
    """Tokenize the prompt of a request; answered by `TokenizedPrompt`.

    The worker keeps the prompt's context for `Remember` and `Locate` until `Release`.
    """

    submit: Submit


class Remember(msgspec.Struct, frozen=True, tag="remember"):
    """Remember a reply; answered by `TextRecords`, which is empty if the request is not known."""

    request_id: str
    generated: bytes
    """Packed tokens."""
    n_sent: int
    """Characters that the client was sent."""
    completion_id: str = ""
    """The completion whose reply it is, if it was sent to its end."""


class TextRecords(msgspec.Struct, frozen=True, tag="text_records"):
    """New records, to be written to disk."""

    records: tuple[TextRecord, ...]


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Release a request: no reply to it will be remembered any more."""

    request_id: str


class Locate(msgspec.Struct, frozen=True, tag="locate"):
    """Count the characters that the first tokens of a request's prompt stand for; answered by `Located`."""

    request_id: str
    n_tokens: int


class Located(msgspec.Struct, frozen=True, tag="located"):
    """A position in a prompt's text."""

    n_characters: int
    """-1 if the request is not known."""


class DroppedSession(msgspec.Struct, frozen=True, tag="dropped_session"):
    """The tokens of a dropped session; answers `DropSession`."""

    namespace: str
    digest: bytes
    paths: tuple[bytes, ...]
    """The tokens of its sequences, packed; empty if there was no such session."""


class ClearTexts(msgspec.Struct, frozen=True, tag="clear_texts"):
    """Drop all text anchors, sessions and remembered replies."""


class Restore(msgspec.Struct, frozen=True, tag="restore"):
    """Take over records of an earlier process."""

    records: tuple[TextRecord, ...]


Job: TypeAlias = (
    TokenizePrompt
    | Remember
    | Release
    | Locate
    | DropSession
    | ClearTexts
    | Restore
    | Detokenize
    | ParseBody
    | AnswerBody
    | ListItems
)

JobResult: TypeAlias = (
    TokenizedPrompt | TextRecords | Located | DroppedSession | Detokenized | ParsedBody | JsonReply | None
)


def client_of(job: Job) -> str | None:
    """Return the client that waits for a job; None for a job that goes before all those, such as `Remember`.

    The prompt that comes after a reply finds what was remembered of it.
    """
    match job:
        case TokenizePrompt(submit):
            return submit.client
        case ParseBody():
            # The session in its body is not known yet.
            return job.context.sender.client(job.context.session_id)
        case Detokenize() | AnswerBody() | ListItems():
            return job.client
        case _:
            return None


_ACTIVITIES: dict[type[msgspec.Struct] | str, str] = {
    TokenizePrompt: "tokenizing the prompt",
    Locate: "finding where the prompt diverges",
    DropSession: "dropping the session",
    ClearTexts: "dropping text anchors and sessions",
    Restore: "restoring text anchors and sessions",
    Detokenize: "detokenizing the tokens",
    ListItems: "listing the items",
    **dict.fromkeys(("text", "native", "infill"), "reading the request body"),
    **dict.fromkeys(
        ("chat", "messages", "responses", "compact", "probe"),
        "reading the request body and rendering its messages",
    ),
    "apply_template": "rendering the messages",
    "tokenize": "tokenizing the text",
    "detokenize": "detokenizing the tokens",
}
"""By type, or by the kind of a body."""


def activity_of(job: Job) -> str:
    """Return the words for what a job does, for the error message of its client."""
    kind = job.kind if isinstance(job, ParseBody | AnswerBody) else type(job)
    return _ACTIVITIES.get(kind, "remembering replies")


class PromptJobs:
    """Carries out jobs, one at a time but for `PromptQuery`s, which change nothing."""

    def __init__(self, tokenizer: Tokenizer, reader: RequestReader) -> None:
        self.tokenizer = tokenizer
        self._reader = reader
        self._contexts: dict[str, PromptContext] = {}
        """Of requests that were not released."""
        self._methods: dict[type[msgspec.Struct], Callable[[Any], JobResult]] = {
            TokenizePrompt: self._tokenize_prompt,
            Remember: self._remember,
            Release: self._release,
            Locate: self._locate,
            DropSession: self._drop_session,
            ClearTexts: lambda _: tokenizer.clear(),
            Restore: lambda job: tokenizer.restore(job.records),
            Detokenize: tokenizer.detokenize,
            ParseBody: reader.read,
            AnswerBody: reader.answer,
            ListItems: list_items,
        }

    @property
    def n_contexts(self) -> int:
        """Requests that were not released."""
        return len(self._contexts)

    def run(self, job: Job) -> JobResult:
        """Carry out a job; raises `LlamaslotError` for what cannot be tokenized."""
        return self._methods[type(job)](job)

    def _tokenize_prompt(self, job: TokenizePrompt) -> TokenizedPrompt:
        context = self.tokenizer.tokenize_prompt(job.submit)
        self._contexts[job.submit.request_id] = context
        return context.prompt

    def _release(self, job: Release) -> None:
        self._contexts.pop(job.request_id, None)

    def _remember(self, job: Remember) -> TextRecords:
        context = self._contexts.get(job.request_id)
        if context is None:
            return TextRecords(())
        generated = unpacked(job.generated)
        records = self.tokenizer.remember(context, generated, job.n_sent)
        # Of a reply that was cancelled, the client may have received less than was sent.
        if not job.completion_id or context.submit.chat is None:
            return TextRecords(records)
        sent = self.tokenizer.sent(generated.tolist(), job.n_sent, context.submit.preserved_tokens)
        reply = self.tokenizer.replies.remember(context, job.completion_id, sent, self._reader.output_format)
        return TextRecords(records if reply is None else (*records, reply))

    def _locate(self, job: Locate) -> Located:
        context = self._contexts.get(job.request_id)
        return Located(self.tokenizer.n_characters(context, job.n_tokens) if context is not None else -1)

    def _drop_session(self, job: DropSession) -> DroppedSession:
        namespace = salt_namespace(job.cache_salt)
        digest = session_digest(namespace, job.session_id)
        sessions = self.tokenizer.sessions
        self.tokenizer.replies.drop_session(digest)
        branches = [(each, branch) for each, branch in sessions.items() if digest in (each, branch.parent)]
        for each, _ in branches:
            sessions.drop(each)
        return DroppedSession(namespace, digest, tuple(path for _, branch in branches for path in branch.paths))
