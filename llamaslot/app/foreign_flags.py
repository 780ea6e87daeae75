"""llama-server's flags that are not options here (`config.py`): those without effect, and those that are refused.

Both tables have a reason for each group of flags: why a flag is not needed, or what to do instead. A line is
llama-server's usage of one flag: its names, a word for each value, and its environment variable. The opposite of a
switch has a line of its own. A flag that becomes an option is removed here.

docs/flags.md lists both; a test compares them with llama-server's own list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llamaslot.app.config import SWITCH

_WITHOUT_EFFECT = {
    "requests are always batched continuously": """
        -cb --cont-batching [LLAMA_ARG_CONT_BATCHING]
    """,
    "cached prefixes are reused from any slot, to the token": """
        -sps --slot-prompt-similarity SIMILARITY
    """,
    "--cache-ram and --cache-idle-cells say when idle prefixes are offloaded": """
        --cache-idle-slots [LLAMA_ARG_CACHE_IDLE_SLOTS]
        --no-cache-idle-slots [LLAMA_ARG_NO_CACHE_IDLE_SLOTS]
    """,
    "one event loop serves all connections; --max-connections limits them": """
        --threads-http N [LLAMA_ARG_THREADS_HTTP]
    """,
    "--body-timeout, --write-timeout and --request-timeout are its counterparts": """
        -to --timeout N [LLAMA_ARG_TIMEOUT]
    """,
    "threads keep the priority of the process: set it with nice, chrt or systemd": """
        --prio N
        --prio-batch N
    """,
    "threads wait as ggml does by default, with some polling": """
        --poll LEVEL
        --poll-batch LEVEL
    """,
    "a thread may run on any CPU of --cpu-mask and --cpu-range, in decode and in prefill": """
        --cpu-strict SWITCH
        --cpu-strict-batch SWITCH
        -Cb --cpu-mask-batch MASK
        -Crb --cpu-range-batch LO-HI
    """,
    "the KV pool fits into memory by --kv-mem-fraction; layers are not moved to make it fit (--gpu-layers)": """
        -fit --fit SWITCH [LLAMA_ARG_FIT]
        -fitt --fit-target MIB [LLAMA_ARG_FIT_TARGET]
        -fitc --fit-ctx N [LLAMA_ARG_FIT_CTX]
    """,
    "prefixes are reused from any slot; chunks are not moved to other positions, which would not be exact": """
        --cache-reuse N [LLAMA_ARG_CACHE_REUSE]
    """,
    "llama-server ignores it too": """
        -dt --defrag-thold N [LLAMA_ARG_DEFRAG_THOLD]
    """,
    "times are always measured, and replies have them in timings": """
        --perf [LLAMA_ARG_PERF]
        --no-perf [LLAMA_ARG_NO_PERF]
    """,
    "a model is always warmed up": """
        --warmup
        --no-warmup
    """,
    "the only flag with escapes, --dry-sequence-breaker, always reads them": """
        -e --escape
        --no-escape
    """,
    "--log-level and --log-format choose what is logged, and how": """
        --log-disable
        --log-prefix [LLAMA_ARG_LOG_PREFIX]
        --no-log-prefix [LLAMA_ARG_NO_LOG_PREFIX]
        --log-timestamps [LLAMA_ARG_LOG_TIMESTAMPS]
        --no-log-timestamps [LLAMA_ARG_NO_LOG_TIMESTAMPS]
        --log-colors WHEN [LLAMA_ARG_LOG_COLORS]
        --no-log-jsonl [LLAMA_ARG_NO_LOG_JSONL]
        -lv --verbosity --log-verbosity N [LLAMA_ARG_LOG_VERBOSITY]
    """,
    "the page has no settings": """
        --ui-config --webui-config JSON [LLAMA_ARG_UI_CONFIG]
        --ui-config-file --webui-config-file FILE [LLAMA_ARG_UI_CONFIG_FILE]
    """,
    "drafts are as long as is expected to pay; --speculate N limits them": """
        --spec-draft-n-max N [LLAMA_ARG_SPEC_DRAFT_N_MAX]
        --spec-draft-n-min N [LLAMA_ARG_SPEC_DRAFT_N_MIN]
        --spec-ngram-mod-n-min N
        --spec-ngram-mod-n-max N
        --spec-ngram-mod-n-match N
        --spec-ngram-simple-size-n N
        --spec-ngram-simple-size-m N
        --spec-ngram-simple-min-hits N
        --spec-ngram-map-k-size-n N
        --spec-ngram-map-k-size-m N
        --spec-ngram-map-k-min-hits N
        --spec-ngram-map-k4v-size-n N
        --spec-ngram-map-k4v-size-m N
        --spec-ngram-map-k4v-min-hits N
        --spec-ngram-size-n N
        --spec-ngram-size-m N
        --spec-ngram-min-hits N
        --draft --draft-n --draft-max N [LLAMA_ARG_DRAFT_MAX]
        --draft-min --draft-n-min N [LLAMA_ARG_DRAFT_MIN]
    """,
    "drafting is on by default (--speculate)": """
        --spec-default
    """,
    "it is off": """
        --no-ui-mcp-proxy --no-webui-mcp-proxy [LLAMA_ARG_NO_UI_MCP_PROXY]
        -no-ag --no-agent [LLAMA_ARG_NO_AGENT]
        --no-skip-chat-parsing [LLAMA_ARG_NO_SKIP_CHAT_PARSING]
        --no-reasoning-preserve [LLAMA_ARG_NO_REASONING_PRESERVE]
        --no-prefill-assistant [LLAMA_ARG_NO_PREFILL_ASSISTANT]
        --no-spec-draft-backend-sampling [LLAMA_ARG_NO_SPEC_DRAFT_BACKEND_SAMPLING]
    """,
    "pages of the origins in --cors-origins may send credentials": """
        --cors-credentials [LLAMA_ARG_CORS_CREDENTIALS]
    """,
}
"""Flags that are accepted, by the reason why they change nothing."""

_REFUSED = {
    # Those of planned features come first; remove the lines of what becomes an option.
    "download the projector, and give it as --mmproj": """
        -mmu --mmproj-url URL [LLAMA_ARG_MMPROJ_URL]
        --vision-gemma-4b-default
        --vision-gemma-12b-default
    """,
    "the projector is computed on the first GPU of --device, or with --no-mmproj-offload on the CPU": """
        -mmdev --mmproj-device DEVICE [MTMD_BACKEND_DEVICE]
    """,
    "an image is encoded by itself; remove it": """
        --mtmd-batch-max-tokens N [LLAMA_ARG_MTMD_BATCH_MAX_TOKENS]
    """,
    "audio, video and files of the server are not supported; send images in requests": """
        --video-fps N [LLAMA_ARG_VIDEO_FPS]
        --video-timestamp-interval MS [LLAMA_ARG_VIDEO_TIMESTAMP_INTERVAL]
        --video-ffmpeg-dir FOLDER [LLAMA_ARG_VIDEO_FFMPEG_DIR]
        --media-path FOLDER
    """,
    "there are no draft models; what a request repeats is drafted without one (--speculate), so remove it": """
        -hfd -hfrd --hf-repo-draft --spec-draft-hf REPO [LLAMA_ARG_SPEC_DRAFT_HF_REPO]
        -md --model-draft --spec-draft-model FILE [LLAMA_ARG_SPEC_DRAFT_MODEL]
        -td --threads-draft --spec-draft-threads N
        -tbd --threads-batch-draft --spec-draft-threads-batch N
        -Cd --cpu-mask-draft --spec-draft-cpu-mask MASK
        -Crd --cpu-range-draft --spec-draft-cpu-range LO-HI
        --cpu-strict-draft --spec-draft-cpu-strict SWITCH
        --prio-draft --spec-draft-prio N
        --poll-draft --spec-draft-poll SWITCH
        -Cbd --cpu-mask-batch-draft --spec-draft-cpu-mask-batch MASK
        --cpu-strict-batch-draft --spec-draft-cpu-strict-batch SWITCH
        --prio-batch-draft --spec-draft-prio-batch N
        --poll-batch-draft --spec-draft-poll-batch SWITCH
        -ctkd --cache-type-k-draft --spec-draft-type-k TYPE [LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K]
        -ctvd --cache-type-v-draft --spec-draft-type-v TYPE [LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V]
        -otd --override-tensor-draft --spec-draft-override-tensor PATTERNS
        -cmoed --cpu-moe-draft --spec-draft-cpu-moe [LLAMA_ARG_SPEC_DRAFT_CPU_MOE]
        -ncmoed --n-cpu-moe-draft --spec-draft-ncmoe --spec-draft-n-cpu-moe N [LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE]
        --draft-p-split --spec-draft-p-split P [LLAMA_ARG_SPEC_DRAFT_P_SPLIT]
        --draft-p-min --spec-draft-p-min P [LLAMA_ARG_SPEC_DRAFT_P_MIN]
        --spec-draft-backend-sampling [LLAMA_ARG_SPEC_DRAFT_BACKEND_SAMPLING]
        -devd --device-draft --spec-draft-device DEVICES
        -ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl N [LLAMA_ARG_N_GPU_LAYERS_DRAFT]
        --spec-synth-len N [LLAMA_ARG_SPEC_SYNTH_LEN]
        --spec-synth-rates RATES [LLAMA_ARG_SPEC_SYNTH_RATES]
        -lcs --lookup-cache-static FILE
        -lcd --lookup-cache-dynamic FILE
    """,
    "requests are always batched continuously; remove the flag": """
        -nocb --no-cont-batching [LLAMA_ARG_NO_CONT_BATCHING]
    """,
    "slots share the pool of --ctx-size; limit the tokens of a reply with --predict": """
        --kv-unified-per-slot N [LLAMA_ARG_KV_UNIFIED_PER_SLOT]
    """,
    "control vectors are not supported; remove it": """
        --control-vector FILES
        --control-vector-scaled FILES
        --control-vector-layer-range START END
    """,
    "other machines cannot compute layers; spread requests over servers instead (examples/fleet)": """
        --rpc SERVERS [LLAMA_ARG_RPC]
    """,
    "download the file, and give it as --model": """
        -mu --model-url URL [LLAMA_ARG_MODEL_URL]
        -dr --docker-repo REPO [LLAMA_ARG_DOCKER_REPO]
    """,
    "no models are built in: name one with --hf-repo, and give its flags": """
        --embd-gemma-default
        --fim-qwen-1.5b-default
        --fim-qwen-3b-default
        --fim-qwen-7b-default
        --fim-qwen-7b-spec
        --fim-qwen-14b-spec
        --fim-qwen-30b-default
        --gpt-oss-20b-default
        --gpt-oss-120b-default
    """,
    "write the grammar to a file, and give it as --grammar-file": """
        --grammar GRAMMAR
    """,
    "send the schema with each request (response_format or json_schema)": """
        -j --json-schema SCHEMA
        -jf --json-schema-file FILE
    """,
    "send stop with each request": """
        -r --reverse-prompt PROMPT
    """,
    "text of control tokens is never sent; return_tokens of a request shows their ids": """
        -sp --special
    """,
    "/infill writes prefix, suffix and middle in this order; write another one into the prompt of /completion": """
        --spm-infill
    """,
    "chat replies are always parsed; --reasoning-format none leaves reasoning in the content": """
        --skip-chat-parsing [LLAMA_ARG_SKIP_CHAT_PARSING]
    """,
    "send continue_final_message with each request that continues its last message": """
        --prefill-assistant [LLAMA_ARG_PREFILL_ASSISTANT]
    """,
    "set the variable that the chat template has for it with --chat-template-kwargs": """
        --reasoning-preserve [LLAMA_ARG_REASONING_PRESERVE]
    """,
    "the end of a reasoning budget has no message; remove it": """
        --reasoning-budget-message MESSAGE [LLAMA_ARG_THINK_BUDGET_MESSAGE]
    """,
    "a running server's properties do not change; set flags, and restart it": """
        --props [LLAMA_ARG_ENDPOINT_PROPS]
    """,
    "tools run in the client or its framework (docs/clients.md)": """
        --tools NAMES [LLAMA_ARG_TOOLS]
        --tools-runtime RUNTIME [LLAMA_ARG_TOOLS_RUNTIME]
        --mcp-servers-config FILE [LLAMA_ARG_MCP_SERVERS_CONFIG]
        --mcp-servers-json JSON [LLAMA_ARG_MCP_SERVERS_JSON]
        -ag --agent [LLAMA_ARG_AGENT]
        --ui-mcp-proxy --webui-mcp-proxy [LLAMA_ARG_UI_MCP_PROXY]
    """,
    "serve files with a reverse proxy in front of this server; --no-webui turns its own page off": """
        --path FOLDER [LLAMA_ARG_STATIC_PATH]
    """,
    "have the reverse proxy remove the prefix": """
        --api-prefix PREFIX [LLAMA_ARG_API_PREFIX]
    """,
    "start each server on a port of its own, behind a gateway (examples/fleet)": """
        --reuse-port [LLAMA_ARG_REUSE_PORT]
    """,
    "limit with --cors-origins which pages may use the server": """
        --cors-methods METHODS [LLAMA_ARG_CORS_METHODS]
        --cors-headers HEADERS [LLAMA_ARG_CORS_HEADERS]
        --no-cors-credentials [LLAMA_ARG_NO_CORS_CREDENTIALS]
    """,
    "redirect standard error instead": """
        --log-file FILE [LLAMA_ARG_LOG_FILE]
    """,
    "use --log-format json": """
        --log-jsonl [LLAMA_ARG_LOG_JSONL]
    """,
    "prompts are never logged; verbose in a request shows its prompt in the reply": """
        --log-prompts-dir FOLDER
    """,
    "run `llamaslot doctor`, which lists the devices": """
        --list-devices
    """,
    "run `llamaslot pull`, which lists the models that have a name": """
        -cl --cache-list
    """,
    "run `llamaslot completion bash`": """
        --completion-bash
    """,
    "run `llamaslot --version`": """
        --version
    """,
}
"""Flags that end the start with an error, by what to do instead."""


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """A flag of llama-server that is not an option here."""

    flags: tuple[str, ...]
    values: tuple[str, ...]
    """A word for each value that it has."""
    env: str
    """Its environment variable; empty if it has none."""
    reason: str
    """Why it changes nothing or, if it is refused, what to do instead."""
    is_refused: bool


def _rows(groups: Mapping[str, str], *, is_refused: bool) -> Iterator[ForeignFlag]:
    for reason, lines in groups.items():
        for line in lines.strip().splitlines():
            words = line.split()
            flags = tuple(word for word in words if word.startswith("-"))
            env = "".join(word[1:-1] for word in words if word.startswith("["))
            values = tuple(word for word in words if not word.startswith(("-", "[")))
            yield ForeignFlag(flags, values, env, reason, is_refused)


FOREIGN_FLAGS = (*_rows(_WITHOUT_EFFECT, is_refused=False), *_rows(_REFUSED, is_refused=True))


def in_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, ForeignFlag]]:
    """Yield the variables of these flags that are set, as llama-server reads them.

    A switch is turned off by a word for off, or by a variable with `_NO_` in its name, whatever its value.
    """
    by_variable = {row.env: row for row in FOREIGN_FLAGS if row.env}
    for variable, row in by_variable.items():
        if "_ARG_NO_" in variable:
            if variable in environ:
                yield variable, row
            continue
        value = environ.get(variable, "").lower()
        if not row.values and SWITCH.get(value) is False:
            opposite = by_variable.get(variable.replace("_ARG_", "_ARG_NO_"))
            if opposite is not None:
                yield variable, opposite
        elif value:
            yield variable, row
