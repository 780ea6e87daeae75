"""From the configuration to the prompt worker with its tokenizer and chat template."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

import structlog

from llamaslot.app.config import Config
from llamaslot.app.template_config import read_text
from llamaslot.base.backend import Vocab
from llamaslot.base.errors import ConfigError, InvalidRequestError
from llamaslot.base.model import ModelInfo
from llamaslot.processes.messages import SetModel
from llamaslot.processes.trial_process import TrialProcess
from llamaslot.prompts.prompt_worker import PromptThreads
from llamaslot.prompts.tokenizer import Tokenizer
from llamaslot.protocol.replies.restoring import ReplyRestorer
from llamaslot.protocol.request_reader import RequestReader
from llamaslot.text.builtin_templates import resolve
from llamaslot.text.template import ChatTemplate
from llamaslot.text.volatile import pattern

_log = structlog.get_logger(__name__)
_FALLBACK_TEMPLATE = "chatml"


def prompt_worker(
    config: Config, vocab: Vocab, model: SetModel, trials: TrialProcess | None = None
) -> PromptThreads:
    """Return the prompt worker for a loaded model, which tries grammars in a process if there is one.

    Raises `ConfigError` for an unusable template.
    """
    info, source, flag = model.info, model.template, model.template_flag
    if not config.jinja and not source:
        source, flag = resolve(info.builtin_template), "--no-jinja"
    template = chat_template(
        info, source, flag, pattern(config.drop_volatile), escape_special=config.escape_special
    )
    tokenizer = Tokenizer(
        vocab,
        info.n_ctx_slot,
        # EOS after every prompt would also follow the text before a cut point.
        use_anchors=config.text_anchors and info.can_reuse and not info.adds_eos,
        min_match=config.session_min_match,
        template=info.chat_template,
        clock=time.monotonic,
    )
    # Prompts of models that reuse nothing gain nothing by it.
    restores = config.restore_messages and info.can_reuse and not info.adds_eos
    restorer = ReplyRestorer(tokenizer.memory, vocab) if restores else None
    grammars = _grammars(config.grammar_file)
    try:
        named, tags = vocab.named_tokens, vocab.added_tags
        reader = RequestReader(
            info, template, tokenizer, named, grammars, tags=tags, restorer=restorer, trial=trials
        )
    except InvalidRequestError as error:
        raise ConfigError(f"--grammar-file: {error.message}", param="--grammar-file") from None
    return PromptThreads(tokenizer, reader)


def _grammars(files: Sequence[str]) -> list[tuple[str, str]]:
    """Return the names and texts of files with grammars. Raises `ConfigError`."""
    return [(file, read_text(file, "--grammar-file")) for file in files]


def chat_template(
    info: ModelInfo,
    source: str,
    flag: str,
    volatile: re.Pattern[str] | None = None,
    *,
    escape_special: bool = True,
) -> ChatTemplate:
    """The template to render conversations by: the configured one, the model's own, or ChatML."""
    origin = flag or "the model's own template (--chat-template takes another)"
    source = source or info.chat_template
    if not source:
        _log.warning("template.missing", fallback=_FALLBACK_TEMPLATE)
        source = resolve(_FALLBACK_TEMPLATE)
    try:
        return ChatTemplate(
            source,
            bos_token=info.bos_token,
            eos_token=info.eos_token,
            adds_bos=info.adds_bos,
            adds_eos=info.adds_eos,
            control_tokens=info.control_tokens,
            mark_control_tokens=escape_special,
            volatile=volatile,
        )
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error.message}", param="--chat-template") from None
