"""Reading the configuration. Precedence: flag, environment variable, configuration file, default.

Every invalid value raises a `ConfigError` that names its source: the flag, the variable or the file's key.

The command line has a flag for each row of the configuration table, and llama-server's others, which have no effect
or are refused. llama-server has flags with several letters after one dash (`-ts`, `-hf`). So only complete flags
match: no abbreviations, and no short flags with the value attached.
"""

from __future__ import annotations

import argparse
import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from llamaslot.app.config import Config, Option, options
from llamaslot.base.errors import ConfigError
from llamaslot.base.files import read_named_text
from llamaslot.text.builtin_templates import resolve
from llamaslot.text.conversation import volatile_pattern

WITHOUT_EFFECT = {
    0: "-cb --cont-batching --no-context-shift --perf --no-perf --warmup --no-warmup "
    "--no-mmproj --no-mmproj-auto --log-disable --log-prefix --no-log-prefix --log-timestamps --no-log-timestamps "
    "-e --escape --no-escape --repack --op-offload -kvo --kv-offload",
    1: "-lv --verbosity --log-verbosity --log-colors -to --timeout --threads-http -dt --defrag-thold -fit --fit "
    "-fitt --fit-target -fitc --fit-ctx",
}
"""Flags of llama-server that are accepted and ignored, by their number of values.

What they ask for is done anyway, or has no counterpart here.
"""

NOT_SUPPORTED = {
    "not needed: cached prefixes are always reused, from any slot; remove the flag": (
        "--cache-reuse -sps --slot-prompt-similarity --cache-idle-slots --no-cache-idle-slots"
    ),
    "not supported yet; download with `llamaslot pull OWNER/REPO:FILE.gguf` and give that name as --model": (
        "-hf -hfr --hf-repo -hff --hf-file -hft --hf-token -mu --model-url -dr --docker-repo"
    ),
    "not supported yet; redirect standard error instead": "--log-file --log-jsonl",
    "requests are always batched continuously; remove the flag": "-nocb --no-cont-batching",
    "llamaslot's page has no settings": ("--path --ui-config --webui-config --ui-config-file --webui-config-file"),
    "not supported yet": (
        "--context-shift "
        "-C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll -Cb --cpu-mask-batch -Crb --cpu-range-batch "
        "--cpu-strict-batch --prio-batch --poll-batch --keep --rope-scaling --rope-scale --rope-freq-base "
        "--rope-freq-scale --yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast "
        "-nkvo --no-kv-offload -nr --no-repack --no-host --no-op-offload --rpc --numa -lm --load-mode -lzm "
        "--lazy-mode -dio --direct-io -dev --device --list-devices -ot --override-tensor -cmoe --cpu-moe -ncmoe "
        "--n-cpu-moe -sm --split-mode -ts --tensor-split -mg --main-gpu --check-tensors --override-kv --lora "
        "--lora-scaled --lora-init-without-apply --control-vector --control-vector-scaled "
        "--control-vector-layer-range "
        "--grammar -j --json-schema -jf --json-schema-file "
        "-lcs --lookup-cache-static -lcd --lookup-cache-dynamic --kv-unified-per-slot -r --reverse-prompt "
        "-sp --special --spm-infill --pooling -mm --mmproj -mmu --mmproj-url --mmproj-auto --mmproj-offload "
        "--no-mmproj-offload --image-min-tokens --image-max-tokens --media-path --embd-normalize --embedding "
        "--embeddings --rerank --reranking --reuse-port --cors-methods --cors-headers --cors-credentials "
        "--no-cors-credentials --api-prefix --tools --mcp-servers-config --mcp-servers-json -ag --agent "
        "--chat-template-kwargs --props --models-dir --models-preset --models-max --models-autoload "
        "--no-models-autoload --reasoning-effort "
        "--reasoning-budget-message --reasoning-preserve --no-reasoning-preserve --prefill-assistant "
        "--no-prefill-assistant --skip-chat-parsing --no-skip-chat-parsing -td --threads-draft -tbd "
        "--threads-batch-draft --draft --draft-n --draft-max --draft-min --draft-n-min --draft-p-min -md "
        "--model-draft -ngld --gpu-layers-draft --n-gpu-layers-draft -devd --device-draft -cd --ctx-size-draft "
        "-ctkd --cache-type-k-draft -ctvd --cache-type-v-draft --spec-type --spec-replace "
        "-mv --model-vocoder --tts-use-guide-tokens --completion-bash -cl --cache-list"
    ),
}
"""Flags of llama-server that are rejected, by the reason."""


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises a `ConfigError` for a wrong flag and suggests the nearest one."""

    def error(self, message: str) -> NoReturn:
        """Raise `ConfigError` instead of printing usage and exiting."""
        raise ConfigError(message)

    def parse(self, args: Sequence[str]) -> argparse.Namespace:
        """Parse arguments; suggest the nearest flag for an unknown one. As in llama-server, `_` may replace `-`."""
        parsed, unknown = self.parse_known_args([_with_dashes(arg) for arg in args])
        if unknown:
            raise ConfigError(self._explain(unknown[0], getattr(parsed, "parser", self)))
        return parsed

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Match no abbreviations: argparse abbreviates short flags even without `allow_abbrev`."""
        return []

    @staticmethod
    def _explain(word: str, parser: argparse.ArgumentParser) -> str:
        flag = word.partition("=")[0]
        shown = (action for action in parser._actions if action.help is not argparse.SUPPRESS)
        known = [name for action in shown for name in action.option_strings]
        return f"there is no {'flag' if flag.startswith('-') else 'argument'} {flag}{_hint(flag, known)}"


def _hint(word: str, known: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def _with_dashes(arg: str) -> str:
    if not arg.startswith("--"):
        return arg
    flag, equals, value = arg.partition("=")
    return flag.replace("_", "-") + equals + value


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each option, `--config`, and llama-server's flags that are not options here."""
    parser.set_defaults(parser=parser)
    ignored = ", ".join(" ".join(WITHOUT_EFFECT.values()).split())
    parser.epilog = f"Flags of llama-server that are accepted without effect: {ignored}."
    parser.add_argument("name", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--config", metavar="FILE", help="TOML file with any of these options [LLAMASLOT_CONFIG]")
    for option in options():
        text = f"{option.text} [{option.env}] (default: {_shown(option.default)})".replace("%", "%%")
        if option.is_bool:
            negative = [f"-no{flag}" for flag in option.flags if not flag.startswith("--") and len(flag) > 2]
            negative.append(f"--no-{option.flag[2:]}")
            parser.add_argument(*option.flags, *negative, dest=option.name, nargs=0, action=_Switch, help=text)
        else:
            action = "append" if option.is_list else "store"
            metavar = {int: "N", float: "X"}.get(option.types[0], "TEXT")
            if option.choices:
                metavar = "{" + ",".join(option.choices) + "}"
            parser.add_argument(*option.flags, dest=option.name, action=action, metavar=metavar, help=text)
    for n_values, flags in WITHOUT_EFFECT.items():
        parser.add_argument(*flags.split(), dest="ignored", nargs=n_values, action=_Foreign, help=argparse.SUPPRESS)
    for reason, flags in NOT_SUPPORTED.items():
        parser.add_argument(*flags.split(), nargs="?", const=reason, action=_Foreign, help=argparse.SUPPRESS)


class _Switch(argparse.Action):
    """`--x` and `--no-x`, without a value."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, not (option_string or "").startswith(("--no-", "-no-")))


class _Foreign(argparse.Action):
    """A flag of llama-server that is no option here: without effect, or an error if `const` has a reason."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if self.const:
            raise ConfigError(f"{option_string} is a flag of llama-server: {self.const}", param=option_string)


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return str(default) if default not in ("", None, ()) else "none"


def read_config(flags: argparse.Namespace, environ: Mapping[str, str]) -> Config:
    """Return the configuration from flags, environment and the file that either names. Raises `ConfigError`."""
    table = {option.name: option for option in options()}
    file = flags.config or environ.get("LLAMASLOT_CONFIG")
    found: dict[str, tuple[str, Any]] = {}
    if file:
        path = Path(file)
        try:
            content = tomllib.loads(read_named_text(path, "--config"))
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not valid TOML: {error}", param="--config") from None
        for key, value in content.items():
            name = key.replace("-", "_")
            if name not in table:
                raise ConfigError(f"{file} has an unknown key {key}{_hint(name, table)}", param="--config")
            found[name] = (f"{key} in {file}", value)
    for option in table.values():
        negated = option.env.replace("_ARG_", "_ARG_NO_")
        if option.is_bool and negated != option.env and negated in environ:
            found[option.name] = (negated, False)
        elif environ.get(option.env):
            found[option.name] = (option.env, environ[option.env])
        if getattr(flags, option.name, None) is not None:
            found[option.name] = (option.flag, getattr(flags, option.name))
    if flags.name:
        if getattr(flags, "model", None) not in (None, flags.name):
            raise ConfigError(f"two models are given: {flags.name} and {flags.model}", param="--model")
        found["model"] = ("MODEL", flags.name)
    values = {name: _convert(table[name], source, value) for name, (source, value) in found.items()}
    return _checked(Config(**values))


def listed(text: str) -> list[str]:
    """Return the items of a comma-separated list."""
    return [each for each in map(str.strip, text.split(",")) if each]


def _convert(option: Option, source: str, value: Any) -> Any:
    if isinstance(value, str) and value.lower() in option.words:
        return option.words[value.lower()]
    if option.is_list and isinstance(value, str):
        value = [value]
    try:
        return msgspec.convert(value, option.kind, strict=False)
    except msgspec.ValidationError as error:
        reason = str(error).lower()
        if option.choices and not reason.endswith(">= 0"):
            reason = f"expected one of {', '.join(option.choices)}"
        raise ConfigError(f"{source}: {value!r} is invalid: {reason}", param=option.flag) from None


def _checked(config: Config) -> Config:
    if min(config.ubatch_size, config.batch_size) < config.parallel:
        raise ConfigError("--ubatch-size and --batch-size must be at least --parallel", param="--ubatch-size")
    if config.kv_mem_fraction == 0:
        raise ConfigError("--kv-mem-fraction must be greater than 0", param="--kv-mem-fraction")
    if config.cache_type_v not in ("f32", "f16", "bf16") and config.flash_attn == "off":
        raise ConfigError("a quantized --cache-type-v needs flash attention", param="--cache-type-v")
    if config.chat_template and config.chat_template_file:
        raise ConfigError("give --chat-template or --chat-template-file, not both", param="--chat-template")
    if not config.jinja and (config.chat_template_file or "{" in config.chat_template):
        raise ConfigError(
            "--no-jinja allows only built-in templates: give the name of one as --chat-template", param="--no-jinja"
        )
    return config


def read_template(config: Config) -> tuple[str, str]:
    """Return the Jinja source given by a flag, and that flag; both are empty if there is none.

    Raises `ConfigError`, also for an invalid `--drop-volatile`.
    """
    volatile_pattern(config.drop_volatile)
    if config.chat_template_file:
        flag = "--chat-template-file"
        return read_named_text(Path(config.chat_template_file), flag), flag
    return (resolve(config.chat_template), "--chat-template") if config.chat_template else ("", "")
