"""Files that a run names by their digest: its tokenizer, and the weights that it begins with.

wanted.py     which they are                  shelf.py      which of them are here, and where
provider.py   has all of them here before the trainer starts
fetching.py   gets one from peers             session.py    ... from one of them
giving.py     gives them to others
"""
