"""What must hold for units: what owners write means what they think, and what could mean two things
is refused."""

import re

import pytest

from lowcomm_node.system.units import (
    LEAST_RATE,
    read_duration,
    read_rate,
    read_size,
)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("20Mbit", 2.5e6),
        ("20 Mbit/s", 2.5e6),
        ("2.5MB", 2.5e6),
        ("2.5MB/s", 2.5e6),
        ("800kbit", 1e5),
        ("1Gbit", 1.25e8),
        ("1MiB", 2.0**20),
        ("1Mibit", 2.0**17),
        (" 9000B ", 9000.0),
        ("64kbit", LEAST_RATE),
    ],
)
def test_bits_and_bytes_are_told_apart(text: str, rate: float) -> None:
    assert read_rate(text) == rate


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("20", "20 of what? Write 20Mbit or 20MB"),
        ("20Mb", "write 20Mbit or 20MB"),
        ("20mb", "write 20Mbit or 20MB"),
        ("20Mbps", "write 20Mbit or 20MB"),
        ("20mbit", "write 20Mbit"),
        ("20MBit", "write 20Mbit"),
        ("5kb", "write 5kbit or 5kB"),
        ("5mib", "write 5Mibit or 5MiB"),
        ("20 apples", "write 20Mbit or 20MB"),
        ("63kbit", "at least 64kbit"),
        ("0Mbit", "at least 64kbit"),
        ("-5Mbit", "such as 20Mbit"),
        ("1e9Mbit", "such as 20Mbit"),
        ("nanMbit", "such as 20Mbit"),
        ("Mbit", "such as 20Mbit"),
        ("", "such as 20Mbit"),
        ("None", "such as 20Mbit"),
    ],
)
def test_what_could_mean_two_things_is_refused_with_what_to_write(text: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=re.escape(remedy)):
        read_rate(text)


@pytest.mark.parametrize(
    ("text", "size"), [("4GiB", 2**32), ("500MB", 500_000_000), ("17", 17), ("1.5kB", 1500)]
)
def test_sizes_are_bytes(text: str, size: int) -> None:
    assert read_size(text) == size


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("4Gbit", "write 4GB"),
        ("4G", "write 4GB"),
        ("4gib", "write 4GiB"),
        ("1.5", "Write 1.5MB or 1.5MiB"),
        ("lots", "such as 4GiB"),
    ],
)
def test_a_size_in_bits_or_without_a_sense_is_refused(text: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=re.escape(remedy)):
        read_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90.0),
        ("30m", 1800.0),
        ("2h", 7200.0),
        ("1h30m", 5400.0),
        ("1d", 86400.0),
        (" 5m ", 300.0),
    ],
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert read_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("30", "write 30m or 30h"),
        ("", "not a duration such as 90s, 30m, 2h or 1h30m"),
        ("30 minutes", "not a duration"),
        ("30M", "not a duration"),
        ("1.5h", "not a duration"),
        ("-5m", "not a duration"),
        ("30m2h", "not a duration"),
        ("0m", "no time at all"),
        ("9999999s", "not a duration"),
    ],
)
def test_what_is_no_duration_is_refused(text: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=re.escape(remedy)):
        read_duration(text)
