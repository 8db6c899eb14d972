"""The independent judge of capture: every class of transformers and timm, built small and looked at by other means.

catalogue.py names the classes, shrink.py makes their configurations small, inputs.py what they take, build.py both;
spy.py sees the truth, matching.py, changes.py and claims.py hold a trace to it, judge.py gives one verdict a class,
run.py judges many in processes of their own, report.py writes docs/coverage.md. None of it uses code of attnflow but
`attnflow.capture`.
"""
