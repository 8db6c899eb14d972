"""The experiments: the paper's own and ours, each one command that writes down what it found.

A study is one file here: a function that takes where the data are and returns a `Record`; `attnflow study` runs it.
"""
