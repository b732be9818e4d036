"""The cost of a round, by which mode auto chooses.

turns.py        several ways to do the same work, measured side by side
pricing.py      what a round of each way costs
"""
