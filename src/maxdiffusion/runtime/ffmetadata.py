"""ffmpeg's text form of a file's tags, written and read; any text survives there and back."""

import re
from collections.abc import Mapping

_HEADER = ";FFMETADATA1"
_SPECIAL = re.compile(r"([=;#\\\n\r])")
_ENTRY = re.compile(r"((?:\\.|[^=;#\\\n])*)=((?:\\.|[^\\\n])*)\n", re.DOTALL)


def format_tags(tags: Mapping[str, str]) -> str:
    """The file that gives a video these tags."""
    lines = [f"{_escape(name)}={_escape(value)}" for name, value in tags.items()]
    return "\n".join([_HEADER, *lines]) + "\n"


def parse_tags(text: str) -> dict[str, str]:
    """The tags in such a file, up to its first section."""
    whole = re.split(r"^\[", text.removeprefix(_HEADER).lstrip("\n"), maxsplit=1, flags=re.M)[0]
    return {_unescape(name): _unescape(value) for name, value in _ENTRY.findall(whole)}


def _escape(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", text.replace("\0", ""))


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL)
