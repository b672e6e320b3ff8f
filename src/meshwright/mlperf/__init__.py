"""MLPerf-Training-shaped benchmarks: rules as data, logs, checks, scores, reference convergence points, packages.

benchmarks.py  rules of a benchmark in a round, read from data/benchmarks/*.toml
log.py         records of a result file
check.py       our rules over one log and over a set; official.py runs the checkers of `mlperf-logging`
score.py       olympic mean, reference-convergence test, normalization
"""
