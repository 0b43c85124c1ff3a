"""Meaning and remedy of each code of errors, refusals, waits, warnings and exchanges."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Explanation:
    """What a code means."""

    meaning: str
    remedy: str


def code_of(kind: type) -> str:
    """The code of a class of errors: ``NotRunning`` is ``not-running``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", kind.__name__.removeprefix("_")).lower()


@dataclass(frozen=True)
class Waiting:
    """What a node waits for, with its code."""

    code: str
    text: str


# Codes at the margin, each with its meaning, stand above the remedy that they share.
_TEXT = """
# phases
starting: The node has just started.
finishing: It saves, and ends the exchanges that are under way.
    Nothing: it takes seconds.
joining: It looks for the swarm, and for the run in it.
    If it lasts, check the network and the addresses after `--peers` with `lowcomm-node doctor`.
syncing: It gets files, text and the state of the run, or waits for the run's first peers.
    Nothing, while the figures move; on a slow line raise `--max-down`.
training: It trains, but alone, or without exchanges of its own; the sentence says why.
    Nothing, if it passes; else raise the limit that it names, or see `lowcomm-node peers`.
serving: It gives the run's packed text to others, and does not train.
    `lowcomm-node finish` ends it, if you need the machine.
restarting: The trainer failed, and is started again.
    Nothing, if it happens once; the warning says what failed.
paused: The owner, or a rule of the owner, holds it.
    `lowcomm-node resume`
finished: The run is over; the node serves its state to others.
    `lowcomm-node finish` ends it, if you need the machine.
left: The node has left the swarm.
    `lowcomm-node join` takes part again.

# waits
looking-for-swarm: The node calls the peers that it knows of the swarm.
    If it lasts, check the network and the addresses after `--peers` with `lowcomm-node doctor`.
swarm-silent: No peer of the swarm answers; the node trains on, and calls them again and again.
    Check the network; `lowcomm-node doctor` tries every address.
swarm-unlisted: Peers answer, but do not tell others of this node.
    Nothing, if it passes in minutes: the node publishes again. Else see `lowcomm-node doctor`.
looking-for-run: The swarm answers, but nobody has published the run.
    Correct `--run`, or ask the run's creator whether it is still published.
run-files: The node looks for the files of the run, and checks those that are here.
    Nothing: it takes as long as reading them.
fetching-file: A file of the run is fetched from peers, or no peer has it yet.
    Nothing, while the figures move; else get the file from the run's creator, and name it with
    `--tokenizer` or its folder with `--weights`.
text: Packed text is fetched from peers, or nobody has the piece that is needed.
    Nothing, while the figures move; else start a node that has the pack (`--data`), or name a
    `--mirror`.
starting-trainer: The trainer reads the text, builds the model, and loads the newest checkpoint.
    Nothing: a large model takes minutes.
tokenizing: The text is tokenized, once for this home.
    Nothing: the sentence says how long it still takes.
looking-for-peers: The node asks who takes part in the run, and how far they are.
pausing: The node saves, and then frees the memory of its trainer.
leaving: The node saves, and ends the exchanges that are under way.
    Nothing: it takes seconds.
copying-state: The swarm is ahead, so the node copies the state of its peers.
    Nothing, while the figures move; on a slow line raise `--max-down`.
first-peers: The run begins with more peers than are here.
    Start the others, or wait: after five minutes it begins with those that came.
evaluating: The model is measured on held-out text.
    Nothing: training goes on at once.
slow-disk: A checkpoint is still being written when the next one is due.
    Put the home on a faster disk, or save less often: raise `--checkpoint-every`.
nobody-alive: No other peer of the run is alive, so the node trains alone.
    Wait for others, or invite some; `lowcomm-node peers` lists who is there.
exchange-too-long: An exchange would take longer than the owner's limits allow: none begins.
    Raise the limit that the sentence names: `--exchange-deadline`, `--max-up` or `--max-down`.
far-from-peers: The node is far from most peers, though it has copied their state recently.
    Nothing: it copies their state again. A machine much slower than the others stays behind.
own-line: Contents of several peers did not come, so the line of this machine is to blame.
    `lowcomm-node ping PEER` measures the line.
not-applied: Several exchanges in a row have failed; training goes on with the next.
    Nothing, if it passes; else see the codes of the exchanges with `lowcomm-node exchanges`.
owner: The owner has paused the node.
    `lowcomm-node resume`
schedule: It is outside the hours that the owner gave.
    Wait, or change `--schedule`.
in-use: The machine is in use, and the node trains only while nobody uses it.
    Leave the machine alone for as long as the sentence says, or drop `--only-idle`.
program: A program runs during which the owner does not want it to train.
    End that program, or take it out of `--not-while`.
gpu-in-use: Another process computes on the GPU, or has done so in the last two minutes.
    Wait for its end, `lowcomm-node resume` to train beside it, or drop `--yield-to-gpu`.
lender-awaited: A machine of the owner that holds blocks of the model does not answer.
    Start `lowcomm-node lend` there, or see why its line is down; training goes on by itself.
gpu-hot: The GPU is hotter than the owner wants, and cools.
    Give it air, limit it by `--gpu-power` or `--duty`, or raise `--max-gpu-temp`.
battery: The machine runs on its battery, and the owner does not want that.
    Plug it in, or allow it with `--on-battery`.
trainer-failed: The trainer failed, and is started again after a while.
    Nothing, if it happens once; else do what the warning says.
serving-text: The node gives the run's packed text to others, and does not train.
    Nothing: it is as you wish; `lowcomm-node finish` ends it.
run-over: The run is over; the node hands its state to others.
    `lowcomm-node finish` ends it, if you need the machine.

# warnings
settings: A setting was given that means nothing here, and is ignored.
    Correct or drop what the sentence names; `lowcomm-node config` shows what holds.
gpu-power: The power of the GPU is not limited, so the node rests instead.
    Set the limit as root, as the sentence says, or drop `--gpu-power`.
device-lost: A device that the owner named can't be used, so the others train without it.
    Do what the sentence says; the node tries the device again from time to time.
run-chosen: Several published runs fit. The node has taken the one that the bootstrap server's
  operator serves, or the one with peers that answer.
    For another: `--run NAME@FINGERPRINT`.
run-ended: The peers of the run have trained it to its end, so there is nothing left to train.
    `lowcomm-node join --stay` copies the last state while anybody serves it.
started-alone: No peer answered at the start, so the node trains on what its home knows of the run.
    Check the network; `lowcomm-node doctor` tries every address.
clock: The clock of this machine differs from those of others, which will refuse its records.
    Set the clock; a network time service keeps it right.
identity-in-use: Another process takes part under the identity of this node: peers confuse them.
    End one of them, or give one a `--home` of its own; a copied home needs another `identity.key`.
amendment: The run's creator has changed it in a way that this release can't follow.
    Install the release that the creator names.
tokenizer-unchecked: The run does not say which tokenizer it uses.
    Compare the SHA-256 of your file with that of the run's creator.
file-refused: A peer gave a file that is not the run's; nothing of it is used.
    Nothing: the node asks others.
mirror-refused: A mirror of packed text can't be used, or gave something else.
    Correct `--mirror`, or leave it away: peers send the text, too.
piece-skipped: Nobody gave a piece of packed text for ten minutes, so it is not read in this epoch.
    Start a node that has the pack (`--data`), or name a `--mirror`.
text-missing: Packed text comes slowly, or nobody gives it, so what is here is read again.
    Start a node that has the pack (`--data`), or name a `--mirror`: all goes on by itself.
few-peers: Fewer peers came than the run begins with.
    Nothing: others may join later.
too-many-peers: More peers are alive than the run is for, so exchanges are less useful.
    Ask the run's creator for more cells, or train elsewhere.
not-taken: A peer does not take this node into the run.
    Ask the run's creator for an invite, or why it was removed.
record-not-published: The record with this node's address was not published; it is tried again.
    Nothing, while it is rare; else check the network with `lowcomm-node doctor`.
not-kept: The home could not keep what is known of invites and removals.
journal: The journal can't be written; training goes on without it.
    Free some space, and see that the home can be written.
defect: This program has a defect; the node goes on.
    Please report it with the log.
state-not-copied: Copying the state of peers failed; it is tried again.
    Nothing, if it passes; else free some space, or raise `--max-disk` or `--max-down`.
state-old: Copying took so long that the swarm is far ahead again.
    Raise `--max-down` if you can: the copy must be faster than the swarm trains.
no-donor: No peer could hand over its state, so the node begins from its own.
    Nothing: merges bring it closer to the others.
donor-left-out: A peer handed over a state that can't be right; it is not asked again.
    Nothing: others are asked.
drifted: The weights are too far from those of most peers for merges to bring them back.
    Nothing: the node copies the state of others. If it happens often, the machine is too slow, or
    others train on other text.
kept-waiting: A peer begins exchanges and then sends nothing, or too slowly.
    Nothing: it is left out for longer each time. If the run is by invite, remove the peer.
trainer-failed: The trainer failed, and is started again from the newest checkpoint.
    Do what the sentence says; where memory ran out, lower `--max-memory` or `--micro-batch`.
checkpoint-skipped: A checkpoint is damaged, so an older one was taken.
    `lowcomm-node checkpoint verify` says which are sound; check the disk.
not-saved: Checkpoints can't be written; training goes on.
    Free some space, or raise `--max-disk`: the node goes on by itself.

# exchanges
nobody-training: Nobody else was training.
    Wait for others; `lowcomm-node peers` lists who is there.
no-partner: No peer took part, each for a reason of its own.
    Nothing, if it passes; `lowcomm-node exchanges` tells the reason of each.
unanswered: A peer did not answer in time.
lost: The stream to a peer broke off, or could not be opened.
    Nothing, while it is rare; `lowcomm-node peers` shows routes, docs/trouble.md mends them.
gave-up: A peer gave up the exchange, and said why.
    Nothing: the fragment is exchanged with another peer.
gave-way: A caller's exchange took longer than usual, and one of our own was due.
    Nothing: our own begins at once.
late: Something did not come before the deadline.
too-slow: The exchange would take longer than the owner of one end allows.
    Raise `--exchange-deadline` on the end that the sentence names, or `--max-up` and `--max-down`.
unusable: A contribution can't be decoded, or is implausible; nothing of it was applied.
    Nothing: the peer loses standing, and is left out if it goes on.
violated: A peer did what the protocol does not allow.
    Nothing: it is held against the peer.
minority: Most of the group were there and took no part at that moment.
    Nothing, while it is rare: a part of the group leaves the exchange to the rest.
disagreed: The members did not agree on who takes part, or on what they hold.
    Nothing, while it is rare: streams broke off at an unlucky moment.
stopped: This node stopped: it leaves, pauses, copies a state, or its trainer failed.
removed: The run's creator has removed a member.
crossed: Both called at the same moment, and the other call goes on.
    Nothing.
own-fault: The trainer of this node could not do its part.
    See the warnings and the log; check memory if it happens again.
busy: It exchanges this fragment with another peer.
too-soon: It merged this fragment a few steps ago.
full: It holds as many contributions as it can.
not-training: It does not train now.
    Nothing: it is met again at a later exchange.
other-protocol: It speaks another version of the protocol.
other-plan: It cuts the model in another way.
other-codec: It uses another codec.
unknown-fragment: It does not know this fragment.
    Upgrade the older of the two nodes.
other-run: It takes part in another run.
    Check that both ends name the same run with `--run`.
implausible-step: A peer claims a swarm step that no other peer supports.
    Nothing, if it passes: it copies the state of others when it has fallen behind.
not-allowed: It did not know the caller yet.
    Nothing: peers learn of each other within a minute.
not-trusted: It leaves the other out for a while, after contributions that it could not use.
    Nothing, for a stranger; if it is your own node, see whether it trains on other text.

# errors
lowcomm-error: Something failed in a way that has no kind of its own.
    Do what the line says.
node-error: Something on this machine failed in a way that has no kind of its own.
    Do what the line says; `lowcomm-node doctor` looks at the whole machine.
not-running: A command needs the node of this home, and none answers.
    Start it with `lowcomm-node join`, or name its home with `--home`.
unhealthy: The node answers, but something that it needs does not work.
    `lowcomm-node doctor` says what, and what to do.
incompatible: This release or this machine can't take part in that run.
    Install the release, or the extra, that the line names.
no-peers: Nobody of the run can be reached.
    Check the network and the address after `--peers`; `lowcomm-node ping ADDRESS` tries it.
not-admitted: The run does not take this peer: it is not listed, not invited, or was removed.
    Send the peer id that `lowcomm-node id` shows to the run's creator, or ask for an invite.
config-error: An option, a setting or a path is wrong.
    Correct the value that the line names; `lowcomm-node config` shows all and their sources.
data-error: The training text is missing, malformed or too short.
    Name other text with `--data`; docs/node.md says what a node reads.
checkpoint-error: A saved state is missing, damaged, or not what was expected.
    `lowcomm-node checkpoint verify` says which are sound; an older one is taken by itself.
trainer-error: The trainer process failed, or can't do what it was asked.
    The node starts it again by itself; if it gives up, its last lines say why.
trainer-lost: The trainer process has died, or does not answer.
    The node starts it again from the newest checkpoint; check memory if it happens again.
diverged: Many inner steps in a row gave no finite gradients.
    The node goes one checkpoint back. If it repeats, tell the creator: the learning rate is high.
not-finite: Weights or moments hold NaN or infinity: they are never saved, sent or loaded.
    The node goes back to a sound checkpoint by itself.
unusable: A contribution can't be decoded, or is implausible; nothing of it was applied.
    Nothing: the peer loses standing, and is left out if it goes on.
link-lost: A stream to a peer broke off, or can't be opened; it costs one exchange.
    Nothing, where it is rare; `lowcomm-node peers` shows routes, docs/trouble.md mends them.
peer-gave-up: The peer gave up an exchange, and said why.
    Nothing: the fragment is exchanged with another peer.
mirror-refused: A mirror of packed text can't be used, or gave something else.
    Correct `--mirror`, or leave it away: peers send the text, too.
too-slow: A contribution would not come before the deadline of the exchange.
    Raise `--exchange-deadline`, or the limits `--max-up` and `--max-down` of the slower end.
retry-later: Nothing is wrong, only the moment.
    Repeat the same command later.
disk-full: A folder has no room; what was there before is untouched.
    Free some space, or raise `--max-disk`: the node goes on by itself.
port-in-use: Another program holds an address that this node is to use.
    End that program, or choose another port.
ended-mute: libp2p's process ended without a word.
    Start the node again; `lowcomm-node doctor` checks the program.
spec-error: A run specification is not valid, or settings do not fit together.
    Correct the setting that the line names (docs/specification.md).
version-error: A peer, a record or a run is of another protocol version.
    Install the release that the run's creator names; `lowcomm-node --version` tells yours.
signature-error: A signature, a fingerprint or a peer id does not match.
    Copy it again, as a whole; if it still fails, do not trust where it came from.
record-error: A record is malformed, stale, or claims too long a life.
    Nothing, if it is a stranger's; if it is yours, set the clock of this machine.
admission-error: A peer may not take part in the run.
    Ask the run's creator for an invite.
plan-error: The model can't be cut into fragments as the run says.
    The run's creator chooses another number of `fragments`, or another `pattern`.
codec-error: A codec can't take the bytes or values that it got.
    Nothing, if they came from a peer: the exchange failed, and no more.
implausible-error: A contribution is valid, but far from what honest peers send.
    Nothing: it was left out, and is held against the peer.
protocol-violation: A peer did what the protocol does not allow.
    Nothing: it is held against the peer. Tell its author if it is a client of your own.

# refusals
too-large: It has more bytes than allowed.
malformed: It can't be read.
bad-signature: Its signature does not match.
lives-too-long: It claims to be valid for longer than allowed.
misplaced: It was signed for another peer, run or place.
replayed: It was used before.
missing: A call came without a credential.
    Nothing, while these are few: others send them.
other-version: It is of another protocol version.
    Upgrade the older of the two nodes.
expired: Its time is over.
from-the-future: It was made in the future.
    Set the clocks of both machines; a network time service keeps them right.
too-many: One peer or address asked for more than its share.
    If it was yours, put fewer nodes behind one address.
other-certificate: A peer showed another certificate than its record names.
    Nothing, while it is rare: it has just restarted, or another machine stands between.
not-invited: The run is for invited peers.
    Ask the run's creator: `lowcomm-node invite` makes one.
invite-expired: The invite is too old.
invite-used-up: The invite was used as often as it may be.
    Ask the run's creator for a new one.
not-listed: The peer is not on the run's list.
    Send the creator the peer id that `lowcomm-node id` shows.
removed: The run's creator has removed the peer.
    Ask the creator why; nothing else helps.
"""
_ENTRY = re.compile(r"((?:^\S+: .*\n(?:^ {2}\S.*\n)*)+)((?:^ {4}.*\n)+)", re.MULTILINE)
_MEANING = re.compile(r"^(\S+): (.*(?:\n {2}\S.*)*)", re.MULTILINE)


def _read(table: str) -> Iterator[tuple[str, Explanation]]:
    for codes, remedy in _ENTRY.findall(table):
        for code, meaning in _MEANING.findall(codes):
            yield code, Explanation(" ".join(meaning.split()), " ".join(remedy.split()))


CATALOGUE: Mapping[str, Mapping[str, Explanation]] = {
    kind: dict(_read(table)) for kind, table in re.findall(r"# (\w+)\n([^#]+)", _TEXT)
}
"""Explanations by kind and code. Codes stay as they are: scripts name them."""
