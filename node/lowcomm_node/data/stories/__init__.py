"""Tiny stories from a grammar: text that a small model learns to write in minutes.

grammar.py   its rules: who, where, what went wrong, what helped
telling.py   a story from its number, and all of them as a source of text
words.py     their words as tokens

The stories of `builtin:stories` and their tokens never change, since signed runs name them: another
grammar needs another name.
"""
