"""What a node says where something does not go on: a code, a sentence and a remedy for each.

message.py   what an entry is, and the codes
errors.py    errors that end a command, or an exchange
refusals.py  why a record, a call or a connection is refused
waits.py     why a node does not train, or trains alone
exchanges.py why an exchange was not applied
warnings.py  what its owner should know
tables.py    all of them

`docs/messages.md` is written from these (`make tables`); a test fails where one is missing. Codes
stay as they are: scripts and pages of help name them.
"""
