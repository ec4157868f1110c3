"""One declaration makes a flag, its parsing, its check and its row in the reference."""

from __future__ import annotations  # declared reads a field's type from its text

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from sglang_canopy import declared
from sglang_canopy.declared import declare, declare_key
from sglang_canopy.errors import CanopyError


@dataclass(frozen=True)
class SampleFlags(declared.Checked):
    mode: str = declare("fast", "--sample-mode", "How.", choices=("fast", "slow"))
    size_mb: int = declare(8, "--sample-size-mb", "How much.", metavar="MIB", low=0, high=64)
    share: float | None = declare(None, "--sample-share", "What share of 100 %.", low=0, high=1)
    extra: Mapping | None = declare(None, "--sample-extra", "More.", parse=declared.json_object)
    loud: bool = declare(False, "--sample-loud", "Say more.")
    derived: int = 3


def _read(*argv: str) -> SampleFlags:
    parser = argparse.ArgumentParser()
    declared.add_flags(parser.add_argument_group("sample"), SampleFlags)
    return SampleFlags(**declared.typed_values(SampleFlags, parser.parse_args(argv)))


def test_flags_that_were_not_typed_keep_the_defaults() -> None:
    assert _read() == SampleFlags()


def test_values_have_the_type_of_their_field() -> None:
    sample = _read("--sample-size-mb", "16", "--sample-share", "0.5", "--sample-extra", '{"a": 1}')
    assert (sample.size_mb, sample.share, sample.extra) == (16, 0.5, {"a": 1})


@pytest.mark.parametrize(
    ("flag", "value", "reason"),
    [
        ("--sample-size-mb", "65", "must be from 0 to 64, got 65"),
        ("--sample-share", "nan", "must be from 0 to 1, got nan"),
        ("--sample-extra", "{", "is not JSON"),
        ("--sample-extra", "[1]", "must be a JSON object"),
    ],
)
def test_a_wrong_value_is_refused_by_its_flag(flag: str, value: str, reason: str) -> None:
    with pytest.raises(CanopyError, match=f"{flag} {reason}"):
        _read(flag, value)
    with pytest.raises(CanopyError, match="--sample-mode must be one of fast, slow, got 'odd'"):
        SampleFlags(mode="odd")


def test_a_switch_takes_no_value() -> None:
    assert _read("--sample-loud").loud
    assert not _read().loud


def test_a_key_of_an_object_is_checked_by_its_name_and_has_no_flag() -> None:
    @dataclass(frozen=True)
    class Keys(declared.Checked):
        block_tokens: int = declare_key(64, "Granularity.", low=1)

    with pytest.raises(CanopyError, match="key 'block_tokens' must be at least 1, got 0"):
        Keys(block_tokens=0)
    parser = argparse.ArgumentParser()
    declared.add_flags(parser.add_argument_group("keys"), Keys)
    assert "block" not in parser.format_help()


def test_help_and_reference_have_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _read("--help")
    help_text = " ".join(capsys.readouterr().out.split())
    assert "How much. (default: 8)" in help_text
    assert "What share of 100 %." in help_text
    table = {row["flag"]: row for row in declared.table_rows(SampleFlags)}
    assert list(table) == [
        *("--sample-mode", "--sample-size-mb", "--sample-share", "--sample-extra"),
        "--sample-loud",
    ]
    assert table["--sample-size-mb"]["allowed"] == "from 0 to 64"
    assert table["--sample-mode"]["allowed"] == "one of fast, slow"
    assert (table["--sample-mode"]["default"], table["--sample-loud"]["default"]) == ("fast", "")


@dataclass(frozen=True)
class DiskKeys(declared.Checked):
    path: str = declare_key("", "Folder.")
    capacity_gb: float = declare_key(10.0, "Size.", low=0)
    sizes: tuple | None = declare_key(None, "Sizes.", parse=lambda text: tuple(text.split(":")))
    compress: bool = declare_key(False, "Whether pages are compressed.")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/data", DiskKeys("/data")),
        ("7", DiskKeys("7")),
        ("/data,capacity_gb=20", DiskKeys("/data", 20)),
        ("capacity-gb=2.5, compress=true", DiskKeys(capacity_gb=2.5, compress=True)),
        ("sizes=1:2,/a,/b", DiskKeys("/a,/b", sizes=("1", "2"))),
        ('{"path": "/data", "capacity_gb": 1}', DiskKeys("/data", 1)),
    ],
)
def test_one_flag_takes_a_head_and_keys_or_a_json_object(text: str, expected: DiskKeys) -> None:
    assert declared.keyed(DiskKeys, "path")(text) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("size=1", "unknown key 'size'; allowed keys: path"),
        ("capacity_gb=much", "key 'capacity_gb' must be float, got 'much'"),
        ("capacity_gb=-1", "key 'capacity_gb' must be at least 0, got -1"),
        ("compress=1", "key 'compress' must be bool"),
        ("{", "is not JSON"),
        ('{"compress": 1}', "key 'compress' must be bool"),
    ],
)
def test_a_key_that_is_wrong_is_refused_by_its_name(text: str, reason: str) -> None:
    with pytest.raises(CanopyError, match=reason):
        declared.keyed(DiskKeys, "path")(text)


def test_a_hidden_flag_is_accepted_and_absent_from_the_help() -> None:
    @dataclass(frozen=True)
    class Advanced:
        depth: int = declare(1, "--advanced-depth", "How deep.", hidden=True)

    parser = argparse.ArgumentParser()
    declared.add_flags(parser.add_argument_group("advanced"), Advanced)
    assert "depth" not in parser.format_help()
    assert declared.read(Advanced, parser.parse_args(["--advanced-depth", "3"])).depth == 3
    assert declared.table_rows(Advanced)[0]["flag"] == "--advanced-depth"
