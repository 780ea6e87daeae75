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
    BadBody,
    DropSession,
    JsonReply,
    Needs,
    Prepare,
    Prepared,
    PreparedPrompt,
)
from llamaslot.base.errors import InvalidRequestError
from llamaslot.base.generation.request_context import ListItems, ReplyOptions
from llamaslot.base.namespaces import salt_namespace
from llamaslot.base.text_records import TextRecord, session_digest
from llamaslot.base.tokens import unpacked
from llamaslot.protocol.responses import list_items

if TYPE_CHECKING:
    # The parent of a worker process, which knows its jobs, needs neither numpy nor Jinja.
    from llamaslot.prompts.remembering import PromptContext
    from llamaslot.prompts.tokenizer import Tokenizer
    from llamaslot.protocol.request_reader import RequestReader


class Remember(msgspec.Struct, frozen=True, tag="remember"):
    """Remember a reply to a prompt that was prepared; answered by `TextRecords`.

    The request is known until it is released, or the worker's process ends; otherwise nothing is remembered.
    """

    request_id: str
    """That of the `Prepare`, as in `Release` and `Locate`."""
    generated: bytes
    """Packed tokens."""
    n_sent: int
    """Characters that the client was sent."""
    completion_id: str = ""
    """The completion whose reply it is, if it was sent to its end."""
    prompt: int = 0
    """The number of the prompt, if there are several."""


class TextRecords(msgspec.Struct, frozen=True, tag="text_records"):
    """New records, to be written to disk."""

    records: tuple[TextRecord, ...]


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Release what is kept of a request: no reply to it will be remembered any more."""

    request_id: str


class Locate(msgspec.Struct, frozen=True, tag="locate"):
    """Count the characters that the first tokens of a request's prompt stand for; answered by `Located`."""

    request_id: str
    n_tokens: int
    prompt: int = 0


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


Job: TypeAlias = Prepare | Remember | Release | Locate | DropSession | ClearTexts | Restore | AnswerBody | ListItems
JobResult: TypeAlias = Prepared | Needs | BadBody | TextRecords | Located | DroppedSession | JsonReply | None


def client_of(job: Job) -> str | None:
    """Return the client that waits for a job; None for a job that goes before all those, such as `Remember`.

    The prompt that comes after a reply finds what was remembered of it.
    """
    match job:
        case Prepare():
            # The session in its body is not known yet.
            return job.context.caller.client()
        case AnswerBody() | ListItems():
            return job.client
        case _:
            return None


_ACTIVITIES: dict[type[msgspec.Struct] | str, str] = {
    Locate: "finding where the prompt diverges",
    DropSession: "dropping the session",
    ClearTexts: "dropping text anchors and sessions",
    Restore: "restoring text anchors and sessions",
    ListItems: "listing the items",
    **dict.fromkeys(("text", "native", "infill"), "tokenizing the prompt"),
    **dict.fromkeys(("chat", "messages", "responses", "compact", "probe"), "rendering and tokenizing the messages"),
    "apply_template": "rendering the messages",
    "tokenize": "tokenizing the text",
    "detokenize": "detokenizing the tokens",
}
"""By type, or by the kind of a body."""


def activity_of(job: Job) -> str:
    """Return the words for what a job does, for the error message of its client."""
    kind = job.kind if isinstance(job, Prepare | AnswerBody) else type(job)
    return _ACTIVITIES.get(kind, "remembering replies")


class PromptJobs:
    """Carries out jobs. `Prepare`, `AnswerBody` and `ListItems` may run beside others, those one at a time."""

    def __init__(self, tokenizer: Tokenizer, reader: RequestReader) -> None:
        self.tokenizer = tokenizer
        self._reader = reader
        self._kept: dict[str, bytes | list[PromptContext]] = {}
        """By request, until it is released: the body while it needs something more, then the prompts."""
        self._methods: dict[type[msgspec.Struct], Callable[[Any], JobResult]] = {
            Remember: self._remember,
            Release: self._release,
            Locate: self._locate,
            DropSession: self._drop_session,
            ClearTexts: lambda _: tokenizer.memory.clear(),
            Restore: lambda job: tokenizer.restore(job.records),
            AnswerBody: reader.answer,
            ListItems: list_items,
        }

    @property
    def n_kept(self) -> int:
        """Requests that were not released."""
        return len(self._kept)

    def run(self, job: Job, on_prompt: Callable[[], None] = lambda: None) -> JobResult:
        """Carry out a job; raises `LlamaslotError` for what cannot be read or tokenized.

        `on_prompt` is called before each prompt of a body but the first: the time limit is one of each prompt.
        """
        if isinstance(job, Prepare):
            return self._prepare(job, on_prompt)
        return self._methods[type(job)](job)

    def _prepare(self, job: Prepare, on_prompt: Callable[[], None]) -> Prepared | Needs | BadBody:
        request_id = job.context.request_id
        body = self._kept.pop(request_id, b"")
        if not job.body:
            job = msgspec.structs.replace(job, body=body)
        try:
            read = self._reader.read(job)
        except InvalidRequestError as error:
            return BadBody(error.info())
        if isinstance(read, Needs):
            self._kept[request_id] = job.body
            return read
        contexts: list[PromptContext] = []
        for each in read.requests:
            if contexts:
                on_prompt()
            contexts.append(self.tokenizer.tokenize_prompt(each))
            if job.is_run:
                self.tokenizer.check_fits(contexts[-1].prompt)
        self._kept[request_id] = contexts
        return Prepared(tuple(self._prompt(each, read.options, job) for each in contexts), read.options)

    def _prompt(self, context: PromptContext, options: ReplyOptions, job: Prepare) -> PreparedPrompt:
        """Return a prompt with the texts that its reply shows."""
        text = echo = ""
        if job.is_run and (job.context.shows_prompt or options.verbose):
            text = self.tokenizer.detokenize(context.prompt.tokens.tolist())
        if options.echo:
            echo = self.tokenizer.echo(context)
        return PreparedPrompt(context.request.params, context.prompt, text, echo)

    def _release(self, job: Release) -> None:
        self._kept.pop(job.request_id, None)

    def _context(self, job: Remember | Locate) -> PromptContext | None:
        """Return a prompt of a request, if it was prepared and not released."""
        kept = self._kept.get(job.request_id)
        return kept[job.prompt] if isinstance(kept, list) else None

    def _remember(self, job: Remember) -> TextRecords:
        context = self._context(job)
        if context is None:
            return TextRecords(())
        generated, format_ = unpacked(job.generated), self._reader.output_format
        return TextRecords(self.tokenizer.remember(context, generated, job.n_sent, job.completion_id, format_))

    def _locate(self, job: Locate) -> Located:
        context = self._context(job)
        return Located(self.tokenizer.n_characters(context, job.n_tokens) if context is not None else -1)

    def _drop_session(self, job: DropSession) -> DroppedSession:
        namespace = salt_namespace(job.cache_salt)
        digest = session_digest(namespace, job.session_id)
        dropped = self.tokenizer.memory.drop_session(digest)
        return DroppedSession(namespace, digest, tuple(path for each in dropped for path in each.paths))
