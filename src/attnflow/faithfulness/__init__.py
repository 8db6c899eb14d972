"""Tests of faithfulness: does the model's output depend on what a method calls relevant?

`score` shows the model as a function of which tokens are kept, `metrics` measures a relevance against it, and `run`
does so over a data set. The package is not called evaluate, which is the name of the public function.
"""
