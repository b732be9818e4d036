"""What decoding costs: figures of runs, time and bytes of each phase, pairs without files.

figures.py      statistics of measured runs; no arrays
phases.py       each phase of a round in a loop of its own, timed on real state
traffic.py      bytes that a phase reads, and how fast this device copies
simulate.py     a choice of tokens that accepts drafts with a given probability
random_pair.py  targets and drafters of any shape with random weights
tuned.py        the fastest draft found for a device, stored beside its drafter
"""
