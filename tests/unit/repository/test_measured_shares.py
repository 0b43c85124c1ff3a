"""What `plan` knows of methods is what the committed results say."""

from helpers.scripts import load_benchmark


def test_the_shares_that_the_package_brings_are_those_of_the_results() -> None:
    script = load_benchmark("measured_shares")
    assert script.OUT.read_text() == script.content(), "run `python benchmarks/measured_shares.py`"
