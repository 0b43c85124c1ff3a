"""What is wrong with this machine or its network, and what to do about it.

run.py           looks, then checks: for a node that runs (which hands in a RunningNode), or alone
survey.py        asks peers how they see this machine; probes.py over connections of its own
observations.py  what was seen: records without I/O
checks/          what it means: a check is a function from observations to a finding, and a line
                 in the table of checks/__init__.py
report.py        findings, and the exit code
"""
