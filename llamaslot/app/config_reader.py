"""Reading the configuration. Precedence: flag, environment variable, configuration file, default.

Every invalid value raises a `ConfigError` that names its source: the flag, the variable or the file's key.

The command line has a flag for each row of the configuration table, and llama-server's others, which have no effect
or are refused (`foreign_flags.py`). llama-server has flags with several letters after one dash (`-ts`, `-hf`). So
only complete flags match: no abbreviations, and no short flags with the value attached.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from llamaslot.app import model_config
from llamaslot.app.config import Config, Option, Values, hint, options
from llamaslot.app.foreign_flags import FOREIGN_FLAGS, ForeignFlag, in_environment
from llamaslot.app.model_presets import AT_START, PRESETS, SHARED, is_repository, listed_name, read_presets
from llamaslot.app.model_table import MODEL_OPTIONS, ModelEntry, check_table, files_in, model_id, naming
from llamaslot.base.errors import ConfigError
from llamaslot.base.files import read_named_text
from llamaslot.text.builtin_templates import resolve
from llamaslot.text.conversation import volatile_pattern


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
        return f"there is no {'flag' if flag.startswith('-') else 'argument'} {flag}{hint(flag, known)}"


def _foreign_hint(name: str, table: Iterable[str]) -> str:
    flag = f"--{name.replace('_', '-')}"
    reasons = (row.reason for row in FOREIGN_FLAGS if flag in row.flags)
    return next((f": {reason}" for reason in reasons), None) or hint(name, table)


def _with_dashes(arg: str) -> str:
    if not arg.startswith("--"):
        return arg
    flag, equals, value = arg.partition("=")
    return flag.replace("_", "-") + equals + value


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each option, `--config`, and llama-server's flags that are not options here."""
    parser.set_defaults(parser=parser)
    ignored = ", ".join(flag for row in FOREIGN_FLAGS if not row.is_refused for flag in row.flags)
    parser.epilog = f"Flags of llama-server that are accepted without effect: {ignored}. docs/flags.md says why."
    parser.add_argument("--usage", action="help", help=argparse.SUPPRESS)
    parser.add_argument("name", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--config", metavar="FILE", help="TOML file with any of these options [LLAMASLOT_CONFIG]")
    for option in options():
        text = f"{option.text} [{option.env}] (default: {shown(option.default)})".replace("%", "%%")
        if option.is_bool:
            flags = *option.flags, *option.negatives
            parser.add_argument(
                *flags, dest=option.name, nargs=0, const=option.negatives, action=_Switch, help=text
            )
        else:
            # Several models may be given, but the option has one.
            action = "append" if option.is_list or option.name == "model" else "store"
            metavar = {int: "N", float: "X"}.get(option.types[0], "TEXT")
            if option.choices:
                metavar = "{" + ",".join(option.choices) + "}"
            parser.add_argument(*option.flags, dest=option.name, action=action, metavar=metavar, help=text)
    for row in FOREIGN_FLAGS:
        # A refused flag is refused without its values, too.
        n_values = "?" if row.is_refused and row.values else len(row.values)
        parser.add_argument(*row.flags, nargs=n_values, const=row, action=_Foreign, help=argparse.SUPPRESS)


class _Switch(argparse.Action):
    """`--x` and `--no-x`, without a value; `const` has the flags that turn it off."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, option_string not in self.const)


class _Foreign(argparse.Action):
    """A flag of llama-server that is no option here, `const`: an error, or noted among those without effect."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, "without_effect", **kwargs)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        row: ForeignFlag = self.const
        if row.is_refused:
            raise ConfigError(f"{option_string} is a flag of llama-server: {row.reason}", param=option_string)
        noted = getattr(namespace, self.dest) or []
        setattr(namespace, self.dest, [*noted, (option_string, row.reason)])


def without_effect(flags: argparse.Namespace, environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return llama-server's flags and variables that are set but change nothing, and why."""
    variables = [(name, row.reason) for name, row in in_environment(environ) if not row.is_refused]
    return [*(flags.without_effect or ()), *variables]


def shown(default: Any) -> str:
    """Return an option's default as help texts show it."""
    if isinstance(default, bool):
        return "on" if default else "off"
    return str(default) if default not in ("", None, ()) else "none"


def read_config(flags: argparse.Namespace, environ: Mapping[str, str]) -> Config:
    """Return the configuration from flags, environment and the file that either names. Raises `ConfigError`.

    With several models it has what they share.
    """
    in_file, _ = _in_file(flags, environ)
    return _configured(in_file | _in_environment(environ) | _in_flags(flags))


def read_models(flags: argparse.Namespace, environ: Mapping[str, str]) -> list[ModelEntry]:
    """Return the models of a server that may have several; none for one of a single model. Raises `ConfigError`."""
    in_file, tables = _in_file(flags, environ)
    variables, in_flags = _in_environment(environ), _in_flags(flags)
    found = in_file | variables | in_flags
    shared = _configured(found)
    folder, file = shared.models_dir, shared.models_preset
    presets = read_presets(file) if file else {}
    of_all = presets.pop(SHARED, {})
    named = list(getattr(flags, "model", None) or ())
    if len(named) < 2 and not folder and not tables and not file:
        return []
    if own := next((name for name in MODEL_OPTIONS if name in found), None):
        flag = f"--{own.replace('_', '-')}"
        message = f"{flag} is for a server of one model: write it into a table [models.NAME] or a section"
        raise ConfigError(message, param=flag)
    if not named and "model" in found:
        named = [found["model"][1]]
    sources = [(model_id(name), "--model", name) for name in named]
    in_folder = files_in(folder) if folder else {}
    sources += [(name, "--models-dir", path) for name, (path, _) in in_folder.items()]
    paths: dict[str, Values] = {}
    for name, flag, path in sources:
        if name in paths:
            raise ConfigError(f"two models have the name {name}: give one of them another in a table", param=flag)
        paths[name] = {"model": (flag, path)}
    for each in (in_file, variables, in_flags):
        each.pop("model", None)
    in_tables = {name: _in_table(name, table) for name, table in tables.items()}
    entries = []
    for name in dict.fromkeys((*paths, *presets, *in_tables)):
        # As in llama-server, what a preset says comes before variables.
        of_model = in_file | paths.get(name, {}) | in_tables.get(name, {}) | variables
        of_model |= of_all | presets.get(name, {}) | in_flags
        entry = _entry(name, of_model, in_presets=name in presets, is_default=name == model_id((*named, "")[0]))
        entries.append(replace(entry, config=_with_projector(entry.config, *in_folder.get(name, ("", "")))))
    if not entries:
        flag, place = ("--models-dir", folder) if folder else (PRESETS, file)
        raise ConfigError(f"{flag}: there is no model in {place}", param=flag)
    taken = [name for each in entries for name in each.names]
    if twice := next((name for name in taken if taken.count(name) > 1), None):
        raise ConfigError(f"two models have the name {twice}", param=PRESETS if twice in presets else "--config")
    return entries


def _entry(name: str, values: Values, *, in_presets: bool, is_default: bool) -> ModelEntry:
    """Return one of several models from all of its values. Raises `ConfigError`."""
    _, is_pinned = values.pop("pin", ("", False))
    _, loads_at_start = values.pop(AT_START, ("", False))
    names = [name]
    if in_presets:
        names = [listed_name(name), name]
        if not values.keys() & {"model", "hf_repo"} and is_repository(name):
            # As for llama-server, one in the cache of Hugging Face's hub needs no other name.
            values["hf_repo"] = f"[{name}] of {PRESETS}", name
    if not values.keys() & {"model", "hf_repo"}:
        place, flag = (f"{PRESETS}: [{name}]", PRESETS) if in_presets else (f"[models.{name}]", "--config")
        raise ConfigError(f"{place} has no model", param=flag)
    with naming(name):
        config = _configured(values)
    names = list(dict.fromkeys((*names, *listed(config.alias))))
    return ModelEntry(tuple(names), config, is_pinned, loads_at_start=loads_at_start, is_default=is_default)


def _in_table(name: str, table: Any) -> Values:
    """Return the values of a table of the configuration file; `pin` is one of them. Raises `ConfigError`."""
    values = check_table(name, table)
    _check_keys(values.keys() - {"pin"}, f"[models.{name}]")
    return {key: (f"{key} of [models.{name}]", value) for key, value in values.items()}


def _with_projector(config: Config, model: str, projector: str) -> Config:
    """Return the configuration with the projector found beside a model, unless a table names another one."""
    return replace(config, mmproj=projector) if config.model == model and config.wants_mmproj else config


def _in_file(flags: argparse.Namespace, environ: Mapping[str, str]) -> tuple[Values, Mapping[str, Any]]:
    """Return the options of the configuration file, each with its source, and its tables of models."""
    file = flags.config or environ.get("LLAMASLOT_CONFIG")
    if not file:
        return {}, {}
    path = Path(file)
    try:
        content = tomllib.loads(read_named_text(path, "--config"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", param="--config") from None
    tables = content.pop("models", {})
    if not isinstance(tables, dict):
        raise ConfigError(f"models in {file} is not a table of tables: write [models.NAME]", param="--config")
    _check_keys(content, file)
    return {key.replace("-", "_"): (f"{key} in {file}", value) for key, value in content.items()}, tables


def _in_environment(environ: Mapping[str, str]) -> Values:
    """Return the options of environment variables, each with its source."""
    found: Values = {}
    for variable, row in in_environment(environ):
        if row.is_refused:
            raise ConfigError(f"{variable} is a variable of llama-server: {row.reason}", param=row.flags[0])
    for option in options():
        negated = option.env.replace("_ARG_", "_ARG_NO_")
        if option.is_bool and negated != option.env and negated in environ:
            found[option.name] = (negated, False)
        elif environ.get(option.env):
            found[option.name] = (option.env, environ[option.env])
    return found


def _in_flags(flags: argparse.Namespace) -> Values:
    """Return the options of flags, each with its source."""
    names = (option for option in options() if getattr(flags, option.name, None) is not None)
    found: Values = {option.name: (option.flag, getattr(flags, option.name)) for option in names}
    named = getattr(flags, "model", None)
    if named is not None:
        found["model"] = ("--model", named[0])
    if flags.name:
        if named not in (None, [flags.name]):
            raise ConfigError(f"two models are given: {flags.name} and {named[0]}", param="--model")
        found["model"] = ("MODEL", flags.name)
    return found


def _check_keys(keys: Iterable[str], source: str) -> None:
    """Raise `ConfigError` for a key of a file that is no option."""
    known = {option.name for option in options()}
    for key in keys:
        name = key.replace("-", "_")
        if name not in known:
            raise ConfigError(f"{source} has an unknown key {key}{_foreign_hint(name, known)}", param="--config")


def _configured(found: Values) -> Config:
    """Return the configuration of some values."""
    table = {option.name: option for option in options()}
    return _checked(Config(**{name: _convert(table[name], *each) for name, each in found.items()}))


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
    if config.reranking and config.pooling not in ("auto", "rank"):
        message = f"--reranking is --pooling rank, and --pooling {config.pooling} is given"
        raise ConfigError(message, param="--pooling")
    if config.embeds and config.kv_unified is False:
        message = "--embeddings and --reranking need one pool shared by all slots: remove --no-kv-unified"
        raise ConfigError(message, param="--kv-unified")
    if config.chat_template and config.chat_template_file:
        raise ConfigError("give --chat-template or --chat-template-file, not both", param="--chat-template")
    if not config.jinja and (config.chat_template_file or "{" in config.chat_template):
        raise ConfigError(
            "--no-jinja allows only built-in templates: give the name of one as --chat-template", param="--no-jinja"
        )
    model_config.check(config)
    # Tells it from a projector that is found (`Config.has_found_mmproj`).
    return replace(config, mmproj_auto=False) if config.mmproj else config


def read_template(config: Config) -> tuple[str, str]:
    """Return the Jinja source given by a flag, and that flag; both are empty if there is none.

    Raises `ConfigError`, also for an invalid `--drop-volatile`.
    """
    volatile_pattern(config.drop_volatile)
    if config.chat_template_file:
        flag = "--chat-template-file"
        return read_named_text(Path(config.chat_template_file), flag), flag
    return (resolve(config.chat_template), "--chat-template") if config.chat_template else ("", "")
