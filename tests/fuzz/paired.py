"""Machines of a household: what a stranger says to be paired, what a lender answers, and what a
home keeps of both."""

from unittest.mock import patch

from stored import folder
from target import Made, cut, join, target

from lowcomm_node.errors import ConfigError, LinkLost
from lowcomm_node.household import pairing
from lowcomm_node.household.link import Reply
from lowcomm_node.household.machines import Household, Machine
from lowcomm_node.household.pairing import (
    MAX_TRIES,
    Codes,
    Consent,
    Hello,
    Proposal,
    propose,
    read,
    read_code,
)

CODE = "0123-4567-89AB-CDEF"


@target
def pairing_lines() -> Made:
    """What strangers answer a lender that shows a code: who has it is paired, once."""
    lender, head = Household(folder()), Household(folder())
    hello = Hello(name="lender", key=lender.key, nonce="ab" * 32)
    wrong, right = (propose(head, read_code(code), hello)[0] for code in ("0" * 16, CODE))

    def run(data: bytes) -> None:
        codes, paired, wrongs = Codes(lambda code: None), 0, 0
        with patch.object(pairing, "draw_code", lambda: CODE):
            codes.renew(0.0)
        for line in cut(data):
            try:
                found, _ = codes.check(hello, line, 1.0)
            except LinkLost as error:
                assert len(str(error)) < 200
                wrongs += "another code" in str(error)
            else:
                paired += 1
                said = Proposal.model_validate_json(line)
                assert (said.key, said.nonce, said.proof) == (head.key, right.nonce, right.proof)
                assert found == Machine(name=said.name, key=head.key)
        assert paired <= 1 and wrongs <= MAX_TRIES
        assert codes.is_shown(1.0) == (not paired and wrongs < MAX_TRIES)

    no, yes = (one.model_dump_json().encode() for one in (wrong, right))
    return run, [join(yes), join(no, yes, yes), join(*[no] * 11, yes), join(yes[:-1], b"{}")]


@target
def household_messages() -> Made:
    """A line of a lender, or of a machine that says it is one."""
    messages = (
        Reply(),
        Reply(refusal="It computes for another head."),
        Hello(name="lender", key=Household(folder()).key, nonce="ab" * 32),
        Consent(proof="cd" * 32),
    )

    def run(data: bytes) -> None:
        kind = type(messages[data[0] % len(messages)] if data else messages[0])
        try:
            found = read(kind, data[1:])
        except LinkLost as error:
            assert len(str(error)) < 200
            return
        assert read(kind, found.model_dump_json().encode()) == found

    return run, [
        bytes([place]) + one.model_dump_json().encode() for place, one in enumerate(messages)
    ]


@target
def household_file() -> Made:
    """The file of paired machines: they are read as they were, or it is called damaged."""
    home = folder()
    household = Household(home)
    file = home / "household.json"
    household.add(Machine(name="head", key=household.key))
    one = file.read_bytes()
    household.add(Machine(name="lender", key=household.key, address="192.168.1.20:31340"))

    def run(data: bytes) -> None:
        file.write_bytes(data)
        try:
            machines = household.machines()
        except ConfigError as error:
            assert "is damaged" in str(error)
            return
        assert len(household.heads()) <= len(machines)

    return run, [one, file.read_bytes(), one[:-9]]
