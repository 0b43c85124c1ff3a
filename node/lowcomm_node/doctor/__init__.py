"""What is wrong with this machine or its network, and what to do about it.

    examining.py   looks at all of it, for a node that runs and for none ──► case.py ──► judging.py ──► findings.py

machine.py   looks at disk, memory, GPU, TCP           resources.py   ... judged
survey.py    asks others how they see us (probing/),   reach.py       ... judged, nat.py: what kind of router is in between
             over UDP and IPv6 by scouts.py            sights.py      what they told
advice.py    remedies, with this machine's own values
"""
