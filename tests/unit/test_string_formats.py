from __future__ import annotations

import calendar
import datetime
import ipaddress
import re
import urllib.parse
import uuid

import idna
import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from regular_cases import members

from grammar_sync.regular.formats import format_language, format_rule, format_rules
from grammar_sync.regular.language import Language

WITH_LANGUAGE = [rule.name for rule in format_rules() if rule.regex is not None]


def language_of(name: str) -> Language:
    language = format_language(name)
    assert language is not None
    return language


def refused_by_an_oracle(name: str, text: str) -> bool:
    """Whether a library other than this package refuses the text for this format."""
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    if name in checker.checkers and not checker.conforms(text, name):
        return True
    try:
        if name in ("date", "date-time"):
            datetime.datetime.fromisoformat(text)
        if name == "time":
            datetime.time.fromisoformat(text)
        if name == "ipv4":
            ipaddress.IPv4Address(text)
        if name == "ipv6":
            ipaddress.IPv6Address(text)
        if name == "uuid":
            uuid.UUID(text)
        if name in ("uri", "uri-reference", "iri", "iri-reference"):
            urllib.parse.urlsplit(text)
    except ValueError:
        return True
    if name.endswith("email"):
        local, _, domain = text.rpartition("@")
        octets = len(local.encode()), len(idna.encode(domain))
        return octets[0] > 64 or sum(octets) + 1 > 254
    if name == "hostname" and len(text) > 253:
        return True
    return name == "hostname" and any(len(label) > 63 for label in text.split("."))


@settings(deadline=None, max_examples=120)
@given(st.data())
def test_members_are_valid_for_other_libraries(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(WITH_LANGUAGE))
    text = data.draw(members(language_of(name)))
    assert language_of(name).fullmatch(text)
    assert not refused_by_an_oracle(name, text)


def test_every_day_of_the_calendar() -> None:
    dates = language_of("date")
    for year in (1, 4, 99, 100, 400, 999, 1000, 1900, 1904, 2000, 2023, 2024, 2100, 9996, 9999):
        for month in range(14):
            for day in range(33):
                valid = 1 <= month <= 12 and 1 <= day <= calendar.monthrange(year, month)[1]
                assert dates.fullmatch(f"{year:04}-{month:02}-{day:02}") == valid
    assert not dates.fullmatch("0000-01-01")


@settings(deadline=None, max_examples=300)
@given(
    st.lists(
        st.sampled_from(["", ":", "::", "0", "1:", "ab:", "12345:", "fffF:", "1.2.3.4", "256.1.1.1", "1.2.3"]),
        max_size=10,
    )
)
@example(["1:"] * 7 + ["::"])
@example(["1:2:3:4:5:6:7::"])
@example(["1::2:3:4:5:6:7"])
@example(["::1.2.3.4"])
@example(["1:2:3:4:5:6:1.2.3.4"])
@example(["1:2:3:4:5:6:7:1.2.3.4"])
def test_ipv6_is_exact(parts: list[str]) -> None:
    text = "".join(parts)
    try:
        ipaddress.IPv6Address(text)
        valid = True
    except ValueError:
        valid = False
    assert language_of("ipv6").fullmatch(text) == valid


VALID = {
    "date": ["2024-02-29", "1999-12-31"],
    "time": ["12:30:00Z", "23:59:59.123456+05:30", "00:00:00-08:00"],
    "date-time": ["2024-02-29T12:30:00Z", "1985-04-12T23:20:50.52Z", "1996-12-19T16:39:57-08:00"],
    "duration": ["P1D", "P4DT12H30M5S", "PT1H", "P2W", "P1Y2M3D", "PT36H"],
    "email": ["joe.bloggs@example.com", "te~st@example.com", "a+b@mail.example.co.uk", "first.middle.last@a-b-c.org"],
    "idn-email": ["실례@실례.테스트", "joe@example.com", "jürgen@bücher.de"],
    "hostname": ["localhost", "www.example.com", "a-b-c.example.org", "a" * 63, "3com.com"],
    "idn-hostname": ["실례.테스트", "bücher.de", "example.com", "a" * 63],
    "ipv4": ["192.168.0.1", "255.255.255.255", "0.0.0.0"],
    "ipv6": ["::1", "::", "2001:db8::8a2e:370:7334", "::ffff:192.0.2.1", "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::"],
    "uuid": ["2eb8aa08-aa98-11ea-b4aa-73b441d16380", "2EB8AA08-AA98-11EA-B4AA-73B441D16380"],
    "uri": [
        "http://foo.bar/?baz=qux#quux", "http://foo.com/blah_(wikipedia)_blah#cite-1", "urn:oasis:names:spec:docbook",
        "mailto:John.Doe@example.com", "ftp://ftp.is.co.za/rfc/rfc1808.txt", "tel:+1-816-555-1212", "http://a:b@c:80/%7E",
        "http://-.~_!$&'()*+,;=:%40:80%2f::::::@example.com", "about:", "file:///etc/hosts",
    ],
    "uri-reference": ["/abc", "//foo.bar/?baz", "abc", "#fragment", "", "http://a/b?c#d", "./this:that"],
    "iri": ["http://ƒøø.ßår/?∂éœ=πîx#πîüx", "http://example.com/"],
    "iri-reference": ["/âππ", "#ƒrägmênt", "âππ"],
    "uri-template": ["http://example.com/dictionary/{term:1}/{term}", "/a{?x,y*}", "plain", "{+path}/here{#frag}"],
    "json-pointer": ["", "/foo/bar~0/baz~1/%a", "/foo/0", "/ ", "/é"],
    "relative-json-pointer": ["1", "0/foo/bar", "2/0/baz", "0#"],
}  # fmt: skip
INVALID = {
    "date": ["2023-02-29", "1900-02-29", "2024-13-01", "2024-04-31", "06/19/1963", "1963-06-1৪", "2024-01-01\n"],
    "time": ["24:00:00Z", "12:00:60Z", "12:00:00", "12:00", "12:00:00+24:00", "12:00:00 Z", "12:00:00,5Z"],
    "date-time": ["2024-02-30T12:00:00Z", "2024-02-29 12:00:00Z", "2024-02-29T12:00:00", "2024-366T01:01:01Z"],
    "duration": ["P", "PT", "P1YT", "P2D1Y", "P1D2H", "P2S", "P1Y2W", "PT0.5S", "1D", "P1৪D", "P1Y3D", "PT1H3S"],
    "email": ["2962", ".test@example.com", "te..st@example.com", "a@b@c", "a@-b", "a b@c.d", "a@", "joe@[127.0.0.1]"],
    "idn-email": ["2962", "a@〮실례.테스트"],
    "hostname": ["-a", "a-", "a..b", "a_b", "", "a" * 64, ".", "example.com.", "a.b.c.d.e", "실례.테스트", "a\n"],
    "idn-hostname": ["〮실례.테스트", "-a", "xn--X", "a" * 64, "l·", "Aé", "é-"],
    "ipv4": ["127.0.0.0.1", "256.1.1.1", "127.0", "0x7f000001", "087.10.0.1", "1২7.0.0.1", "192.168.1.0/24"],
    "ipv6": ["12345::", "1:1:1:1:1:1:1:1:1", ":2:3:4:5:6:7:8", "1:2:3:4:5:6:7:8::", "::a%eth1", "::1.2.3", "1::2::3"],
    "uuid": ["2eb8aa08aa9811eab4aa73b441d16380", "2eb8aa08-aa98-11ea-b4aa73b4-41d16380"],
    "uri": ["//foo.bar/", "/abc", "abc", "http:// shouldfail.com", ":// should fail", "http://a/%", "a:é", "a:<b>"],
    "uri-reference": ["\\\\WINDOWS\\fileshare", "a b", "#a\\b", "%zz", "a:b\n"],
    "iri": ["/abc", "âππ", "http://a b"],
    "iri-reference": ["\\\\WINDOWS\\filëßåré", "#ƒräg\\mênt"],
    "uri-template": ["http://example.com/{term:1}/{term", "{}", "a b", "{a,,b}", "a}", "{v:0}"],
    "json-pointer": ["a", "#/", "/~", "/~2", "0"],
    "relative-json-pointer": ["", "01", "-1/foo", "+1", "0##", "/foo", "1\n"],
}  # fmt: skip


@pytest.mark.parametrize("name", WITH_LANGUAGE)
def test_examples(name: str) -> None:
    language = language_of(name)
    assert [text for text in VALID[name] if not language.fullmatch(text)] == []
    assert [text for text in INVALID[name] if language.fullmatch(text)] == []


@pytest.mark.parametrize("name", WITH_LANGUAGE)
def test_formats_are_written_for_engines(name: str) -> None:
    regex = language_of(name).to_regex()
    assert len(regex) < 10_000
    assert all(re.fullmatch(regex, text) for text in VALID[name])
    assert not any(re.fullmatch(regex, text) for text in INVALID[name])


def test_every_rule_says_what_it_is() -> None:
    names = [rule.name for rule in format_rules()]
    assert len(set(names)) == len(names)
    for rule in format_rules():
        assert (rule.regex is not None) == (rule.status in ("exact", "narrower"))
        assert (rule.note == "") == (rule.status == "exact")
    assert format_rule("regex").status == "refused"
    assert format_rule("byte").status == "annotation"
    assert format_rule("no-such-format").status == "unknown"
    assert format_language("no-such-format") is None
