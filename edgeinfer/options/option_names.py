"""Names of options in messages: the library writes Python keywords, a command line shows its flags.

A message names an option in two ways: as its first word ("top_p: saw 2, wanted ..."), or with an equals sign
("take a larger context (context=)", "draft=None leaves it out").
"""

import functools
import re
from collections.abc import Mapping

from edgeinfer.errors import EdgeInferError, SettingError
from edgeinfer.options.load_options import LoadOptions
from edgeinfer.options.option_field import options_of
from edgeinfer.options.run_options import RunOptions
from edgeinfer.options.sampling_params import SamplingParams

ALL = (LoadOptions, RunOptions, SamplingParams)
OTHERS: Mapping[str, tuple[str, ...]] = {
    "allow_requantize": ("--allow-requantize",),
    "imatrix": ("--imatrix",),
    "overwrite": ("--force",),
    "text": ("--text",),
    "unknown_pre": ("--assume-pre-tokenizer",),
}
"""Keywords of functions without an option class -> flags."""
_ASSIGNED = re.compile(r"(?<![\w/.'\"-])([a-z][a-z_]*)=('[\w.:-]+'|True|False|None)?(?=[\s),;]|$)")
_FIRST = re.compile(r"[a-z][a-z_]*(?:(?:, | and )[a-z][a-z_]*)*(?=: )")


@functools.cache
def flags_by_name(kinds: tuple[type, ...] = ALL) -> Mapping[str, tuple[str, ...]]:
    """Name -> flags of the command line, the main one first, of the options of these classes; of all classes
    also those of other keywords.
    """
    flags: dict[str, tuple[str, ...]] = dict(OTHERS) if kinds == ALL else {}
    for kind in kinds:
        for name, info in options_of(kind).items():
            if info.commands:
                flags[name] = info.flags or (f"--{name.replace('_', '-')}",)
    return flags


def with_flags(text: str, kinds: tuple[type, ...] = ALL) -> str:
    """A message whose keywords with an equals sign are written as flags of the command line."""
    flags = flags_by_name(kinds)

    def flag(match: re.Match[str]) -> str:
        name, value = match[1], (match[2] or "").strip("'")
        if name not in flags:
            return match[0]
        on, _, off = flags[name][0].partition("/")
        if value in ("True", "False"):
            return off if value == "False" and off else on
        return f"{on} {value.replace('None', 'none')}".rstrip()

    return _ASSIGNED.sub(flag, text)


def error_with_flags(error: EdgeInferError, kinds: tuple[type, ...] = ALL) -> str:
    """The text of an error with flags instead of keywords, also in front of what is wrong with a setting;
    a command line has no None.
    """
    text = with_flags(str(error), kinds)
    flags, first = flags_by_name(kinds), _FIRST.match(text)
    if first is None or not isinstance(error, SettingError):
        return text
    text = text.removesuffix(", or None")
    names = re.sub(r"[a-z_]+", lambda name: flags.get(name[0], (name[0],))[0].partition("/")[0], first[0])
    return names + text[first.end() :]
