"""What a run costs on a line, before it begins; and the run.toml that `init` writes.

line.py      the line, the peers, and a model with a number of parameters
pace.py      bytes and seconds of one exchange, and the interval that results
plan.py      what was measured (measured.json), each method, and which one to take
words.py     the same for people
run_template.py  the run.toml
"""
