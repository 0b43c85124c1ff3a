"""What is wrong with this machine or its network, and what to do about it.

run.py looks, then checks: for a node that runs, or alone. survey.py
asks peers how they see this machine. findings.py has what was seen, and what it means: a check
(checks.py, machine.py) is a function from observations to a finding.
"""
