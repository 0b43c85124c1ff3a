"""What is wrong with this machine or its network, and what to do about it.

run.py looks, asks peers how they see this machine, then checks. findings.py has what was seen, and
what it means. A check (checks.py) is a function from observations to a finding.
"""
