"""Messages between the parent and its child processes, in addition to commands, events and jobs."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from llamaslot.base.commands import EngineCommand
from llamaslot.base.errors import ErrorInfo
from llamaslot.base.events import Event
from llamaslot.base.model import ModelInfo
from llamaslot.base.prompt_jobs import Job, JobResult, RequestPolicy
from llamaslot.base.stats import AnchorStats, MessageStats, SessionStats
from llamaslot.base.text_records import TextRecord
from llamaslot.kvcache.cache_settings import Budgets

TextStats: TypeAlias = tuple[AnchorStats, SessionStats, MessageStats]
"""Counts of what is remembered, and estimated bytes."""

OVERDUE_STATUS = 70
"""Exit status of an engine whose step took too long."""


class LoadEngine(msgspec.Struct, frozen=True, tag="load_engine"):
    """Load the model and run the engine: the first message to its process."""

    config: Any
    """`llamaslot.app.config.Config` as builtins: this layer does not know its type."""
    needs_folders: bool = True
    """False after the first start: a running server continues without unusable folders."""
    memory_bytes: int = 0
    """Bytes that weights and pool may take beside other models, for which it may be unloaded; 0: as there are."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End in order: the engine writes to disk what is not there yet."""


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """Progress of loading."""

    text: str
    fraction: float


class DiskUse(msgspec.Struct, frozen=True):
    """The folder of the disk tier, and the bytes in it."""

    folder: str
    capacity: int
    n_bytes: int
    n_other_bytes: int
    """Of `n_bytes`, those of other models."""


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The model is loaded, and the disk open."""

    info: ModelInfo
    budgets: Budgets
    records: tuple[TextRecord, ...] = ()
    """Records of the token memory of an earlier process."""
    disk: DiskUse | None = None
    """None without a disk tier."""
    remote_address: str = ""
    """Where the store of the remote tier is; empty without one."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Loading failed; the process ends."""

    error: ErrorInfo


class Events(msgspec.Struct, frozen=True, tag="events"):
    """Events of the engine in order."""

    events: list[Event]


ToEngine: TypeAlias = LoadEngine | Stop | EngineCommand
FromEngine: TypeAlias = Loading | Loaded | Refused | Events


class LoadVocab(msgspec.Struct, frozen=True, tag="load_vocab"):
    """Load the vocabulary: the first message to the prompt worker's process."""

    config: Any


class SetModel(msgspec.Struct, frozen=True, tag="set_model"):
    """Make the tokenizer and the chat template for a loaded model; answered by `PromptWorkerReady`."""

    info: ModelInfo
    template: str
    """Jinja source that flags name; empty for the model's own template."""
    template_flag: str
    """The flag that names it; empty if none does."""
    settings: RequestPolicy
    records: tuple[TextRecord, ...] = ()
    """Records that an earlier process remembered."""


class PromptWorkerReady(msgspec.Struct, frozen=True, tag="prompt_worker_ready"):
    """The prompt worker takes jobs."""

    chat_template: str
    """Jinja source of the template in use."""
    stats: TextStats


class NumberedJob(msgspec.Struct, frozen=True, tag="job"):
    """A job; answered by one `JobDone` with its number."""

    number: int
    job: Job


class NextPrompt(msgspec.Struct, frozen=True, tag="next_prompt"):
    """A job begins with a further prompt of its body, which has a time limit of its own."""

    number: int


class JobDone(msgspec.Struct, frozen=True, tag="job_done"):
    """Result of a job: the struct that the job's docstring names, or an error."""

    number: int
    result: JobResult = None
    error: ErrorInfo | None = None
    stats: TextStats = msgspec.field(default_factory=lambda: (AnchorStats(), SessionStats(), MessageStats()))


ToPrompts: TypeAlias = LoadVocab | SetModel | Stop | NumberedJob
FromPrompts: TypeAlias = PromptWorkerReady | Refused | NextPrompt | JobDone
