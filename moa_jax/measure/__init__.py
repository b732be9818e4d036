"""What decoding costs: statistics of runs, time and bytes of each phase, and how they are shown.

turns.py        several ways to do the same work, measured side by side
figures.py      statistics of measured runs; no arrays
phases.py       each phase of a round in a loop of its own, timed on real state
traffic.py      bytes that a phase reads, and how fast this device copies
simulate.py     a choice of tokens that accepts drafts with a given probability
random_pair.py  targets and drafters of any shape with random weights
pricing.py      what a round of each way costs, which mode auto chooses by
arrivals.py     clients who come by a Poisson law
bootstrap.py    how sure a tau is, by prompts and seeds
fidelity.py     how near a target is to a reference: to other weights, or to given logits
tables.py       tables                    report.py    the results of infer.bench
plot.py         pictures
"""
