r"""The ``format`` names of JSON Schema as regular languages.

Each language is a subset of what the format's RFC takes *and* of what the jsonschema library's format checker takes, so
that output is never refused by either, and wide enough for ordinary values. Where it is smaller than the RFC's, the
rule says how. Lengths that an RFC bounds as a whole are kept by bounding the parts.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, Literal

import msgspec

from grammar_sync.regular.language import Language, whole_regex


class FormatRule(msgspec.Struct, frozen=True):
    """What this package makes of one format name.

    Args:
        name: The name.
        status: ``exact``: the language is the format. ``narrower``: it is a part of it. ``annotation``: the name says
            nothing about which strings are valid. ``refused``: it constrains strings, but not in a regular way.
            ``unknown``: not a format known here; JSON Schema treats it as an annotation.
        note: How it is narrower, or why there is no language; empty for exact ones.
        regex: A whole-string regular expression of the language; None where there is none.
    """

    name: str
    status: Literal["exact", "narrower", "annotation", "refused", "unknown"]
    note: str = ""
    regex: str | None = None


def _any_of(*options: str) -> str:
    return f"(?:{'|'.join(options)})"


# Dates. Year 0000 is left out, since Python's datetime refuses it.
_YEAR: Final = _any_of("[1-9][0-9]{3}", "0[1-9][0-9]{2}", "00[1-9][0-9]", "000[1-9]")
_FOURTH: Final = _any_of("0[48]", "[2468][048]", "[13579][26]")  # two digits, divisible by four, not 00
_LEAP_YEAR: Final = _any_of(f"[0-9]{{2}}{_FOURTH}", f"{_FOURTH}00")
_DATE: Final = _any_of(
    f"{_YEAR}-"
    + _any_of(
        "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])",
        "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)",
        "02-(?:0[1-9]|1[0-9]|2[0-8])",
    ),
    f"{_LEAP_YEAR}-02-29",
)
_HOUR: Final = "(?:[01][0-9]|2[0-3])"
_TIME: Final = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+\-]{_HOUR}:[0-5][0-9])"
_SECONDS: Final = "[0-9]+S"
_MINUTES: Final = f"[0-9]+M(?:{_SECONDS})?"
_HOURS: Final = f"[0-9]+H(?:{_MINUTES})?"
_DURATION_TIME: Final = f"T{_any_of(_HOURS, _MINUTES, _SECONDS)}"
_DURATION_DATE: Final = _any_of("[0-9]+D", "[0-9]+M(?:[0-9]+D)?", "[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?")
_DURATION: Final = f"P{_any_of(f'{_DURATION_DATE}(?:{_DURATION_TIME})?', _DURATION_TIME, '[0-9]+W')}"

# Names. A label has at most 63 characters, a host name at most 3 * 63 + 3 + 61 = 253.
_LABEL: Final = _any_of("[A-Za-z0-9]{1,63}", "[A-Za-z0-9]{1,20}(?:-[A-Za-z0-9]{1,20}){1,2}")
_HOSTNAME: Final = rf"{_LABEL}(?:\.{_LABEL}){{0,2}}(?:\.[A-Za-z0-9]{{1,61}})?"
_HOSTNAME_NOTE: Final = "at most 4 labels, with at most 2 single hyphens each, none in the fourth"
# Lower-case letters of scripts without contextual rules; 14 of them stay within 63 characters of Punycode.
_IDN_LETTERS: Final = "ß-öø-ÿα-ωа-яぁ-ゖァ-ヺ一-鿿가-힣"
_IDN_LABEL: Final = _any_of(_LABEL, f"[a-z0-9{_IDN_LETTERS}]{{1,14}}")
_IDN_HOSTNAME: Final = rf"{_IDN_LABEL}(?:\.{_IDN_LABEL}){{0,2}}(?:\.[A-Za-z0-9]{{1,61}})?"
_IDN_NOTE: Final = (
    "labels of at most 14 lower-case Latin, Greek, Cyrillic, kana, Han or Hangul letters and digits, or in ASCII; "
    + _HOSTNAME_NOTE
)
# Mail addresses: at most 50 octets before the @ (64 with letters beyond ASCII), and 4 * 50 + 3 after it.
_ATOM: Final = r"A-Za-z0-9!#$%&'*+/=?\^_`{|}~\-"
_LOCAL: Final = _any_of(f"[{_ATOM}]{{1,50}}", rf"[{_ATOM}]{{1,16}}(?:\.[{_ATOM}]{{1,16}}){{1,2}}")
_IDN_LOCAL: Final = _any_of(_LOCAL, rf"[{_ATOM}\p{{L}}]{{1,16}}")
_MAIL_LABEL: Final = _any_of("[A-Za-z0-9]{1,50}", "[A-Za-z0-9]{1,16}(?:-[A-Za-z0-9]{1,16}){1,2}")
_IDN_MAIL_LABEL: Final = _any_of(_MAIL_LABEL, f"[a-z0-9{_IDN_LETTERS}]{{1,12}}")
_EMAIL: Final = rf"{_LOCAL}@{_MAIL_LABEL}(?:\.{_MAIL_LABEL}){{0,3}}"
_IDN_EMAIL: Final = rf"{_IDN_LOCAL}@{_IDN_MAIL_LABEL}(?:\.{_IDN_MAIL_LABEL}){{0,3}}"
_EMAIL_NOTE: Final = "before the @ one unquoted atom of at most 50 characters or three of at most 16; after it "

# Addresses.
_BYTE: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4: Final = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_GROUP: Final = "[0-9A-Fa-f]{1,4}"
_LAST_TWO: Final = f"(?:{_GROUP}:{_GROUP}|{_IPV4})"


def _ipv6() -> str:
    """Returns the address forms of RFC 4291: eight groups, or fewer around one ``::``; the last two may be IPv4."""
    options = [f"(?:{_GROUP}:){{6}}{_LAST_TWO}"]
    for before in range(8):
        head = "" if before == 0 else _GROUP if before == 1 else f"{_GROUP}(?::{_GROUP}){{{before - 1}}}"
        room = 7 - before  # groups that may follow; the "::" stands for at least one
        tails = []
        if room >= 1:
            tails.append(_GROUP if room == 1 else f"{_GROUP}(?::{_GROUP}){{0,{room - 1}}}")
        if room >= 2:
            tails.append(_IPV4 if room == 2 else f"(?:{_GROUP}:){{0,{room - 2}}}{_IPV4}")
        options.append(f"{head}::{_any_of(*tails) + '?' if tails else ''}")
    return "|".join(options)


# URIs (RFC 3986) and IRIs (RFC 3987). Addresses in brackets are left out.
_PERCENT: Final = "%[0-9A-Fa-f]{2}"
_UNRESERVED: Final = r"A-Za-z0-9\-._~"
_SUB_DELIMS: Final = "!$&'()*+,;="
_UCS_CHARS: Final = "".join(
    ["\\u00a0-\\ud7ff\\uf900-\\ufdcf\\ufdf0-\\uffef"]
    + [f"\\U{plane:04x}{'1000' if plane == 0xE else '0000'}-\\U{plane:04x}fffd" for plane in range(1, 0xF)]
)
_PRIVATE: Final = "\\ue000-\\uf8ff\\U000f0000-\\U000ffffd\\U00100000-\\U0010fffd"


def _uri(extra: str = "", private: str = "", *, relative: bool = False) -> str:
    """Returns absolute URIs, or with ``relative`` the references that are not; ``extra`` characters make them IRIs."""
    plain = f"{_UNRESERVED}{extra}{_SUB_DELIMS}"
    segment = f"(?:[{plain}:@]|{_PERCENT})"
    authority = f"(?:(?:[{plain}:]|{_PERCENT})*@)?(?:[{plain}]|{_PERCENT})*(?::[0-9]*)?"
    paths = [f"//{authority}(?:/{segment}*)*", f"/(?:{segment}+(?:/{segment}*)*)?"]
    first = f"(?:[{plain}@]|{_PERCENT})" if relative else segment
    paths.append(f"{first}+(?:/{segment}*)*")
    query = rf"(?:\?(?:[{plain}{private}:@/?]|{_PERCENT})*)?(?:#(?:[{plain}:@/?]|{_PERCENT})*)?"
    scheme = "" if relative else r"[A-Za-z][A-Za-z0-9+.\-]*:"
    return f"{scheme}(?:{'|'.join(paths)})?{query}"


_URI_NOTE: Final = "no IPv6 addresses in brackets"
_POINTER: Final = "(?:/(?:[^/~]|~[01])*)*"
_VARIABLE: Final = r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*(?::[1-9][0-9]{0,2}|\*)?"
_URI_TEMPLATE: Final = (
    rf"(?:[!#$&(-;=?-\[\]_a-z~{_UCS_CHARS}{_PRIVATE}]|{_PERCENT}|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*"
)

_RULES: Final = (
    FormatRule("date", "narrower", "no year 0000", _DATE),
    FormatRule("time", "narrower", "no leap seconds, at most 9 decimals, upper-case Z", _TIME),
    FormatRule("date-time", "narrower", "as date and time, with an upper-case T", f"{_DATE}T{_TIME}"),
    FormatRule("duration", "exact", "", _DURATION),
    FormatRule("email", "narrower", f"{_EMAIL_NOTE}at most 4 labels of at most 50 characters", _EMAIL),
    FormatRule("idn-email", "narrower", f"{_EMAIL_NOTE}a short idn-hostname", _IDN_EMAIL),
    FormatRule("hostname", "narrower", _HOSTNAME_NOTE, _HOSTNAME),
    FormatRule("idn-hostname", "narrower", _IDN_NOTE, _IDN_HOSTNAME),
    FormatRule("ipv4", "exact", "", _IPV4),
    FormatRule("ipv6", "exact", "", _ipv6()),
    FormatRule("uuid", "exact", "", "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"),
    FormatRule("uri", "narrower", _URI_NOTE, _uri()),
    FormatRule("uri-reference", "narrower", _URI_NOTE, f"{_uri()}|{_uri(relative=True)}"),
    FormatRule("iri", "narrower", _URI_NOTE, _uri(_UCS_CHARS, _PRIVATE)),
    FormatRule(
        "iri-reference",
        "narrower",
        _URI_NOTE,
        f"{_uri(_UCS_CHARS, _PRIVATE)}|{_uri(_UCS_CHARS, _PRIVATE, relative=True)}",
    ),
    FormatRule(
        "uri-template", "narrower", "no escapes in variable names, prefixes of at most 999 characters", _URI_TEMPLATE
    ),
    FormatRule("json-pointer", "exact", "", _POINTER),
    FormatRule("relative-json-pointer", "exact", "", f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})"),
    FormatRule("regex", "refused", "regular expressions nest, so that they are not a regular language"),
    FormatRule("byte", "annotation", "base64 data: a content encoding, which validators do not check"),
    FormatRule("binary", "annotation", "any data"),
    FormatRule("password", "annotation", "a hint for forms"),
    FormatRule("int32", "annotation", "about numbers, not strings"),
    FormatRule("int64", "annotation", "about numbers, not strings"),
    FormatRule("float", "annotation", "about numbers, not strings"),
    FormatRule("double", "annotation", "about numbers, not strings"),
)


def format_rules() -> tuple[FormatRule, ...]:
    """Returns the rules of all formats known here, in a fixed order."""
    return _RULES


def format_rule(name: str) -> FormatRule:
    """Returns what is known of a format; of a name that is not known, a rule with status ``unknown``."""
    for rule in _RULES:
        if rule.name == name:
            return rule
    return FormatRule(name, "unknown", "not a format known here: an annotation")


@lru_cache(maxsize=64)
def format_language(name: str) -> Language | None:
    """Returns a format's language, or None where there is none (see the rule's status and note)."""
    regex = format_rule(name).regex
    return None if regex is None else whole_regex(regex)
