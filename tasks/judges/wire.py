"""The text that crosses from a program to a judge: JSON made of numbers and arrays, and nothing else.

Every limit of the format stands here (spec tasks 1). Knows no problem: which numbers are wanted is for each judge's typed
decoder. All checks run in C over the whole text, so that 16 MiB of hostile text cost a fraction of a second and no recursion.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

MAXIMUM_BYTES: Final = 16 << 20
MAXIMUM_NESTING: Final = 4
MAXIMUM_INTEGER_DIGITS: Final = 25
MAXIMUM_NUMBER_CHARACTERS: Final = 60
MAXIMUM_EXPONENT: Final = 308

_ALLOWED: Final = b"0123456789+-.eE[], \t\r\n"
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]"))
_SEPARATORS: Final = bytes.maketrans(b"[],\t\r\n", b"      ")
_DIGITS: Final = bytes.maketrans(b"0123456789", b"0" * 10)
_HUGE_EXPONENT: Final = re.compile(rb"[eE]\+?0*(?:309|3[1-9][0-9]|[4-9][0-9]{2}|[1-9][0-9]{3})[0-9]*")
_NUMBERS: Final = bytes.maketrans(b"0123456789+-.eE", b"0" * 15)


def fault(text: bytes, maximum_bytes: int = MAXIMUM_BYTES) -> str | None:
    """Why this is not the text of an answer, in one line; None if it is.

    An answer is one JSON number, or arrays of numbers nested at most 4 deep: no NaN or Infinity, no integer of more than
    25 digits, no number of more than 60 characters, no exponent above 308. (A longer mantissa can still pass the largest double;
    each judge's decoder refuses that.)
    """
    if len(text) > maximum_bytes:
        return f"the result has {len(text)} bytes; at most {maximum_bytes} are read"
    if not text.strip():
        return "the result is empty"
    if foreign := text.translate(None, _ALLOWED):
        return f"the result holds {_shown(foreign)}; only finite numbers in lists are read"
    return _bad_nesting(text) or _bad_number(text) or _bad_grammar(text)


def _shown(foreign: bytes) -> str:
    for token in (b"NaN", b"Infinity", b"null", b"true", b"false"):
        if foreign.startswith(token.translate(None, _ALLOWED)):
            return token.decode()
    return repr(chr(foreign[0]))


def _bad_nesting(text: bytes) -> str | None:
    brackets = text.translate(None, _NOT_BRACKETS)
    # Each round removes the innermost level, wherever it stands.
    for _ in range(MAXIMUM_NESTING):
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        return f"the result's lists are unbalanced or nested more than {MAXIMUM_NESTING} deep"
    return None


def _bad_number(text: bytes) -> str | None:
    if (b"e" in text or b"E" in text) and (found := _HUGE_EXPONENT.search(text)):
        return f"the result holds an exponent {found[0][:20].decode()}; at most e{MAXIMUM_EXPONENT} is read"
    # Two searches in C clear nearly every text; only one with something long is taken apart.
    long_number = b"0" * (MAXIMUM_NUMBER_CHARACTERS + 1) in text.translate(_NUMBERS)
    long_integer = b"0" * (MAXIMUM_INTEGER_DIGITS + 1) in text.translate(_DIGITS)
    if not (long_number or long_integer):
        return None
    tokens = text.translate(_SEPARATORS).split()
    longest = max(map(len, tokens))
    if longest > MAXIMUM_NUMBER_CHARACTERS:
        return f"the result holds a number of {longest} characters; at most {MAXIMUM_NUMBER_CHARACTERS} are read"
    digits = max((len(t) for t in (t.lstrip(b"-") for t in tokens if len(t) > MAXIMUM_INTEGER_DIGITS) if t.isdigit()), default=0)
    if digits > MAXIMUM_INTEGER_DIGITS:
        return f"the result holds an integer of {digits} digits; at most {MAXIMUM_INTEGER_DIGITS} are read"
    return None


def _bad_grammar(text: bytes) -> str | None:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError) as error:
        return f"the result is not JSON: {error}"
    return None
