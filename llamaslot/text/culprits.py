"""Names what made a prompt diverge from an earlier one although both have the same text after the place.

`culprit_of` is a pure function of the two texts. A wrong name is worse than none, so each rule wants the
differing text of both prompts to be of its kind, and whatever no rule knows is `unknown`. Most rules look at the
line in which the place is:

    earlier   You are an agent.\\nToday is Friday, 27 November 2026.\\nYour tools are ...
    prompt    You are an agent.\\nToday is Saturday, 28 November 2026.\\nYour tools are ...
                                           ^ place: date              ^ agree again
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property

from llamaslot.base.advice import Culprit, Role

MARK = "\x1e"
"""Stands before each control token in the texts here."""
_MAX_LINE = 400
"""Characters on each side of the place that are looked at as its line."""
_MAX_CHANGE = 2000
"""Characters of differing text: more is no change of one thing in a line."""
_MAX_UNKNOWN = 1000
"""The same for text that no rule knows: with more, the prompts are different ones, not one that changed."""
_MAX_WORDS = 200
_MAX_HEADING = 2000
"""Characters before the place in which the heading of a git status is looked for."""
_MAX_TOOLS = 40_000
"""The same for the declaration of a tool."""


@dataclass(frozen=True)
class Change:
    """Where two prompts diverge: both have `before`, then one has `old` and the other `new`, then both `after`."""

    before: str
    old: str
    """Text of the earlier prompt, which may include its reply."""
    new: str
    after: str
    """The rest of the later prompt, from where both agree again."""
    old_tools: Sequence[str] = ()
    """Names of declared tools, in their order."""
    new_tools: Sequence[str] = ()
    reasoning: tuple[str, str] | None = None
    """The tags around reasoning, if the model writes any."""

    @cached_property
    def role(self) -> Role:
        """The part of the prompt with the place."""
        return "tools" if _tool_at(self) else role_at(self.before)

    @cached_property
    def lines(self) -> tuple[str, str]:
        """The line with the place, in the earlier prompt and in the later one."""
        return _line(self, self.old), _line(self, self.new)


def culprit_of(change: Change) -> tuple[Culprit, Role] | None:
    """Return the likely culprit and the part of the prompt with it; None if the prompts are different ones."""
    longest = max(len(change.old), len(change.new))
    is_in_line = longest <= _MAX_CHANGE and change.lines[0] != change.lines[1]
    for culprit, is_cause in (*_OF_LINES, *_OF_CHANGES) if is_in_line else _OF_CHANGES:
        if is_cause(change):
            return culprit, "tools" if culprit in ("tool_order", "tools") else change.role
    if longest <= _MAX_UNKNOWN or not (change.old.strip() and change.new.strip()):
        return "unknown", change.role
    return None


_ROLES: dict[str, Role] = {
    **dict.fromkeys(("system", "developer", "system_prompt"), "system"),
    **dict.fromkeys(("user", "human", "inst"), "user"),
    **dict.fromkeys(("assistant", "model", "bot", "chatbot", "/inst"), "assistant"),
    **dict.fromkeys(("tool", "ipython", "observation", "tool_results"), "tool"),
    "available_tools": "tools",
}
_NO_LETTERS = rf"[^\w{MARK}\n/]{{0,3}}"
_HEADER = re.compile(
    rf"{MARK}{_NO_LETTERS}"
    rf"(?:(?:im_start|start_header_id|start_of_turn|start_of_role|start|turn_start|turn){_NO_LETTERS})?"
    rf"({'|'.join(_ROLES)})(?:_token)?(?!\w)",
    re.IGNORECASE,
)
"""A control token that begins a message, with its role in it or after it."""


def role_at(before: str) -> Role:
    """Return whose message the text is in that follows; empty if no control token says."""
    last = None
    for last in _HEADER.finditer(before):  # noqa: B007 - the last one is wanted
        pass
    return _ROLES[last[1].lower()] if last is not None else ""


_END_OF_LINE = re.compile(rf"[\n{MARK}]")


def _line(change: Change, differing: str) -> str:
    """Return the line of one of the prompts in which the place is."""
    start = _unescaped(change.before[-_MAX_LINE:])
    rest = _unescaped(differing[:_MAX_LINE] + change.after[:_MAX_LINE])
    return _END_OF_LINE.split(start)[-1] + _END_OF_LINE.split(rest, maxsplit=1)[0]


def _unescaped(text: str) -> str:
    """Return a text with the newlines of JSON strings, such as descriptions of tools, as newlines."""
    return text.replace("\\n", "\n")


# --- rules about the line: its differing words, or all of it without what may differ ---

_WORD = re.compile(r"\d+|[^\W\d_]+|_|[^\w\s]")


@dataclass(frozen=True, slots=True)
class _Differing:
    """The words of a line that the other line does not have."""

    line: str
    words: Sequence[re.Match[str]]

    def are_in(self, pattern: re.Pattern[str], beside: re.Pattern[str]) -> bool:
        """True if some are in matches of `pattern`, and all others match `beside`."""
        spans = [found.span() for found in pattern.finditer(self.line)]
        # In some languages the name of a day and what follows it are one word.
        inside = [any(start < word.end() and word.start() < end for start, end in spans) for word in self.words]
        return any(inside) and all(
            is_in or beside.fullmatch(word[0]) for is_in, word in zip(inside, self.words, strict=True)
        )


def _differing(old: str, new: str) -> tuple[_Differing, _Differing]:
    a, b = [*_WORD.finditer(old)][:_MAX_WORDS], [*_WORD.finditer(new)][:_MAX_WORDS]
    matcher = SequenceMatcher(None, [word[0] for word in a], [word[0] for word in b], autojunk=False)
    changed = [each for each in matcher.get_opcodes() if each[0] != "equal"]
    return (
        _Differing(old, [word for _, start, end, _, _ in changed for word in a[start:end]]),
        _Differing(new, [word for _, _, _, start, end in changed for word in b[start:end]]),
    )


_MONTHS = (
    "january february march april may june july august september october november december "
    "jan feb mar apr jun jul aug sep sept oct nov dec "
    "januar februar märz mai juni juli oktober dezember okt dez mrz "
    "janvier février mars avril juin juillet août septembre octobre novembre décembre janv févr avr juil déc "
    "enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre ene dic "
    "gennaio febbraio aprile maggio giugno luglio settembre ottobre dicembre gen mag giu lug ago set ott "
    "janeiro fevereiro março maio junho julho setembro outubro novembro dezembro fev abr out "
    "januari februari maart mei augustus maj mrt "
    "января февраля марта апреля мая июня июля августа сентября октября ноября декабря "
    "січня лютого березня квітня травня червня липня серпня вересня жовтня листопада грудня "
    "stycznia lutego marca kwietnia maja czerwca lipca sierpnia września października grudnia "
    "ocak şubat mart nisan mayıs haziran temmuz ağustos eylül ekim kasım aralık"
)
_DAYS = (
    "monday tuesday wednesday thursday friday saturday sunday mon tue tues wed thu thur thurs fri sat sun "
    "montag dienstag mittwoch donnerstag freitag samstag sonnabend sonntag "
    "lundi mardi mercredi jeudi vendredi samedi dimanche "
    "lunes martes miércoles jueves viernes sábado domingo lunedì martedì mercoledì giovedì venerdì sabato domenica "
    "segunda terça quarta quinta sexta maandag dinsdag woensdag donderdag vrijdag zaterdag zondag "
    "måndag tisdag onsdag torsdag fredag lördag söndag mandag tirsdag lørdag "
    "понедельник вторник среда четверг пятница суббота воскресенье "
    "понеділок вівторок середа субота неділя "
    "poniedziałek wtorek środa czwartek piątek sobota niedziela "
    "pazartesi salı çarşamba perşembe cuma cumartesi pazar"
)


def _any(words: str) -> str:
    return "(?:" + "|".join(sorted(map(re.escape, words.split()), key=len, reverse=True)) + ")"


_YEAR = r"(?:19|20|25)\d\d"
_DAY = r"[0-3]?\d(?:st|nd|rd|th|er|[.ºª])?"
_NAME = r"[^\W\d_]{3,12}"
_TIMES = re.compile(
    "|".join(
        (
            # 2026-11-27, 2026/11/27 10:05, 27.11.2026, 11/27/2026, 27.11.26
            r"(?<!\d)\d{4}([-/.])[01]?\d\1[0-3]?\d(?!\d)"
            r"(?:[T ]\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?",
            rf"(?<![\d./])[0-3]?\d([-/.])[0-3]?\d\2{_YEAR}(?![\d./]*\d)",
            r"(?<![\d./])[0-3]\d([/.])[0-3]\d\3\d{2}(?![\d./]*\d)",
            # 10:05, 23:59:59.123, 10:05 pm, 9 a.m., 14h30; not a line of a file, nor a part of an address
            r"(?<![\w.:/\[])(?:[01]?\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:[.,]\d+)?)?(?!\w|[.:]\d)(?:\s?[ap]\.?m\b)?",
            r"\b\d{1,2}\s?[ap]\.?m\b",
            r"\b\d{1,2}\s?h\s?\d{2}\b",
            # 27 November 2026, 1er mars 2026, 27. listopadu 2026, 27 de noviembre de 2026
            rf"(?<!\d){_DAY}\s+(?:de\s+|of\s+)?{_NAME}\.?,?\s+(?:de\s+|of\s+)?{_YEAR}(?!\d)",
            # November 27th, 2026
            rf"\b{_NAME}\.?\s+{_DAY},?\s+{_YEAR}(?!\d)",
            # 27 Nov, Nov 27, November 2026, Nov 27 10:05:00 UTC 2026
            rf"(?<!\d){_DAY}\s+{_any(_MONTHS)}\b",
            rf"\b{_any(_MONTHS)}\.?,?\s+(?:{_YEAR}\b|{_DAY}(?!\d)(?:\s+[\d:]+\s+\w+\s+{_YEAR})?)",
            # A weekday
            rf"\b{_any(_DAYS)}\b",
            r"(?:星期|周|週|礼拜)[一二三四五六日天]|[日月火水木金土]曜日?|[월화수목금토일]요일",
            # 2026年11月27日, 11月27日, 10時5分, 2026년 11월 27일, 10시 5분
            r"\d{2,4}\s*年(?:\s*\d{1,2}\s*月(?:\s*\d{1,2}\s*[日号號])?)?|\d{1,2}\s*月\s*\d{1,2}\s*[日号號]",
            r"\d{1,2}\s*[時时点點]\s*\d{1,2}\s*分?",
            r"\d{4}\s*년(?:\s*\d{1,2}\s*월(?:\s*\d{1,2}\s*일)?)?|\d{1,2}\s*월\s*\d{1,2}\s*일|\d{1,2}\s*시\s*\d{1,2}\s*분",
            # Seconds or milliseconds since the epoch, from 2017 on
            r"(?<![\w.])1[5-9]\d{8}(?:\d{3}|\.\d+)?(?![\w.]*\d)",
        )
    ),
    re.IGNORECASE,
)
"""Dates, times and weekdays. Where a month is between a day and a year, its name may be of any language."""
_BESIDE_TIMES = re.compile(
    rf"{_any(_MONTHS)}|{_any(_DAYS)}|st|nd|rd|th|er|am|pm|[apm.,:]|utc|gmt|c?est?|[a-z]?[ds]t|"
    r"日?(?:星期|周|週)?[一二三四五六日天月火水木金土]曜?日?|일?[월화수목금토일]요일|[上下]午|午[前後]|오[전후]",
    re.IGNORECASE,
)
"""Words that change with a date beside it."""
_GIT_HEADING = re.compile(r"git[ _-]?status|recent commits|current branch|on branch |git log", re.IGNORECASE)
_GIT_LINE = re.compile(
    r"(?:[ MADRCUT?!]{1,2} \S|[0-9a-f]{7,40} \S|## \S|\.\.\."
    r"|\s*(?:modified|new file|deleted|renamed|both modified|typechange): "
    r"|(?:on branch|current branch|main branch|git user|status:|recent commits|your branch|changes |untracked files"
    r"|nothing to commit|nothing added|no changes|no commits|working tree clean|head detached|\(clean\)"
    r"|\(use .git ))",
    re.IGNORECASE,
)
_PATH = re.compile(r"(?:~|\b[A-Za-z]:|file:/)?(?:[/\\]+[^\s/\\\"'`<>|:*?,;()\[\]{}]+)+[/\\]?")
_FOLDER = re.compile(
    r"\bcwd\b|\bpwd\b|work(?:ing|space|dir)|director|folder|project|repo|\broot\b|verzeichnis|ordner|répertoire"
    r"|dossier|carpeta|cartella|diret[óo]rio|pasta|каталог|папк|katalog|klasör|dizin|目录|目錄|文件夹|ディレクトリ"
    r"|フォルダ|디렉|폴더",
    re.IGNORECASE,
)
_MODEL_WORD = re.compile(r"model|modèle|модел|模型|モデル|모델", re.IGNORECASE)
_FAMILIES = (
    "claude gpt gemini gemma qwen qwq llama mistral mixtral devstral codestral magistral deepseek glm kimi phi "
    "grok command granite minimax opus sonnet haiku"
)
_VARIANTS = (
    "opus sonnet haiku mini nano pro flash max coder codex instruct large small medium preview latest chat turbo"
)
_MODEL_NAME = re.compile(
    rf"(?:\b[\w.-]+/)?\b{_any(_FAMILIES)}(?:[-_ .:]?(?:[a-z]{{0,2}}\d\w*(?:\.\w+)*|{_any(_VARIANTS)}))*",
    re.IGNORECASE,
)
_ID = re.compile(
    r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"
    r"|\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{8,64}\b"
    r"|\b(?:[a-z]+[_-])?(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[0-9A-Za-z]{16,64}\b",
)
"""UUIDs, hexadecimal digests, and long words of digits and letters."""
_ATTRIBUTION = re.compile(r"(?:^|[>\]])\s*(x-[\w-]+|[\w-]*header):[ \t]*\S.*=", re.IGNORECASE)


def _is_attribution(change: Change) -> bool:
    """True if a header differs, or only one of the prompts has one."""
    a, b = map(_ATTRIBUTION.search, change.lines)
    if change.role not in ("system", "") or (a is None and b is None):
        return False
    if a is not None and b is not None:
        return a[1] == b[1]
    return not (change.old if a is None else change.new).strip()


def _is_date(change: Change) -> bool:
    return all(each.are_in(_TIMES, _BESIDE_TIMES) for each in _differing(*change.lines))


def _is_git_status(change: Change) -> bool:
    """True if all differing lines are git's, and a heading says that they are."""
    before = _unescaped(change.before[-_MAX_HEADING:])
    start, end = _END_OF_LINE.split(before)[-1], _END_OF_LINE.split(_unescaped(change.after[:_MAX_LINE]))[0]
    texts = [_unescaped(start + differing + end) for differing in (change.old, change.new)]
    if not any(_GIT_HEADING.search(before + text) for text in texts):
        return False
    lines = [line for text in texts for line in text.split("\n") if line.strip()]
    return bool(lines) and all(_GIT_LINE.match(line) for line in lines)


def _is_directory(change: Change) -> bool:
    """True if only paths differ, and the line or the one before it speaks of a folder."""
    old, new = change.lines
    heading = _unescaped(change.before[-_MAX_LINE:]).split("\n")[-2:-1]
    return (
        _PATH.sub("/", old) == _PATH.sub("/", new)
        and _PATH.findall(old) != _PATH.findall(new)
        and any(_FOLDER.search(_PATH.sub("/", line)) for line in (new, *heading))
    )


def _is_model(change: Change) -> bool:
    old, new = change.lines
    without = _MODEL_NAME.sub("", new)
    return without == _MODEL_NAME.sub("", old) and bool(_MODEL_WORD.search(without))


def _is_id(change: Change) -> bool:
    old, new = change.lines
    return _ID.sub("", old) == _ID.sub("", new)


_OF_LINES: tuple[tuple[Culprit, Callable[[Change], bool]], ...] = (
    ("attribution", _is_attribution),
    ("date", _is_date),
    ("git_status", _is_git_status),
    ("directory", _is_directory),
    ("model", _is_model),
    ("id", _is_id),
)
"""Rules that compare the two lines, in this order."""

# --- rules about the whole change ---

_TAG = re.compile(r"<([A-Za-z][\w.-]{2,40})(?:\s[^<>]*)?>")
_DECLARED = re.compile(
    r"""(?:["'>]|type |declaration:|def |function |name: |## )"""
    r"(?=([\w-]{1,128}(?:[.:/][\w-]{1,128}){0,4}))"
)
"""The ways in which templates write the name of a declared tool. One may begin within what looks like a name."""
_MIN_REMINDER = 16
"""Characters of a line by which a reminder without a tag is found again."""


def _is_reasoning(change: Change) -> bool:
    """True if reasoning of the earlier reply is left out of the later prompt."""
    if change.reasoning is None or change.role not in ("assistant", ""):
        return False
    start, end = change.reasoning
    before, old, new, after = (
        text.replace(MARK, "") for text in (change.before[-_MAX_LINE:], change.old, change.new, change.after[:200])
    )
    is_open = before.rstrip().endswith(start)
    is_left_out = (end in old and (start in old or is_open)) or (
        is_open and bool(old.strip()) and after.lstrip().startswith(end)
    )
    return is_left_out and not new.replace(start, "").replace(end, "").strip()


def _is_tool_order(change: Change) -> bool:
    """True if the same tools are declared in another order, and the place is where the order differs."""
    old, new = change.old_tools, change.new_tools
    if old == new or sorted(old) != sorted(new):
        return False
    at = next(i for i in range(len(old)) if old[i] != new[i])
    return _declares(change, change.old, old[at]) and _declares(change, change.new, new[at])


def _is_tools(change: Change) -> bool:
    """True if other tools are declared and the place is where they begin to differ, or if it is within a tool."""
    old, new = change.old_tools, change.new_tools
    if sorted(old) == sorted(new):
        return bool(_tool_at(change))
    at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    if at and not _is_declared(new[at - 1], change.before[-_MAX_TOOLS:]):
        return False
    return any(
        at < len(tools) and _declares(change, text, tools[at])
        for tools, text in ((old, change.old), (new, change.new))
    )


def _declares(change: Change, differing: str, tool: str) -> bool:
    """True if a declaration of the tool begins soon after the place, or right before it."""
    n = len(tool) + 20
    near = change.before[-n:] + (differing + change.after[:n])[:_MAX_LINE]
    return _is_declared(tool, near)


def _tool_at(change: Change) -> str:
    """Return the name of the tool in whose declaration the place is; empty if it is in none.

    The next tool must follow, or the line must be that of the declaration.
    """
    text = change.before[-_MAX_TOOLS:]
    numbers = {name: i for i, name in enumerate(change.new_tools)}
    latest = None
    for found in _DECLARED.finditer(text):
        if found[1] in numbers:
            latest = found
    if latest is None or MARK in text[latest.end(1) :]:
        return ""
    tool = latest[1]
    following = change.new_tools[numbers[tool] + 1 :][:1]
    is_within = any(_is_declared(name, change.new + change.after) for name in following)
    return tool if is_within or "\n" not in text[latest.end(1) :] else ""


def _is_declared(tool: str, text: str) -> bool:
    return any(found[1] == tool for found in _DECLARED.finditer(text))


def _is_reminder(change: Change) -> bool:
    """True if a block of the earlier prompt is no longer there, and is again in a later message."""
    if change.new.strip() or change.role == "assistant":
        return False
    block = _END_OF_LINE.split(change.before[-_MAX_LINE:])[-1] + change.old
    tag = _TAG.search(block[:_MAX_LINE])
    if tag is not None:
        inside, end, _ = (block + change.after[: len(tag[0]) + 3]).partition(f"</{tag[1]}>")
        if end:
            return MARK not in inside and f"<{tag[1]}" in change.after
    if change.role not in ("system", "user", "tool") or MARK in change.old.rstrip():
        return False
    lines = change.old.strip().split("\n")
    return len(lines[0]) >= _MIN_REMINDER and lines[0] in change.after


def _is_trimmed(change: Change) -> bool:
    """True if whole messages of the earlier prompt are left out, and nothing stands for them."""
    is_message = change.role in ("user", "assistant", "tool") and bool(_HEADER.search(change.old))
    return is_message and not change.new.strip()


_OF_CHANGES: tuple[tuple[Culprit, Callable[[Change], bool]], ...] = (
    ("reasoning", _is_reasoning),
    ("tool_order", _is_tool_order),
    ("tools", _is_tools),
    ("reminder", _is_reminder),
    ("trimmed", _is_trimmed),
)
"""Rules that look at all of the differing text, in this order."""
