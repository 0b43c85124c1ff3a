"""What a proof of work costs: one volunteer, and a thousand Sybils.

    nice python benchmarks/work.py [--identities 1000] [--bits 3]

Counts time of the processor, not of the clock, so that other work on the machine does not show.
Finds proofs for so many identities indeed, at few bits, and reckons the other rows from it: each
bit doubles the cost. Prints and writes (out/work.json).
"""

import time
from itertools import count
from pathlib import Path

import kit

from lowcomm_protocol.errors import AdmissionError
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.peers.admission import Rules
from lowcomm_protocol.work import MAX_BITS, WEEK, Proof, week_of, zero_bits

RUN = "ab" * 32
SHOWN = (4, 8, 10, 12, 14, MAX_BITS)
UNLUCKY = 3.0
"""One in twenty needs three times the usual: -log(0.05)."""


def find(peer_id: str, week: int, bits: int) -> tuple[Proof, int]:
    """A proof, and how many hashes it took."""
    for nonce in count():
        proof = Proof(week, nonce)
        if zero_bits(RUN, peer_id, proof) >= bits:
            return proof, nonce + 1
    raise AssertionError("unreachable")


def main() -> None:
    """Measure and print."""
    parser = kit.parser(__doc__)
    parser.add_argument("--identities", type=int, default=1000)
    parser.add_argument("--bits", type=int, default=3)
    parser.add_argument("--out", type=Path, default=kit.OUT / "work.json")
    arguments = parser.parse_args()
    now = 2950 * WEEK + 1000.0
    rules = Rules(RUN, creator="", work=arguments.bits)
    peers = [
        Identity(number.to_bytes(32, "big")).peer_id
        for number in range(1, arguments.identities + 1)
    ]
    began, hashes, proofs = time.process_time(), 0, list[bytes]()
    for peer in peers:
        proof, tried = find(peer, week_of(now), arguments.bits)
        proofs.append(proof.to_bytes())
        hashes += tried
    found = time.process_time() - began
    began = time.process_time()
    for number, (peer, proof) in enumerate(zip(peers, proofs, strict=True)):
        rules.check(peer, proof, now + number)
    checked = (time.process_time() - began) / len(peers)
    refused = refuse(rules, peers[0], now)
    one = found / hashes
    print(kit.machine())
    print(
        f"{arguments.identities} identities at {arguments.bits} bits: {hashes} hashes, {found:.1f} "
        "CPU s"
    )
    print(
        f"a hash {one * 1e3:.2f} ms; to check a good proof {checked * 1e3:.2f} ms, a bad one "
        f"{refused * 1e3:.2f} ms"
    )
    print(
        f"{'bits':>4}  {'usual, CPU s':>12}  {'1 in 20 more than':>17}  "
        f"{'1,000 identities, CPU h':>23}"
    )
    rows = []
    for bits in SHOWN:
        usual = one * 2**bits
        rows.append(
            {
                "bits": bits,
                "usual_s": usual,
                "unlucky_s": UNLUCKY * usual,
                "thousand_h": usual * 1000 / 3600,
            }
        )
        print(f"{bits:4}  {usual:12.1f}  {UNLUCKY * usual:17.1f}  {usual * 1000 / 3600:23.2f}")
    figures = {
        "hash_s": one,
        "found_s": found,
        "hashes": hashes,
        "checked_s": checked,
        "refused_s": refused,
    }
    kit.write(
        arguments.out, {**vars(arguments), "out": str(arguments.out), **figures, "rows": rows}
    )


def refuse(rules: Rules, peer: str, now: float) -> float:
    """CPU seconds that a bad proof costs the refuser."""
    began, tried = time.process_time(), 50
    for number in range(tried):
        try:
            rules.check(peer, Proof(week_of(now), 2**63 + number).to_bytes(), now + 10_000 + number)
        except AdmissionError:
            continue
    return (time.process_time() - began) / tried


if __name__ == "__main__":
    main()
