"""Errors, by the code that their class gives them."""

from collections.abc import Mapping

from lowcomm_node.catalogue.message import Message

ERRORS: Mapping[str, Message] = {
    "lowcomm-error": Message(
        "Something failed in a way that has no kind of its own.", "Do what the line says."
    ),
    "node-error": Message(
        "Something on this machine failed in a way that has no kind of its own.",
        "Do what the line says; `lowcomm-node doctor` looks at the whole machine.",
    ),
    "not-running": Message(
        "A command needs the node of this home, and none answers.",
        "Start it with `lowcomm-node join`, or name its home with `--home`.",
    ),
    "unhealthy": Message(
        "The node answers, but something that it needs does not work.",
        "`lowcomm-node doctor` says what, and what to do.",
    ),
    "incompatible": Message(
        "This release or this machine can't take part in that run.",
        "Install the release, or the extra, that the line names.",
    ),
    "no-peers": Message(
        "Nobody of the run can be reached.",
        "Check the network and the address after `--peers`; `lowcomm-node ping ADDRESS` tries it.",
    ),
    "not-admitted": Message(
        "The run does not take this peer: it is not listed, not invited, or was removed.",
        "Send the peer id that `lowcomm-node id` shows to the run's creator, or ask for an invite.",
    ),
    "config-error": Message(
        "An option, a setting or a path is wrong.",
        "Correct the value that the line names; `lowcomm-node config` shows all and their sources.",
    ),
    "data-error": Message(
        "The training text is missing, malformed or too short.",
        "Name other text with `--data`; docs/text.md says what a node reads.",
    ),
    "checkpoint-error": Message(
        "A saved state is missing, damaged, or not what was expected.",
        "`lowcomm-node checkpoint verify` says which are sound; an older one is taken by itself.",
    ),
    "trainer-error": Message(
        "The trainer process failed, or can't do what it was asked.",
        "The node starts it again by itself; if it gives up, its last lines say why.",
    ),
    "trainer-lost": Message(
        "The trainer process has died, or does not answer.",
        "The node starts it again from the newest checkpoint; check memory if it happens again.",
    ),
    "diverged": Message(
        "Many inner steps in a row gave no finite gradients.",
        "The node goes one checkpoint back; if it happens again, the run's learning rate is too "
        "high: tell its creator.",
    ),
    "not-finite": Message(
        "Weights or moments hold NaN or infinity: they are never saved, sent or loaded.",
        "The node goes back to a sound checkpoint by itself.",
    ),
    "unusable": Message(
        "What a peer contributed can't be decoded, or is implausible; nothing of it was applied.",
        "Nothing: the peer loses standing, and is left out if it goes on.",
    ),
    "link-lost": Message(
        "A stream to a peer broke off, or can't be opened; it costs one exchange.",
        "Nothing, where it is rare; `lowcomm-node peers` shows routes, docs/reach.md mends them.",
    ),
    "gave-up": Message(
        "The peer gave up an exchange, and told why.",
        "Nothing: the fragment is exchanged with another peer.",
    ),
    "too-slow": Message(
        "What a peer sends would not come before the deadline of the exchange.",
        "Raise `--exchange-deadline`, or the limits `--max-up` and `--max-down` of the slower end.",
    ),
    "other-certificate": Message(
        "Somebody else answers at a peer's address.",
        "Nothing: the node asks again where that peer is.",
    ),
    "forgotten": Message(
        "The other end of a tunnel does not know the session any more.",
        "Nothing: the node opens a new one.",
    ),
    "turn-over": Message(
        "Others wait at a peer that has served us its state for long.",
        "Nothing: the node queues again, and goes on where it was.",
    ),
    "retry-later": Message(
        "Nothing is wrong, only the moment.",
        "Repeat the same command later.",
    ),
    "disk-full": Message(
        "A folder has no room; what was there before is untouched.",
        "Free some space, or raise `--max-disk`: the node goes on by itself.",
    ),
    "port-in-use": Message(
        "Another program holds an address that we were told to use.",
        "End that program, or choose another port.",
    ),
    "ended-mute": Message(
        "libp2p's process ended without a word.",
        "Start the node again; `lowcomm-node doctor` checks the program.",
    ),
    "spec-error": Message(
        "A run specification is not valid, or settings do not fit together.",
        "Correct the setting that the line names (docs/specification.md).",
    ),
    "version-error": Message(
        "A peer, a record or a run is of another protocol version.",
        "Install the release that the run's creator names; `lowcomm-node --version` tells yours.",
    ),
    "signature-error": Message(
        "A signature, a fingerprint or a peer id does not match.",
        "Copy it again, as a whole; if it still fails, do not trust where it came from.",
    ),
    "record-error": Message(
        "A record is malformed, stale, or claims too long a life.",
        "Nothing, if it is a stranger's; if it is yours, set the clock of this machine.",
    ),
    "admission-error": Message(
        "A peer may not take part in the run.",
        "Ask the run's creator for an invite.",
    ),
    "plan-error": Message(
        "The model can't be cut into fragments as the run says.",
        "The run's creator chooses another number of `fragments`, or another `pattern`.",
    ),
    "codec-error": Message(
        "A codec can't take the bytes or values that it got.",
        "Nothing, if they came from a peer: the exchange failed, and no more.",
    ),
    "implausible-error": Message(
        "A contribution is valid, but far from what honest peers send.",
        "Nothing: it was left out, and is held against the peer.",
    ),
    "protocol-violation": Message(
        "A peer did what the protocol does not allow.",
        "Nothing: it is held against the peer. Tell its author if it is a client of your own.",
    ),
}
